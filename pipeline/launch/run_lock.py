"""One launcher per run and machine: its lock, the list of worker processes, and the workers that a killed launcher left.

A held lock proves that a launcher runs. A process is only ended if it is certainly a worker of this run; its pid alone proves nothing.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.paths import locked, state_path, write_private
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.leases import new_token
from penstock.pipeline.runtime.registration.run_registry import LOCK, own_runs

PIDS = "workers.json"
STOP_LIMIT_S = 30.0
"""A worker that has not exited this long after SIGTERM is killed."""


@contextlib.contextmanager
def attending(directory: Path, run: str) -> Iterator[tuple[str, frozenset[str]]]:
    """In the block, be the only launcher of this run on this machine; raises `PenstockError` while there is another one.

    Yields (this launcher's token, tokens of the launcher before it on this machine, which has exited), for the launcher's lease.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        file.seek(0)
        if not locked(file):
            who = file.readline().strip() or "unknown"
            raise PenstockError(f"run {run} already has a launcher, process {who}: stop that process first, or leave it running")
        token, before = new_token(), file.read().splitlines()[1:]
        file.truncate(0)
        file.write(f"{os.getpid()}\n{token}\n")
        file.flush()
        yield token, frozenset(before)


def note(directory: Path, workers: Mapping[str, Mapping[str, object]]) -> None:
    """Write the list of worker processes atomically: name -> pid, start time, number of starts and tokens."""
    write_private(directory / PIDS, json.dumps({"launcher": os.getpid(), **workers}))


def forget(directory: Path) -> None:
    """Remove the list of worker processes, because none runs."""
    (directory / PIDS).unlink(missing_ok=True)


def end_leftovers(directory: Path, run: str, *, notify: Callable[[str], None], limit_s: float = STOP_LIMIT_S) -> dict[str, list[str]]:
    """End the workers that a killed launcher of this run left running; the caller must hold the run's lock.

    Returns worker -> tokens of its processes so far, all of which have ended: their leases are free.
    """
    noted, tokens = _noted(directory)
    left = {name: process for name, pid in noted.items() if (process := _worker(pid, run)) is not None}
    if not left:
        return tokens
    notify(f"ending workers that an earlier launcher of run {run} left running: {', '.join(left)}")
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
    """The processes that have not ended after `limit_s`, without zombies."""
    deadline = time.monotonic() + limit_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _lives(process: psutil.Process) -> bool:
    """True if a process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _noted(directory: Path) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Name -> pid and name -> tokens from the list; empty if it is unreadable, as it may be after a power cut."""
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


UI_ADDRESS = "ui.address"
"""File in the state directory with the address of a running `penstock ui`."""


def launcher_of(directory: Path) -> int | None:
    """Process id of the launcher of the run in this folder; None if there is none."""
    try:
        with (directory / LOCK).open("r", encoding="utf-8") as file:
            return None if locked(file, fcntl.LOCK_SH) else int(file.readline())
    except (OSError, ValueError):
        return None


def attended_runs() -> list[str]:
    """Runs that have a launcher on this machine."""
    return [folder.name for folder in run_folders() if launcher_of(folder) is not None]


def run_folders() -> list[Path]:
    """The folders of this machine's runs, by time of change."""
    folders = [path for path in (state_path() / "runs").glob("*") if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def folder_of(text: str) -> Path:
    """Folder of a run by id, unique prefix or `latest`; needs no broker. Raises `ConfigError`."""
    folders = {path.name: path for path in run_folders()}
    if text == "latest":
        own = own_runs()
        if not own:
            raise ConfigError("latest: this user has started no run on this machine; see `penstock runs`")
        return folders[own[-1]]
    matches = [text] if text in folders else [name for name in folders if name.startswith(text)]
    if len(matches) != 1:
        why = f"is ambiguous: {', '.join(matches[:5])}" if matches else f"has no folder on this machine{nearest(text, folders)}"
        raise ConfigError(f"run {text!r} {why}")
    return folders[matches[0]]


def request_stop(directory: Path, *, wait_s: float, requested: Callable[[], None] = lambda: None) -> bool:
    """Send SIGTERM to the launcher of this folder, then call `requested`; True once it has exited. Raises `ConfigError`."""
    process = launcher_of(directory)
    if process is None:
        raise ConfigError(f"run {directory.name} has no launcher on this machine")
    os.kill(process, signal.SIGTERM)
    requested()
    deadline = time.monotonic() + wait_s
    while (ended := launcher_of(directory) is None) is False and time.monotonic() < deadline:
        time.sleep(0.1)
    return ended


def ui_address() -> str | None:
    """The address of a `penstock ui` that runs on this machine for this state directory."""
    try:
        address = (state_path() / UI_ADDRESS).read_text(encoding="utf-8")
        where = urlsplit(address)
        socket.create_connection((where.hostname or "", where.port or 0), timeout=1.0).close()
    except (OSError, ValueError):
        return None
    return address


def log_files(directory: Path, role: str | None) -> Sequence[Path]:
    """Log files of a run's workers, or of one role. Raises `ConfigError` if there are none."""
    files = sorted((directory / "logs").glob("*.log"))
    chosen = [file for file in files if role is None or file.stem == role or file.stem.rpartition("-")[0] == role]
    if not chosen:
        names = [file.stem for file in files]
        raise ConfigError(
            f"run {directory.name} has no log of worker {role!r}; its logs are {', '.join(names) or 'none'}{nearest(role or '', names)}"
        )
    return chosen


_TIME = re.compile(r"(?:---- )?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def timed_lines(logs: Mapping[Path, bytes], *, count: int) -> list[tuple[Path, str]]:
    """(log, line) of the last `count` lines of each log, sorted by time; a line without a time follows its predecessor."""
    lines: list[tuple[str, Path, str]] = []
    for file, text in logs.items():
        time_of = ""
        for line in text.decode("utf-8", "replace").splitlines()[-count:] if count else ():
            if stamp := _TIME.match(line):
                time_of = stamp[1]
            lines.append((time_of, file, line))
    return [(file, line) for _, file, line in sorted(lines, key=lambda entry: entry[0])]
