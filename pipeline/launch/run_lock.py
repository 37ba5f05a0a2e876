"""One launcher per run: a lock that ends with its process, the list of worker processes, and the end of those a killed launcher left.

The rule: a process is only ended when it is certainly a worker of this run; its pid alone proves nothing.
"""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from penstock.infra.errors import PenstockError
from penstock.infra.paths import write_private
from penstock.pipeline.runtime.leases import new_token
from penstock.pipeline.runtime.registration.this_machine import LOCK

PIDS = "workers.json"
STOP_LIMIT_S = 30.0
"""A worker that has not ended this long after SIGTERM is killed."""


@contextlib.contextmanager
def attending(directory: Path, run: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Hold the lock of this run's only launcher on this machine; raises `PenstockError` while another one holds it.

    Gives this launcher's token and that of the one before it on this machine, which has ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = file.readline().strip() or "unknown"
            raise PenstockError(f"run {run} is attended already, by process {who}: stop that one first, or let it go on") from None
        token, before = new_token(), file.read().splitlines()[1:]
        file.truncate(0)
        file.write(f"{os.getpid()}\n{token}\n")
        file.flush()
        yield token, frozenset(before)


def note(
    directory: Path,
    *,
    pids: Mapping[str, int],
    started: Mapping[str, float],
    starts: Mapping[str, int],
    tokens: Mapping[str, Sequence[str]],
) -> None:
    """Write the list of worker processes, whole or not at all."""
    table = {
        "launcher": os.getpid(), "workers": dict(pids), "started": dict(started), "starts": dict(starts), "tokens": dict(tokens)
    }  # fmt: skip
    write_private(directory / PIDS, json.dumps(table))


def forget(directory: Path) -> None:
    """Remove the list: no worker runs."""
    (directory / PIDS).unlink(missing_ok=True)


def end_leftovers(directory: Path, run: str, *, notify: Callable[[str], None], limit_s: float = STOP_LIMIT_S) -> dict[str, list[str]]:
    """End the workers that a killed launcher of this run left; only for the holder of the lock. Returns worker -> tokens, all ended."""
    noted, tokens = _noted(directory)
    left = {name: process for name, pid in noted.items() if (process := _worker(pid, run)) is not None}
    if not left:
        return tokens
    notify(f"ending what an earlier launcher of run {run} left behind: {', '.join(left)}")
    for process in left.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a suspended one would never handle SIGTERM
    for process in _still(left.values(), limit_s=limit_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _still(left.values(), limit_s=limit_s)
    return tokens


def _still(processes: Iterable[psutil.Process], *, limit_s: float) -> list[psutil.Process]:
    """The processes that have not ended after `limit_s`; zombies count as ended."""
    deadline = time.monotonic() + limit_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _noted(directory: Path) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Name -> pid and name -> tokens as last written, empty if unreadable: after a power cut the file may be incomplete."""
    try:
        table = json.loads((directory / PIDS).read_text(encoding="utf-8"))
        pids = {str(name): int(pid) for name, pid in table["workers"].items()}
        return pids, {str(name): list(map(str, tokens)) for name, tokens in table.get("tokens", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}


def _worker(pid: int, run: str) -> psutil.Process | None:
    """The process with this pid if it is a worker of this run."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline()
    except psutil.Error:
        return None
    ours = "penstock.workers" in words and ("--run", run) in itertools.pairwise(words)
    return process if ours and _lives(process) else None
