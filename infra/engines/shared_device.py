"""The device that processes of one machine compute on by turns: an exclusive lock on a file, and a queue of those that want it.

The rule: whoever holds the device is awake, everybody else's models sleep. The kernel releases the locks of a process that dies, however
it dies; whoever waits is seen by the holder, which hands the device over once nothing of its own is under way.
"""

import fcntl
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import IO, Protocol, runtime_checkable

POLL_S = 0.05
"""How often a process that waits for the device asks for it."""


@runtime_checkable
class Sleepable(Protocol):
    """A model that gives the memory of its device back while it does not compute."""

    def sleep(self) -> None:
        """Free the device's memory; only while nothing is under way."""

    def wake(self) -> None:
        """Take the device's memory again."""


class SharedDevice:
    """One process's place among those that share a device; they all name the same directory.

    Two locks make a queue of one: who wants the device holds `queue` until it has `device`. Without it, a holder that gives the device and
    takes it again at once would always be faster than whoever waits.
    """

    def __init__(self, directory: Path) -> None:
        """Make the two files if they are not there."""
        directory.mkdir(parents=True, exist_ok=True)
        self._queue, self._device = ((directory / name).open("wb") for name in ("device.queue", "device.lock"))
        self._queued = False
        self.owned = False
        self.model: Sleepable | None = None
        """What sleeps while others have the device; None until it is loaded, with the device held."""

    @property
    def contended(self) -> bool:
        """Whether another process waits for the device that this one holds."""
        if not _lock(self._queue):
            return True
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        return False

    def acquire(self) -> bool:
        """Have the device, if it is free, and wake the model; else be the next, and ask again soon."""
        if self.owned:
            return True
        self._queued = self._queued or _lock(self._queue)
        if not self._queued or not _lock(self._device):
            return False
        self.owned = True
        self.leave_queue()
        if self.model is not None:
            self.model.wake()
        return True

    def wait(self, stop: Event, *, meanwhile: Callable[[], None]) -> bool:
        """Take the device, however long that lasts; False when `stop` is set before."""
        while not self.acquire():
            meanwhile()
            if stop.wait(POLL_S):
                self.leave_queue()
                return False
        return True

    def leave_queue(self) -> None:
        """Wait no longer: a place in the queue that nobody uses would keep the others from the device."""
        if self._queued:
            self._queued = False
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def release(self) -> None:
        """Let the model sleep, and hand the device over."""
        if self.model is not None:
            self.model.sleep()
        self.owned = False
        fcntl.flock(self._device, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of everything, whatever the model does."""
        self._queued = self.owned = False
        self._queue.close()
        self._device.close()


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
