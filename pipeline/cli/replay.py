"""`penstock replay`: repeats a stage of a run from its log. The run's topics are only read."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import (
    Bootstrap,
    Json,
    Run,
    RunId,
    RunOrFolder,
    Security,
    TrustRun,
    at,
    emit,
    group_numbers,
    loaded,
    notify,
    reading,
    refuse_folder,
)

if TYPE_CHECKING:
    from penstock.infra.log import Log
    from penstock.pipeline.config.load import Config
    from penstock.pipeline.replay.overrides import WhatIf
    from penstock.pipeline.replay.recording import Recording
    from penstock.pipeline.replay.resample import ResampledCompletion
    from penstock.pipeline.replay.steps import ReplayRequest

app = typer.Typer(help="Repeat a stage of a run from its log: unchanged, to verify it, or with a change.")
SHOWN = 20
CONTEXT = 4
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward", metavar="NAME", help="A reward, as in reward.functions; repeatable. The run's own, as they are now, if absent."
    ),
]
Weights = Annotated[str | None, typer.Option("--weights", metavar="W,W", help="A weight for each reward, separated by commas.")]
RewardOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="reward.*, algorithm.filter_zero_variance, …; repeatable.")
]
Threshold = Annotated[float, typer.Option("--threshold", help="A sample flips when its reward crosses this.")]
Processes = Annotated[int | None, typer.Option("--processes", min=1, help="Child processes; scorer.processes if absent.")]


@app.command()
def rollout(
    run: RunOrFolder,
    *,
    step: Annotated[int | None, typer.Option("--step", min=0, help="All groups of this step's plan.")] = None,
    group: Annotated[int | None, typer.Option("--group", min=0, help="This one group.")] = None,
    version: Annotated[
        int | None, typer.Option("--policy-version", min=0, help="Policy version to generate with; each sample's first one if absent.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change rollout.*, sampling.* or run.seed; repeatable.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Generate recorded samples again with their weights and seeds, and compare them token by token."""
    from penstock.pipeline.replay.resample import ResampleRequest, resample, summary
    from penstock.pipeline.runtime.registration.trust import Trust

    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        request = ResampleRequest(step=step, group=group, version=version, overrides=overrides or [], trust=Trust(code=trust_code))
        samples = sorted(resample(log, run_id, request, notify=notify), key=lambda sample: (sample.group, sample.sample))
    figures = summary(samples)
    differing = [sample for sample in samples if not sample.same]
    if json:
        emit({**figures, "differences": differing})
        return
    print(f"{figures['same_samples']} of {figures['samples']} samples are the same, token by token")
    print(f"{figures['tokens_before_a_difference']} of {figures['tokens']} tokens are before the first difference of their sample", end="")
    print(f"; their logprobs differ by at most {figures['logprob_difference_max']:.2g}")
    if several := figures["samples_of_several_versions"]:
        print(f"{several} samples have tokens of several versions: compared up to the first change of version")
    for sample in differing[:SHOWN]:
        print(_line(sample))
    if len(differing) > SHOWN:
        print(f"… and {len(differing) - SHOWN} more; --json has all")


def _line(sample: "ResampledCompletion") -> str:
    assert sample.first_difference is not None
    index = sample.first_difference
    low, high = max(0, index - CONTEXT), index + CONTEXT + 1
    return (
        f"group {sample.group} sample {sample.sample} version {sample.version}: token {index} of {sample.comparable}\n"
        f"  recorded {_ids(sample.recorded, low, index, high)}\n  again    {_ids(sample.resampled, low, index, high)}"
    )


def _ids(tokens: Sequence[int], low: int, index: int, high: int) -> str:
    words = [f"[{token}]" if number == index else str(token) for number, token in enumerate(tokens[low:high], low)]
    return " ".join([*(["…"] if low else []), *words, "…" if high < len(tokens) else "(end)"])


@app.command()
def score(
    run: RunOrFolder,
    *,
    reward: Rewards = None,
    weights: Weights = None,
    overrides: RewardOverrides = None,
    threshold: Threshold = 0.5,
    new_run: Annotated[str | None, typer.Option("--write", metavar="NEWRUN", help="Write a new run with the new groups.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Directory of the run's tokenizer, if it is not model.path.")
    ] = None,
    processes: Processes = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Score recorded rollouts with another reward: changed rewards, flips, groups with another outcome."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.rescore import RescoreRequest, as_page, score_run
    from penstock.pipeline.runtime.registration.trust import Trust

    if new_run == "":
        raise ConfigError("--write: give the id of the new run")
    request = RescoreRequest(
        functions=reward or [],
        weights=_factors(weights),
        overrides=overrides or [],
        threshold=threshold,
        write=new_run,
        model=model,
        processes=processes,
        trust=Trust(code=trust_code),
    )
    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        if new_run is not None:
            refuse_folder(log, "--write")
        report = score_run(log, run_id, request, notify=notify)
    if json:
        emit(report)
    else:
        print(as_page(report))


def _factors(weights: str | None) -> list[float]:
    """The numbers of `--weights`. Raises `ConfigError`."""
    from penstock.infra.errors import ConfigError

    try:
        return [float(word) for word in weights.split(",")] if weights else []
    except ValueError as error:
        raise ConfigError(f"--weights {weights}: expected numbers separated by commas") from error


MODEL = "Directory with the model's config.json, if it is not model.path; the weights are in the log."


@app.command()
def train(
    run: RunOrFolder,
    *,
    from_step: Annotated[int, typer.Option("--from-step", min=0, metavar="A", help="First step that is compared.")] = 0,
    to_step: Annotated[int | None, typer.Option("--to-step", min=0, metavar="B", help="Last step; the newest one if absent.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Train the same groups with another setting; repeatable.")
    ] = None,
    without: Annotated[str | None, typer.Option("--without", metavar="GROUP[,GROUP]", help="Train the steps without these groups.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Train new steps as well, until the run is closed.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a difference and print how the weights drift.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help=MODEL)] = None,
    export: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the final model of a replay with --set.")] = None,
    mlflow: Annotated[
        bool | None, typer.Option("--mlflow/--no-mlflow", help="Log a replay with --set as a child run in MLflow; as the run if absent.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Train recorded steps again, without other workers, and compare every bit; with --set or --without, train them with a change."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.overrides import what_if
    from penstock.pipeline.replay.recording import Recording, prepare
    from penstock.pipeline.runtime.registration.trust import Trust, keys_of, require_trusted, user_code

    with reading(run, bootstrap, security, executes=True) as (log, run_id):
        if follow:
            refuse_folder(log, "--follow")
        with Recording.open(log, run_id, model=model) as recording:
            chosen = what_if(recording.config, overrides or [], without=group_numbers(without))
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


def bisect(
    run: RunOrFolder,
    *,
    test: Annotated[
        str, typer.Option("--test", metavar="EXPR|CMD", help="'greedy_accuracy > 0.6', or a program that gets a model in PENSTOCK_MODEL.")
    ],
    good: Annotated[int, typer.Option("--good", min=0, metavar="S", help="The test passes after S steps.")] = 0,
    bad: Annotated[int | None, typer.Option("--bad", min=1, metavar="T", help="It fails after T steps; the newest step if absent.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="CONFIG|RUN", help="Search the settings in which another configuration differs.")
    ] = None,
    replays: Annotated[int, typer.Option("--replays", min=1, help="Most replays without groups or with other settings.")] = 64,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's initial model and tokenizer, if they are not in model.path.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Find the step after which a test keeps failing, the groups responsible for it, the cause, and the fork without them."""
    from penstock.infra.paths import run_directory, write_private
    from penstock.pipeline.inspect.report.provenance import BISECTED
    from penstock.pipeline.replay.recording import Recording, prepare
    from penstock.pipeline.runtime.registration.trust import Trust, require_trusted

    with reading(run, bootstrap, security, executes=True) as (log, run_id), Recording.open(log, run_id, model=model) as recording:
        require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify)
        prepare(recording.config)
        from penstock.pipeline.replay.bisect.find import BisectRequest, as_text  # imports torch, which reads the environment then
        from penstock.pipeline.replay.bisect.find import bisect as search

        other = None if against is None else _other_config(log, against, trust_code=trust_code)
        request = BisectRequest(test=test, good=good, bad=bad, replays=replays)
        result = search(recording, request, against=other, notify=notify)
    write_private(run_directory(run_id) / BISECTED, text := as_text(result))
    if json:
        emit(result)
    else:
        print(text)


def _other_config(log: "Log", name: str, *, trust_code: bool) -> "Config":
    """The configuration in a TOML file, or of another run whose code may be executed."""
    from penstock.pipeline.config.load import from_json
    from penstock.pipeline.runtime.registration.run_registry import registration, resolve
    from penstock.pipeline.runtime.registration.trust import Trust, require_trusted

    if Path(name).is_file() or name.endswith(".toml"):
        return loaded(name)
    registered = registration(log, resolve(log, name, executes=True))
    return from_json(require_trusted(registered, trust=Trust(code=trust_code), notify=notify).config)


def regrade(
    run: Run,
    *,
    reward: Rewards = None,
    weights: Weights = None,
    overrides: RewardOverrides = None,
    from_step: Annotated[int, typer.Option("--from-step", min=0, metavar="S", help="First step that gets the new rewards.")] = 0,
    floor: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Least effective sample size of a regraded step; algorithm.ess_floor, or else 0.5 or 0.9."),
    ] = None,
    threshold: Threshold = 0.5,
    start: Annotated[bool, typer.Option("--start", help="Train the regraded groups in a new run, then continue it live.")] = False,
    run_id: RunId = None,
    plain: Annotated[bool, typer.Option("--plain", help="With --start: plain lines instead of the live view.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help=MODEL)] = None,
    processes: Processes = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Show what another reward would change in a run; with --start, train its groups again under that reward and continue live."""
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.replay.recording import Recording, prepare
    from penstock.pipeline.replay.rescore import RescoreRequest
    from penstock.pipeline.runtime.registration.run_registry import resolve
    from penstock.pipeline.runtime.registration.trust import Trust

    make_files_private()
    request = RescoreRequest(
        functions=reward or [], weights=_factors(weights), overrides=overrides or [], threshold=threshold,
        model=None if model is None else str(model.resolve()), processes=processes, trust=Trust(code=trust_code),
    )  # fmt: skip
    with at(bootstrap, security, attends=start, start=start) as log:
        with Recording.open(log, resolve(log, run, executes=True), model=model) as recording:
            prepare(recording.config)
            from penstock.pipeline.replay.regrade import as_text, score_from  # imports torch, which reads the environment then

            regraded = score_from(recording, request, first=from_step, floor=floor, notify=notify)
            if not start:
                emit(regraded.report) if json else print(as_text(regraded.report))
                return 0
            print(as_text(regraded.report), file=sys.stderr)
            from penstock.pipeline.replay.regraded_run import write_regraded

            new = write_regraded(recording, regraded, run_id=run_id, notify=notify).run
        from penstock.pipeline.launch.launcher import resume

        notify(f"{new} continues live; if it is interrupted: penstock run --resume {new}")
        return resume(new, log=log, notify=notify, live=not plain and not json, json_out=json)
