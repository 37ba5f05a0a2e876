"""Progress lines every few seconds while a long log is read."""

import time
from collections.abc import Callable

LINE_EVERY_S = 5.0


class Progress:
    """Reports every few seconds how long the log has been read; may be called for every record."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._started = self._line_at = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._line_at >= LINE_EVERY_S:
            self._line_at = now
            self._notify(f"reading the log, for {now - self._started:.0f} s")
