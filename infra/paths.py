"""The directory in which Penstock keeps this user's data on this machine, and directories that a person names: complete or absent."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.infra.errors import BrokerError
from penstock.topics.catalogue import check_run_id

IMPORT_ROOT = Path(__file__).absolute().parents[2]
"""The directory from which `penstock` is imported; links are not resolved, because the packages are links in a checkout."""


def state_path() -> Path:
    """Where the state directory is, or would be: PENSTOCK_HOME if set, else $XDG_STATE_HOME/penstock, else ~/.local/state/penstock."""
    chosen = os.environ.get("PENSTOCK_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state").absolute() / "penstock"


def state_directory() -> Path:
    """Return the state directory, made if need be; `BrokerError` when it cannot be written."""
    return writable(state_path())


def make_files_private() -> None:
    """Files and directories that this process makes from now on are its user's alone: samples and logs lie in them."""
    os.umask(0o077)


def run_directory(run: str) -> Path:
    """Where this machine keeps a run's logs, measurements, checkpoints, report and final model; the writer makes it.

    Raises `ValueError` for what is not a run id.
    """
    return state_path() / "runs" / check_run_id(run)


def write_private(path: Path, text: str) -> None:
    """Write a file that is complete or absent, and its user's alone under any umask and for any older file of that name."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)


def writable(directory: Path) -> Path:
    """Return `directory`, made if need be and closed to other users, after checking that a file can be written in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory.stat().st_uid == os.getuid():  # one shared by several users stays as they set it up
            directory.chmod(0o700)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BrokerError(f"cannot write to the state directory {directory} ({reason}): set PENSTOCK_HOME to another directory") from None
    return directory


@contextlib.contextmanager
def new_directory(path: Path, *, holds: str) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` when the block ends, and goes away when it fails.

    Raises `ValueError` unless `path` is absent or an empty directory; `holds` names what was to be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not empty: choose another directory for {holds}, or remove it first")
    aside = path.absolute().with_name(f".{path.absolute().name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if path.exists():
            path.rmdir()
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
