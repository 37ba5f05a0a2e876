"""`penstock replay train`: trains recorded steps again. The run's topics are only read."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustRun, emit, notify, reading, refuse_folder

if TYPE_CHECKING:
    from penstock.pipeline.replay.overrides import WhatIf
    from penstock.pipeline.replay.recording import Recording
    from penstock.pipeline.replay.steps import ReplayRequest

MODEL = "Directory with the model's config.json, if it is not model.path; the weights are in the log."


def train(
    run: RunOrFolder,
    *,
    from_step: Annotated[int, typer.Option("--from-step", min=0, metavar="A", help="First step that is compared.")] = 0,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, metavar="B", help="Last step; the newest one if absent.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Train the same groups with another setting; repeatable.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Train new steps as well, until the run is closed.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a difference and print how the weights drift.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help=MODEL)] = None,
    export: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the final model of a replay with --set.")] = None,
    mlflow: Annotated[
        bool | None,
        typer.Option("--mlflow/--no-mlflow", help="Log a replay with --set as a child run in MLflow; as the run if absent."),
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Train a run's recorded steps again, without other workers, and compare every bit; with --set, train them with a change."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.overrides import what_if
    from penstock.pipeline.replay.recording import Recording, prepare, with_model
    from penstock.pipeline.runtime.registration.trust import Trust, keys_of, require_trusted, user_code

    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        if follow:
            refuse_folder(log, "--follow")
        recording = Recording.open(log, run_id)
        try:
            if model is not None:
                recording.config = with_model(recording.config, model.resolve())
            chosen = what_if(recording.config, overrides or [])
            if overrides and not chosen.changed:
                notify(f"--set changes nothing: {recording.run} was trained with these settings")
            is_what_if = bool(chosen.changed) or (recording.over and not recording.steps)
            if export is not None and not is_what_if:
                raise ConfigError("--export is for a what-if; the recorded weights of the run are in its topics and in runs/RUN/model")
            if mlflow and not is_what_if:
                raise ConfigError("--mlflow is for a what-if: add --set")
            if keep_going and is_what_if:
                raise ConfigError("--keep-going is for an exact replay: a what-if compares no bits")
            code = user_code(chosen.config, sections=("algorithm", "trainer"), overridden=keys_of(overrides or []))
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify, code=code)
            prepare(chosen.config)
            from penstock.pipeline.replay.steps import ReplayRequest  # imports torch, which reads the environment then

            request = ReplayRequest(from_step=from_step, to_step=to_step, follow=follow, keep_going=keep_going)
            if is_what_if:
                logged = recording.config.mlflow.enabled if mlflow is None else mlflow
                return _what_if(recording, chosen, request, export=export, mlflow=logged, json=json)
            return _exact(recording, request, json=json)
        finally:
            recording.close()


def _exact(recording: "Recording", request: "ReplayRequest", *, json: bool) -> int:
    from penstock.pipeline.replay.verify import ReplayResult, as_text, replay

    result = ReplayResult(recording.run)
    try:
        replay(recording, request, result=result, notify=notify)
    except KeyboardInterrupt:
        notify(f"stopped after {result.steps} steps")
        if result.steps:
            emit(result.as_json()) if json else print(as_text(result))
        raise
    emit(result.as_json()) if json else print(as_text(result))
    return 0 if result.first is None else 1


def _what_if(recording: "Recording", chosen: "WhatIf", request: "ReplayRequest", *, export: Path | None, mlflow: bool, json: bool) -> int:
    from penstock.pipeline.replay.what_if import WhatIfResult, child_run, table
    from penstock.pipeline.replay.what_if import train as train_alternative

    result = WhatIfResult(recording.run, chosen.changed)
    try:
        curves = child_run(recording, chosen, result, enabled=mlflow, notify=notify)
        train_alternative(recording, chosen, request, result=result, curves=curves, export=export, notify=notify)
    finally:
        if result.whole or (result.steps and sys.exc_info()[0] is KeyboardInterrupt):
            emit(result.as_json()) if json else print(table(result))
    return 0
