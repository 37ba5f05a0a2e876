"""What moving records costs a worker, in CPU seconds of the thread that pays.

The rule: only time on a processor counts, so that waiting for work is never taken for the price of the log.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Costs:
    """Seconds spent in the codec; sending, polling and the clients' own threads are counted by the log."""

    encode_s: float = 0.0
    decode_s: float = 0.0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the block as encoding."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.encode_s += time.thread_time() - started

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Count the block as decoding."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.decode_s += time.thread_time() - started
