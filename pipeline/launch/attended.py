"""Which runs have a launcher on this machine, and asking one to stop.

The rule: a lock that is held is the proof; a process id in a file is none.
"""

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from penstock.infra.errors import ConfigError
from penstock.infra.paths import state_path
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.runtime.registration.this_machine import LOCK, own_runs

UI_ADDRESS = "ui.address"
"""In the state directory while `penstock ui` runs: where."""


def launcher_of(directory: Path) -> int | None:
    """Process id of the launcher that attends the run of this folder; None without one."""
    try:
        with (directory / LOCK).open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.readline())
    except (OSError, ValueError):
        return None
    return None


def attended_runs() -> list[str]:
    """The runs that a launcher attends on this machine."""
    return [folder.name for folder in run_folders() if launcher_of(folder) is not None]


def run_folders() -> list[Path]:
    """The folders of this machine's runs, those changed last at the end."""
    folders = [path for path in (state_path() / "runs").glob("*") if path.is_dir()]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def folder_of(text: str) -> Path:
    """The folder of the run that an id, a unique prefix or `latest` names; asks no broker. Raises `ConfigError`."""
    folders = {path.name: path for path in run_folders()}
    if text == "latest":
        own = own_runs()
        if not own:
            raise ConfigError("latest: this user has made no run on this machine; see `penstock runs`")
        return folders[own[-1]]
    matches = [text] if text in folders else [name for name in folders if name.startswith(text)]
    if len(matches) != 1:
        why = f"is ambiguous: {', '.join(matches[:5])}" if matches else f"has no folder on this machine{nearest(text, folders)}"
        raise ConfigError(f"run {text!r} {why}")
    return folders[matches[0]]


def ask_to_stop(directory: Path, *, wait_s: float, asked: Callable[[], None] = lambda: None) -> bool:
    """Ask the launcher of this folder to stop, in order, and call `asked`; True once it has. Raises `ConfigError` without a launcher."""
    process = launcher_of(directory)
    if process is None:
        raise ConfigError(f"run {directory.name} has no launcher on this machine, so nothing is to be stopped here")
    os.kill(process, signal.SIGTERM)
    asked()
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
    """The logs of a run's workers, or of those of a role. Raises `ConfigError` where there is none."""
    files = sorted((directory / "logs").glob("*.log"))
    chosen = [file for file in files if role is None or file.stem == role or file.stem.rpartition("-")[0] == role]
    if not chosen:
        names = [file.stem for file in files]
        raise ConfigError(f"run {directory.name} has no log of {role!r}; it has {', '.join(names) or 'none'}{nearest(role or '', names)}")
    return chosen
