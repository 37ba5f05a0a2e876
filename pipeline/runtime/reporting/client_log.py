"""What the Kafka client warns of, as lines of the worker's own log.

The rule: of lines that differ only in numbers one is printed a minute, with the number of those in between: a client whose broker is away
repeats itself several times a second.
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
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        """Logger and sort of line -> when one was printed, and how many came since."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, or count it."""
        cause = record.exc_info[1] if record.exc_info else None
        text = " ".join(f"{record.getMessage()}{f': {type(cause).__name__}: {cause}' if cause else ''}".split())
        sort, now = (record.name, _NUMBERS.sub("", text)), time.monotonic()
        said_s, more = self._said.get(sort, (-EVERY_S, 0))
        if now - said_s < EVERY_S:
            self._said[sort] = said_s, more + 1
            return
        self._said[sort] = now, 0
        self._notify(f"{record.name}: {text}" + (f" ({more} more like it meanwhile)" if more else ""), record.levelname.lower())


def pass_on_warnings(notify: Callable[[str, str], None]) -> Callable[[], None]:
    """Give what the client and our own log warn of to `notify(text, level)`, until the returned function is called."""
    handler = ClientLog(notify)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)

    def end() -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)

    return end
