"""`penstock replay`: do a stage of a run again, from its log. The rule: the run's own topics are only read."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.common import Bootstrap, Json, Run, Security, at, emit, say
from pipeline.cli.redrawing import rollout
from pipeline.cli.rescoring import score

if TYPE_CHECKING:
    from pipeline.replay.changes import WhatIf
    from pipeline.replay.exact import Asked
    from pipeline.replay.recording import Recording

app = typer.Typer(help="Do a stage of a run again, from its log: unchanged, to see that it is the same, or changed, to see what if.")

app.command()(rollout)
app.command()(score)

MODEL = "A directory with the model's config.json, if not where the configuration says; the weights are in the log."


@app.command()
def train(
    run: Run,
    *,
    from_step: Annotated[int, typer.Option("--from-step", min=0, metavar="A", help="The first step that is compared.")] = 0,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, metavar="B", help="The last one; all there are if absent.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="A what-if: train the same groups under another setting; repeatable.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes until the run is closed.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a difference and show how the weights drift.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help=MODEL)] = None,
    export: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the model that a what-if ends in.")] = None,
    mlflow: Annotated[
        bool | None, typer.Option("--mlflow/--no-mlflow", help="Whether a what-if becomes a child run in MLflow; as the run if absent.")
    ] = None,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Train a run's recorded plans again, without any other worker, and compare every bit; with --set, see what if."""
    from pipeline.config import ConfigError
    from pipeline.replay.changes import what_if
    from pipeline.replay.recording import Recording, prepare, with_model
    from pipeline.runs import resolve

    with at(bootstrap, security) as log:
        recording = Recording.open(log, resolve(log, run))
        try:
            if model is not None:
                recording.config = with_model(recording.config, model.resolve())
            chosen = what_if(recording.config, overrides or [])
            if overrides and not chosen.changed:
                say(f"--set changes nothing: {recording.run} was trained with these settings")
            is_what_if = bool(chosen.changed) or (recording.over and not recording.steps)
            if export is not None and not is_what_if:
                raise ConfigError("--export is for a what-if; the recorded weights of the run are in its topics and in runs/RUN/model")
            if mlflow and not is_what_if:
                raise ConfigError("--mlflow is for a what-if: add --set")
            if keep_going and is_what_if:
                raise ConfigError("--keep-going is for an exact replay: a what-if compares no bits")
            prepare(chosen.config)
            from pipeline.replay.exact import Asked  # imports torch, which reads the environment then

            asked = Asked(from_step=from_step, to_step=to_step, follow=follow, keep_going=keep_going)
            if is_what_if:
                wanted = recording.config.mlflow.enabled if mlflow is None else mlflow
                return _what_if(recording, chosen, asked, export=export, mlflow=wanted, json=json)
            return _exact(recording, asked, json=json)
        finally:
            recording.close()


def _exact(recording: "Recording", asked: "Asked", *, json: bool) -> int:
    from pipeline.replay.exact import Replayed, replay
    from pipeline.replay.told import as_text

    result = Replayed(recording.run)
    try:
        replay(recording, asked, result=result, say=say)
    except KeyboardInterrupt:
        say(f"stopped after {result.steps} steps")
        if result.steps:
            emit(result.as_json()) if json else print(as_text(result))
        raise
    emit(result.as_json()) if json else print(as_text(result))
    return 0 if result.first is None else 1


def _what_if(recording: "Recording", chosen: "WhatIf", asked: "Asked", *, export: Path | None, mlflow: bool, json: bool) -> int:
    from pipeline.replay.alternative import Alternative
    from pipeline.replay.alternative import train as train_alternative
    from pipeline.replay.curves import child_run
    from pipeline.replay.told import table

    result = Alternative(recording.run, chosen.changed)
    try:
        curves = child_run(recording, chosen, result, wanted=mlflow, say=say)
        train_alternative(recording, chosen, asked, result=result, curves=curves, export=export, say=say)
    finally:
        if result.whole or (result.steps and sys.exc_info()[0] is KeyboardInterrupt):
            emit(result.as_json()) if json else print(table(result))
    return 0
