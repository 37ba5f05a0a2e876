"""`penstock replay score`: scores recorded rollouts with another reward; `--write` writes the result as a new run."""

from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustRun, emit, notify, reading, refuse_folder


def score(
    run: RunOrFolder,
    *,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward", metavar="NAME", help="A reward, as in reward.functions; repeatable. The run's own, as they are now, if absent."
        ),
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", metavar="W,W", help="A weight for each reward, separated by commas.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="reward.*, algorithm.filter_zero_variance, …; repeatable.")
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", help="A sample flips when its reward crosses this.")] = 0.5,
    new_run: Annotated[str | None, typer.Option("--write", metavar="NEWRUN", help="Write a new run with the new groups.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="Directory of the run's tokenizer, if it is not model.path."),
    ] = None,
    processes: Annotated[int | None, typer.Option("--processes", min=1, help="Child processes; scorer.processes if absent.")] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Score recorded rollouts with another reward: changed rewards, flips, groups with another outcome."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.replay.rescore import RescoreRequest, as_page, score_run
    from penstock.pipeline.runtime.registration.trust import Trust

    try:
        factors = [float(word) for word in weights.split(",")] if weights else []
    except ValueError as error:
        raise ConfigError(f"--weights {weights}: expected numbers separated by commas") from error
    if new_run == "":
        raise ConfigError("--write: give the id of the new run")
    request = RescoreRequest(
        functions=reward or [],
        weights=factors,
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
