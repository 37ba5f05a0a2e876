"""Child processes of a test: killed at the end of their block, and whether a process still runs."""

import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """`subprocess.Popen` with these options; the end of the block kills the process."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def runs(pid: int) -> bool:
    """True if the process exists and is no zombie; a process may end between any two looks at it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def time_that_passes_after(happened: Callable[[], bool]) -> SimpleNamespace:
    """The module `time` of a module under test: once something has happened, every look at the clock is an hour after the one before.

    A limit that starts before or after that instant ends at its next check, and no limit ends earlier.
    """
    hours = itertools.count(1)

    def monotonic() -> float:
        return time.monotonic() + (3600.0 * next(hours) if happened() else 0.0)

    return SimpleNamespace(monotonic=monotonic, sleep=time.sleep)


def end_in_time(*pids: int, within_s: float = 120.0) -> bool:
    """Waits until none of the processes runs; False if one still does after `within_s`."""
    end = time.monotonic() + within_s
    while any(map(runs, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
