"""Penstock's state directory on this machine, and files and directories that are complete or absent."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from penstock.infra.errors import BrokerError
from penstock.topics.catalogue import check_run_id

IMPORT_ROOT = Path(__file__).absolute().parents[2]
"""The directory from which `penstock` is imported; links are not resolved, because the packages are links in a checkout."""


def state_path() -> Path:
    """Return the state directory: PENSTOCK_HOME if set, else $XDG_STATE_HOME/penstock, else ~/.local/state/penstock."""
    home = os.environ.get("PENSTOCK_HOME")
    if home:
        return Path(home).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state").absolute() / "penstock"


def state_directory() -> Path:
    """Return the state directory, created if missing. Raises `BrokerError` if it is not writable."""
    return writable(state_path())


def make_files_private() -> None:
    """Make files and directories that this process creates private to its user: they contain samples and logs."""
    os.umask(0o077)


def run_directory(run: str) -> Path:
    """Return the directory of a run's logs, measurements, checkpoints, report and final model, existing or not.

    Raises `ValueError` for an invalid run id.
    """
    return state_path() / "runs" / check_run_id(run)


def write_private(path: Path, text: str) -> None:
    """Write a file at once, readable by its user only, under any umask and for any older file of that name."""
    write_complete(path, text, mode=0o600)


def write_complete(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a temporary file and rename it, so that `path` is complete or absent; permissions are `mode` less the umask."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def locked(file: int | IO[Any], how: int = fcntl.LOCK_EX) -> bool:
    """True if the lock of an open file could be acquired at once; it is released when the file is closed, or its process ends."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def complete(file: IO[bytes], path: Path) -> None:
    """Flush an open temporary file to the disk, close it, and rename it to `path`, so that `path` is never incomplete."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    Path(file.name).replace(path)
    sync(path.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush one file, or the names in one directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(directory: Path) -> Path:
    """Return `directory` after a write test in it; created if missing, private to its user."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory.stat().st_uid == os.getuid():  # one shared by several users keeps its permissions
            directory.chmod(0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BrokerError(f"cannot write to the state directory {directory} ({reason}): set PENSTOCK_HOME to another directory") from None
    return directory


@contextlib.contextmanager
def new_directory(path: Path, *, holds: str) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `path` when the block ends, and deleted if the block raises.

    Its files get the permissions that the umask gives to a new one: safetensors makes its own readable by their user only.

    Raises `ValueError` unless `path` is absent or an empty directory; `holds` names the content.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not empty: choose another directory for {holds}, or empty this one first")
    unfinished = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        mode = stat.S_IMODE(unfinished.stat().st_mode)
        for item in unfinished.rglob("*"):
            item.chmod(mode if item.is_dir() else mode & 0o666)
        if path.exists():
            path.rmdir()
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
