"""Lines of a worker's log: time, level, run, worker and text of one event, as text or as a JSON object; control characters made visible.

A Kafka client whose broker is unreachable repeats its warnings several times a second: of those that differ only in numbers, one is
printed per `EVERY_S`, with the count of the others. `Progress` prints lines of a command that reads for long.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from penstock.topics.wire.visible import visible

LOG_JSON = "PENSTOCK_LOG_JSON"
"""Environment variable that makes lines JSON; `--log-json` sets it."""
PROGRESS_EVERY_S = 5.0


def log_line(text: str, *, run: str, worker: str, level: str = "info", time_s: float | None = None, as_json: bool = False) -> str:
    """One line of a worker's log; times are local in text and UTC in JSON."""
    now = time.time() if time_s is None else time_s
    if as_json:
        stamp = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": stamp, "level": level, "run": run, "worker": worker, "text": text})
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))} {level.upper()} {run} {worker}: {visible(text, one_line=True)}"


class Progress:
    """Callable for each record that sends a progress line every `PROGRESS_EVERY_S`; by default the elapsed time."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify, self._started = notify, time.monotonic()
        self._line_at = self._started

    def __call__(self, text: str | None = None) -> None:
        now = time.monotonic()
        if now - self._line_at >= PROGRESS_EVERY_S:
            self._line_at = now
            self._notify(text or f"reading the log for {now - self._started:.0f} s")


def counted(number: int, noun: str) -> str:
    """Format a count: `counted(1, "prompt")` is "1 prompt", `counted(1200, "prompt")` is "1,200 prompts"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def terminal_width() -> int:
    """Return the columns of the terminal; in a pipe, enough for any line."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def print_page(page: str) -> None:
    """Print lines of text; on a terminal, a line that is too long is wrapped between words and indented."""
    width = terminal_width()
    for line in page.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        print(line if len(line) <= width else textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


def print_line(run: str, worker: str, text: str, *, level: str = "info") -> None:
    print(log_line(text, run=run, worker=worker, level=level, as_json=bool(os.environ.get(LOG_JSON))), flush=True)


DEL = "\x7f"


class VisibleStream:
    """A text stream that escapes hidden characters."""

    def __init__(self, stream: TextIO, *, show: Callable[[str], str] = visible) -> None:
        self._stream, self._show = stream, show

    def write(self, text: str) -> int:
        """Write a text escaped; returns the length of the original."""
        self._stream.write(self._show(text))
        return len(text)

    @property
    def rich_proxied_file(self) -> Any:
        """The stream to which a rich console writes its own control characters."""
        return type(self)(self._stream, show=str)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def visible_errors() -> contextlib.AbstractContextManager[object]:
    """In the block, escape hidden characters on standard error."""
    return contextlib.redirect_stderr(VisibleStream(sys.stderr))  # type: ignore[type-var]


def exact_output(*, error: bool = False) -> TextIO:
    """Standard output, or standard error, that does not escape anything, for data."""
    stream = sys.stderr if error else sys.stdout
    output: TextIO = getattr(stream, "rich_proxied_file", stream)
    return output


def print_json(text: str, *, flush: bool = False) -> None:
    """Print the output of `json.dumps`, and escape the one hidden character that it does not."""
    print(text.replace(DEL, "\\u007f"), file=exact_output(), flush=flush)


EVERY_S = 60.0
LOGGERS = ("kafka", "penstock")
_NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*")


class ClientLog(logging.Handler):
    """A log handler that passes warnings to `notify(text, level)`."""

    def __init__(self, notify: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._printed: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, text without numbers) -> time of the last printed warning, and number of those since."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a warning on; one that differs only in numbers from a warning of the last `EVERY_S` is only counted."""
        cause = record.exc_info[1] if record.exc_info else None
        text = " ".join(f"{record.getMessage()}{f': {type(cause).__name__}: {cause}' if cause else ''}".split())
        key, now = (record.name, _NUMBERS.sub("", text)), time.monotonic()
        printed_s, more = self._printed.get(key, (-EVERY_S, 0))
        if now - printed_s < EVERY_S:
            self._printed[key] = printed_s, more + 1
            return
        self._printed[key] = now, 0
        self._notify(f"{record.name}: {text}" + (f" ({more} more like it since the last one)" if more else ""), record.levelname.lower())


def pass_on_warnings(notify: Callable[[str, str], None]) -> Callable[[], None]:
    """Pass warnings of the Kafka client and of Penstock's logger to `notify(text, level)`; return the function that ends this."""
    handler = ClientLog(notify)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)

    def end() -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)

    return end
