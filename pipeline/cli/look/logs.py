"""`penstock logs` and `stop`: a run's workers on this machine. The rule: neither asks a broker."""

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Run, notify

SHOWN = 20
POLL_S = 0.3
STOP_LIMIT_S = 240.0


def logs(
    run: Run,
    role: Annotated[str | None, typer.Argument(metavar="[ROLE]", help="A role, or one worker: rollout, rollout-0, …")] = None,
    *,
    count: Annotated[int, typer.Option("-n", min=0, help="Last lines of each worker to begin with.")] = SHOWN,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
) -> None:
    """What the workers of a run on this machine have written."""
    from penstock.pipeline.launch.run_lock import folder_of, log_files

    directory = folder_of(run)
    files = log_files(directory, role)
    width = max(len(file.stem) for file in files)
    read: dict[Path, int] = {}
    for file in files:
        text = file.read_bytes()
        read[file] = len(text)
        _print(file, text.decode("utf-8", "replace").splitlines()[-count:] if count else [], width)
    while follow:
        time.sleep(POLL_S)
        for file in log_files(directory, role):
            with file.open("rb") as opened:
                opened.seek(read.get(file, 0))
                new = opened.read()
            whole = new[: new.rfind(b"\n") + 1]
            read[file] = read.get(file, 0) + len(whole)
            _print(file, whole.decode("utf-8", "replace").splitlines(), width)


def _print(file: Path, lines: list[str], width: int) -> None:
    for line in lines:
        print(f"{file.stem:<{width}}  {line}", flush=True)


def stop(run: Run) -> int:
    """Stop a run whose launcher is on this machine, as Ctrl-C there does; it can be resumed."""
    from penstock.pipeline.launch.run_lock import folder_of, request_stop

    directory = folder_of(run)
    asking = f"stopping {directory.name}; its workers finish what they have in hand"
    if not request_stop(directory, wait_s=STOP_LIMIT_S, requested=lambda: notify(asking)):
        notify(f"it has not stopped after {STOP_LIMIT_S:.0f} s; `penstock logs {directory.name}` shows what it does")
        return 1
    print(f"stopped; `penstock run --resume {directory.name}` goes on with it")
    return 0
