"""`penstock logs` and `stop`: a run's workers on this machine. Neither needs a broker."""

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
    count: Annotated[int, typer.Option("-n", min=0, help="Last lines of each worker to print first.")] = SHOWN,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
) -> None:
    """Print the logs of a run's workers on this machine."""
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
            lines = new[: new.rfind(b"\n") + 1]
            read[file] = read.get(file, 0) + len(lines)
            _print(file, lines.decode("utf-8", "replace").splitlines(), width)


def _print(file: Path, lines: list[str], width: int) -> None:
    for line in lines:
        print(f"{file.stem:<{width}}  {line}", flush=True)


def stop(run: Run) -> int:
    """Stop a run whose launcher is on this machine, as Ctrl-C does; it can be resumed."""
    from penstock.pipeline.launch.run_lock import folder_of, request_stop

    directory = folder_of(run)
    stopping = f"stopping {directory.name}; its workers finish their work in flight"
    if not request_stop(directory, wait_s=STOP_LIMIT_S, requested=lambda: notify(stopping)):
        notify(f"{directory.name} did not stop within {STOP_LIMIT_S:.0f} s; see `penstock logs {directory.name}`")
        return 1
    print(f"stopped; resume it: penstock run --resume {directory.name}")
    return 0
