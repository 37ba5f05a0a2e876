"""Standard streams whose text is visible: what a record says cannot drive the terminal that shows it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from penstock.topics.wire.visible import visible

DEL = "\x7f"


class VisibleStream:
    """A text stream that shows hidden characters escaped."""

    def __init__(self, stream: TextIO, *, show: Callable[[str], str] = visible) -> None:
        self._stream, self._show = stream, show

    def write(self, text: str) -> int:
        """Write a text; returns its length as given."""
        self._stream.write(self._show(text))
        return len(text)

    @property
    def rich_proxied_file(self) -> Any:
        """The stream to which a rich console writes its own control characters."""
        return type(self)(self._stream, show=str)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def visible_errors() -> Iterator[None]:
    """Let messages show the hidden characters of what they quote."""
    before = sys.stderr
    sys.stderr = VisibleStream(before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before


def exact_output() -> TextIO:
    """The standard output for data, which is not changed."""
    output: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return output


def print_json(text: str, *, flush: bool = False) -> None:
    """Print JSON made by `json.dumps`: the one hidden character that it does not escape is escaped."""
    print(text.replace(DEL, "\\u007f"), file=exact_output(), flush=flush)
