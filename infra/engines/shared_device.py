"""Time-shares one device between the processes of a machine: an exclusive file lock and a queue of one waiting process.

The owner's model is awake, all other models sleep. The kernel releases the locks of a process that exits for any reason. The owner sees
that another process waits and releases the device when nothing of its own is running.
"""

import fcntl
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Protocol, runtime_checkable

from penstock.infra.paths import locked

POLL_S = 0.05
"""Interval at which a waiting process tries to acquire the device."""


@runtime_checkable
class Sleepable(Protocol):
    """A model that can free its device's memory while it does not compute."""

    def sleep(self) -> None:
        """Free the device's memory; only while nothing is running."""

    def wake(self) -> None:
        """Allocate the device's memory again."""


class SharedDevice:
    """One process's access to a shared device; all processes name the same directory.

    A process that wants the device locks `device.queue` until it has locked `device.lock`. Without the queue, an owner that releases the
    device and acquires it again at once would always be faster than a waiting process.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._queue, self._device = ((directory / name).open("wb") for name in ("device.queue", "device.lock"))
        self._queued = False
        self.owned = False
        self.model: Sleepable | None = None
        """Model that sleeps while another process owns the device; None until it is loaded, while this process owns the device."""

    @property
    def contended(self) -> bool:
        """True if another process waits for the device."""
        if not locked(self._queue):
            return True
        fcntl.flock(self._queue, fcntl.LOCK_UN)
        return False

    def acquire(self) -> bool:
        """Acquire the device if it is free, and wake the model; otherwise queue for it if possible, and return False."""
        if self.owned:
            return True
        self._queued = self._queued or locked(self._queue)
        if not self._queued or not locked(self._device):
            return False
        self.owned = True
        self.leave_queue()
        if self.model is not None:
            self.model.wake()
        return True

    def wait(self, stop: Event, *, meanwhile: Callable[[], None]) -> bool:
        """Acquire the device without a timeout, calling `meanwhile` between attempts; return False if `stop` is set before."""
        while not self.acquire():
            meanwhile()
            if stop.wait(POLL_S):
                self.leave_queue()
                return False
        return True

    def leave_queue(self) -> None:
        """Leave the queue for the device, if in it: an unused position in it would block the other processes."""
        if self._queued:
            self._queued = False
            fcntl.flock(self._queue, fcntl.LOCK_UN)

    def release(self) -> None:
        """Put the model to sleep and release the device."""
        if self.model is not None:
            self.model.sleep()
        self.owned = False
        fcntl.flock(self._device, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the locks without putting the model to sleep."""
        self._queued = self.owned = False
        self._queue.close()
        self._device.close()
