"""Fetches weights while the engine draws: a thread follows the run and brings the newest version's tensors.

The rule: a version counts once its tensors are here, whole and checked; versions that a newer one overtakes are left out.
"""

import threading
from collections.abc import Sequence

from penstock.infra.log import Log
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.weight_sync import fetch

_POLL_S = 0.5
_CLOSE_S = 2.0


class WeightPrefetch:
    """Follows ledger and manifests for a worker that must not wait for them."""

    def __init__(self, log: Log, run: str) -> None:
        self.state = LedgerState(run)
        """Kept up to date by the thread; other threads only read it."""
        self.version = -1
        """The newest version whose tensors were fetched."""
        self._log, self._run = log, run
        self._tensors: Sequence[TensorBytes] = ()
        self._failure: BaseException | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="weights")
        self._thread.start()

    def take(self) -> tuple[int, Sequence[TensorBytes]]:
        """The newest version with its tensors; each version is handed out once."""
        with self._lock:
            tensors, self._tensors = self._tensors, ()
            assert tensors, f"version {self.version} was taken already"
            return self.version, tensors

    def wait(self, timeout_s: float) -> None:
        """Wait for a version to come or the run to end; raises what has ended the thread."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Raise what has ended the thread: a version that is gone or broken, a broker that was away too long."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _follow(self) -> None:
        try:
            follower = LedgerFollower(self._log, self._run, self.state)
            try:
                follower.catch_up()  # a joiner needs the newest version, none of those before it
                while not self._closed.is_set() and self.state.closed is None:
                    if self.state.newest_version > self.version:
                        self._fetch(self.state.newest_version)
                    follower.poll(_POLL_S)
            finally:
                follower.close()
        except BaseException as error:  # this thread's edge: its owner raises it again
            self._failure = error
        self._changed.set()

    def _fetch(self, version: int) -> None:
        tensors = fetch(self._log, self.state.manifests[version], run=self._run)
        with self._lock:
            self.version, self._tensors = version, tensors
        self._changed.set()
