"""Makes an MLflow database file on this machine: with all its tables, or not at all.

The rule: tables are made in a file beside it, which is renamed when it is complete. MLflow makes them over seconds and without
transactions; a process killed meanwhile would leave a database that no MLflow opens again.
"""

import fcntl
from collections.abc import Callable
from pathlib import Path

PREFIX = "sqlite:///"


def make_database(uri: str, *, fill: Callable[[str], None]) -> None:
    """Make the file that a `sqlite:///` address names, if there is none; `fill` makes the tables at the address it gets."""
    path = _file(uri)
    if path is None or _there(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    # A killed process releases the lock; the next one starts over.
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _there(path):
            return
        for left in (beside, beside.with_name(f"{beside.name}-journal")):
            left.unlink(missing_ok=True)
        fill(f"{PREFIX}{beside}")
        beside.rename(path)


def _there(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _file(uri: str) -> Path | None:
    name = uri.removeprefix(PREFIX)
    return Path(name) if name and name != uri and not name.startswith((":memory:", "file:")) else None
