"""Passes warnings of the Kafka client to the worker's log.

A client whose broker is unreachable repeats its warnings several times a second: of those that differ only in numbers, one is printed
per `EVERY_S`, with the count of the others.
"""

import logging
import re
import time
from collections.abc import Callable

EVERY_S = 60.0
LOGGERS = ("kafka", "penstock")
_NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*")


class ClientLog(logging.Handler):
    """Passes warnings on to `notify(text, level)`."""

    def __init__(self, notify: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._printed: dict[tuple[str, str], tuple[float, int]] = {}
        """(logger, text without numbers) -> time of the last printed warning, and number of those since."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, or count it."""
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
    """Pass warnings of the client and of our log to `notify(text, level)` until the returned function is called."""
    handler = ClientLog(notify)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)

    def end() -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)

    return end
