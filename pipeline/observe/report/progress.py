"""A line now and then while a long log is read."""

import time
from collections.abc import Callable

SAY_EVERY_S = 5.0


class Progress:
    """Says every few seconds how long the log has been read; may be called for every record."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._began = self._said = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self._notify(f"reading the log, for {now - self._began:.0f} s")
