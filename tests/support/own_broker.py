"""A broker of one test's own, to be frozen and killed."""

import os
import signal
from pathlib import Path

from penstock.infra.broker import embedded
from tests.support.log_helpers import WAIT_S
from tests.support.waiting import until


class OwnBroker:
    """A broker that a test may freeze and kill."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def start(self) -> str:
        """Start it, unless it runs, and return its address."""
        return embedded.start(home=self.home).bootstrap

    def _signal(self, number: int) -> None:
        pid = embedded.status(self.home).pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        until(lambda: not embedded.status(self.home).running, limit_s=WAIT_S)

    def freeze(self) -> None:
        """SIGSTOP: it answers nothing, but its connections stand."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
