"""CPU seconds the log costs: on producers' I/O threads and inside calls on its users' threads; wall time spent waiting is not cost."""

import threading
import time
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["send_s", "poll_s", "io_s"]


@dataclass(slots=True)
class Meter:
    """Adds up CPU seconds of one client's calls; the client lets only one thread at a time add."""

    kind: Kind
    seconds: float = 0.0


@dataclass(slots=True)
class CpuCosts:
    """The sum over all clients of one log, living and closed."""

    _meters: list[Meter] = field(default_factory=list)
    _threads: dict[threading.Thread, Kind] = field(default_factory=dict)
    _ended: dict[Kind, float] = field(default_factory=lambda: {"send_s": 0.0, "poll_s": 0.0, "io_s": 0.0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meter(self, kind: Kind) -> Meter:
        """A new meter that counts towards `kind`."""
        meter = Meter(kind)
        with self._lock:
            self._meters.append(meter)
        return meter

    def spend(self, kind: Kind, seconds: float) -> None:
        """Count CPU time spent outside any client, such as making one."""
        with self._lock:
            self._ended[kind] += seconds

    def watch(self, thread: threading.Thread, kind: Kind) -> None:
        """Count the whole CPU time of a running thread towards `kind`, from its first instruction on."""
        with self._lock:
            self._threads[thread] = kind

    def unwatch(self, thread: threading.Thread) -> None:
        """Keep the CPU time `thread` has used so far; call it before the thread ends."""
        with self._lock:
            kind = self._threads.pop(thread, None)
            if kind is not None:
                self._ended[kind] += _cpu_s(thread)

    def retire(self, meter: Meter) -> None:
        """Keep the CPU time that a closed client's meter has counted."""
        with self._lock:
            if meter in self._meters:
                self._meters.remove(meter)
                self._ended[meter.kind] += meter.seconds

    def totals(self) -> dict[str, float]:
        """CPU seconds: `send_s`, `poll_s` on callers' and members' threads; `io_s` of producers' threads, admin calls, making clients."""
        with self._lock:
            sums = {str(kind): seconds for kind, seconds in self._ended.items()}
            for meter in self._meters:
                sums[meter.kind] += meter.seconds
            for thread, kind in self._threads.items():
                sums[kind] += _cpu_s(thread)
        return sums


def _cpu_s(thread: threading.Thread) -> float:
    if thread.ident is None or not thread.is_alive():
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return 0.0
