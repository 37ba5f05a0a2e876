"""CPU seconds that a log costs: on its clients' threads and inside calls on its users' threads. Excludes the time spent waiting."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["send_s", "poll_s", "io_s"]


@dataclass(slots=True)
class CpuCosts:
    """CPU seconds of all clients of one log, open and closed; safe to share between threads."""

    _seconds: dict[Kind, float] = field(default_factory=lambda: {"send_s": 0.0, "poll_s": 0.0, "io_s": 0.0})
    _threads: dict[threading.Thread, Kind] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def count(self, kind: Kind) -> Iterator[None]:
        """Add the CPU time that this thread spends in the block to the total of `kind`."""
        start = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[kind] += time.thread_time() - start

    def watch(self, thread: threading.Thread, kind: Kind) -> None:
        """Include all CPU time of a running thread, from its start, in the total of `kind`."""
        with self._lock:
            self._threads[thread] = kind

    def unwatch(self, thread: threading.Thread) -> None:
        """Add the CPU time `thread` has used so far; call it before the thread ends."""
        with self._lock:
            kind = self._threads.pop(thread, None)
            if kind is not None:
                self._seconds[kind] += _cpu_s(thread)

    def totals(self) -> dict[str, float]:
        """Return CPU seconds: `send_s`, `poll_s` of callers and members; `io_s` of network threads, admin calls and new clients."""
        with self._lock:
            sums = {str(kind): seconds for kind, seconds in self._seconds.items()}
            for thread, kind in self._threads.items():
                sums[kind] += _cpu_s(thread)
        return sums


def _cpu_s(thread: threading.Thread) -> float:
    """Return the CPU seconds of a thread so far; 0.0 if it has ended or they cannot be read."""
    if thread.ident is None or not thread.is_alive():
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return 0.0
