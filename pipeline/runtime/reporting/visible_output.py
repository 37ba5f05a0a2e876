"""Standard streams that escape hidden characters, so that the text of a record cannot control the terminal."""

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
    """Escape hidden characters on standard error."""
    before = sys.stderr
    sys.stderr = VisibleStream(before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before


def exact_output() -> TextIO:
    """Standard output that does not escape anything, for data."""
    output: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return output


def print_json(text: str, *, flush: bool = False) -> None:
    """Print JSON made by `json.dumps`, with the hidden character escaped that it leaves as it is."""
    print(text.replace(DEL, "\\u007f"), file=exact_output(), flush=flush)
