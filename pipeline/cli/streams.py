"""Standard streams: what is printed is visible text; a stream may be closed, or its device full.

A closed stream is silent. A command whose only purpose is its output refuses to run without one.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from penstock.infra.errors import PenstockError
from penstock.pipeline.launch.shutdown import silence
from penstock.pipeline.runtime.reporting.log_lines import VisibleStream

ONLY_PRINT = frozenset(
    {"runs", "status", "logs", "report", "explain", "sql", "graph", "plan", "topics list", "topics tail", "topics show", "topics acls"}
)
"""Commands whose only effect is output."""
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


class _Checked(VisibleStream):
    """A text stream whose failures are distinguished from those of files."""

    def write(self, text: str) -> int:
        with self._checked():
            return super().write(text)

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
