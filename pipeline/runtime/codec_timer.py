"""What moving records costs a worker, in CPU seconds of the thread that pays.

The rule: only time on a processor counts, so that waiting for work is never taken for the price of the log.
"""

import time


class Clock:
    """Adds up the CPU seconds of the blocks it is used for, one at a time; not to be nested."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._started


class Costs:
    """Seconds spent in the codec; sending, polling and the clients' own threads are counted by the log."""

    __slots__ = ("_decoding", "_encoding")

    def __init__(self) -> None:
        self._encoding, self._decoding = Clock(), Clock()

    @property
    def encode_s(self) -> float:
        """Seconds spent encoding."""
        return self._encoding.seconds

    @property
    def decode_s(self) -> float:
        """Seconds spent decoding."""
        return self._decoding.seconds

    def encoding(self) -> Clock:
        """Count the block as encoding."""
        return self._encoding

    def decoding(self) -> Clock:
        """Count the block as decoding."""
        return self._decoding
