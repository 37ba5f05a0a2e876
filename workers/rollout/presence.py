"""Whether this process was stopped for a while: by SIGSTOP, by a suspended machine, by swapping.

The rule: however long a worker computes it was not away; only a process none of whose threads could run was.
"""

import threading
import time

AWAY_S = 4.0
"""Well below the 6 s after which a group member that says nothing is replaced."""

_BEAT_S = 0.5


class Presence:
    """A thread that beats; a beat that is overdue means that nobody here has run."""

    def __init__(self, *, away_s: float = AWAY_S) -> None:
        self._away_s = away_s
        self._was_away = False
        self._last = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="presence").start()

    def was_away(self) -> bool:
        """Whether the process was stopped since this was last asked."""
        self._beat()  # right after SIGCONT the caller may run before the thread does
        with self._lock:
            was_away, self._was_away = self._was_away, False
        return was_away

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._beat()

    def _beat(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._was_away = self._was_away or now - self._last > self._away_s
            self._last = now
