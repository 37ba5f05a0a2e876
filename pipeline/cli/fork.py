"""`penstock fork`: a new run from a recorded step of another one, whose topics are only read."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, Run, Security, TrustRun, at, emit, notify


def fork(
    run: Run,
    *,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, metavar="S", help="Start from the state after S steps; after the last step if absent."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one key of the configuration; repeatable.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Id of the new run: a-z, 0-9 and '-', at most 64, no '-' first. Made up if absent.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start it at once, as `penstock run --resume` does.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --start: plain lines instead of the live view.")] = False,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with the parent's config.json and tokenizer, if it is not its model.path.")
    ] = None,
    trust_code: TrustRun = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> int:
    """Register a new run that starts with another run's weights, optimizer and position in the data after some of its steps."""
    from penstock.infra.paths import make_files_private
    from penstock.pipeline.replay.recording import Recording, prepare, with_model
    from penstock.pipeline.runtime.registration.run_registry import resolve
    from penstock.pipeline.runtime.registration.trust import Trust, require_trusted

    make_files_private()
    with at(bootstrap, security, attends=start, start=True) as log:
        recording = Recording.open(log, resolve(log, run, executes=True))
        try:
            if model is not None:
                recording.config = with_model(recording.config, model.resolve())
            require_trusted(recording.registration, trust=Trust(code=trust_code), notify=notify)
            prepare(recording.config)
            from penstock.pipeline.replay.fork import fork as make  # imports torch, which reads the environment then

            created = make(recording, from_step, overrides or [], run_id=run_id, notify=notify)
        finally:
            recording.close()
        new, origin = created.record.run, created.origin
        state = f"{origin['run']} after {origin['step']} steps"
        notify(f"{new} starts from {state}, with the weights {origin['digest'][:16]}… in {created.directory}")
        if start:
            from penstock.pipeline.launch.launcher import resume

            return resume(new, log=log, notify=notify, live=not plain and not json, json_out=json)
    if json:
        result = {"run": new, "status": created.record.status, "forked_from": origin}
        emit({**result, "directory": str(created.directory), "bootstrap": log.bootstrap})
    else:
        print(new)
        notify(f"start it: penstock run --resume {new}")
    return 0
