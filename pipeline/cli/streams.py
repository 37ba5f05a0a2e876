"""Standard streams that are closed or whose device is full.

A closed stream is silent. A command whose only purpose is its output refuses to run without one.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from penstock.infra.errors import PenstockError
from penstock.pipeline.launch.shutdown import silence

ONLY_PRINT = frozenset(
    {"runs", "status", "logs", "report", "explain", "sql", "graph", "plan", "topics list", "topics tail", "topics show", "topics acls"}
)
"""Commands that do nothing but print."""
WRITES = ("--html", "--plot", "-h", "--help")
"""Options with which such a command writes a file or shows its usage."""


def open_closed() -> bool:
    """Give each closed standard stream the null device, as a file that is opened later must not get its number; True for stdout."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w", encoding="utf-8"))
    return "stdout" in closed


def refuse_unseen(words: Sequence[str]) -> None:
    """Raise `PenstockError` if the command of these words only prints, for a process whose standard output is closed."""
    names = [word for word in words if not word.startswith("-")]
    command = next((text for text in (" ".join(names[:2]), " ".join(names[:1])) if text in ONLY_PRINT), None)
    if command and names[:2] != ["runs", "rm"] and not any(word.startswith(WRITES) for word in words):
        raise PenstockError(f"the standard output is closed, and `penstock {command}` only prints: give it a terminal, a file or a pipe")


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Let the standard output raise `OutputError` if its device takes nothing more; a pipe that was closed stays a `BrokenPipeError`."""
    before = sys.stdout
    sys.stdout = _Checked(before)  # type: ignore[assignment]
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before


class OutputError(OSError):
    """The standard output takes nothing more."""


class _Checked:
    """A text stream whose failures are told from those of files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._checked():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._checked():
            self._stream.flush()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence(self._stream)
            raise OutputError(f"cannot write to the standard output: {error.strerror}") from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
