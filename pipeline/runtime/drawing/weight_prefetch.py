"""Fetches weights while the engine draws: a thread follows the run and brings a copy of the weights to the newest version.

The rule: a version counts once it is here whole and checked; versions that a newer one overtakes are left out. One that cannot be read
is tried again: the worker goes on with the weights that its engine has.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.log import Log
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.weights.read import bring
from penstock.topics.weights import Manifest

RETRY_S = 10.0
"""How long after a failure a version is read again; at once when another manifest says where its chunks are."""
_POLL_S = 0.5
_CLOSE_S = 2.0


class WeightPrefetch:
    """Follows ledger and manifests for a worker that must not wait for them."""

    def __init__(self, log: Log, run: str, *, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` gets a line when a version cannot be read, and when it can be after all."""
        self.state = LedgerState(run, newest_only=True)
        """Kept up to date by the thread; other threads only read it."""
        self._copy = WeightCopy()
        self._log, self._run, self._say = log, run, say
        self._refused: Manifest | None = None
        """The manifest of the version that could not be read last."""
        self._retry_at = 0.0
        self._failure: BaseException | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="weights")
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest version whose tensors are here; -1 while there are none, or a whole version comes in the place of the last one."""
        return self._copy.version

    @contextmanager
    def taken(self) -> Iterator[tuple[int, Sequence[TensorBytes]]]:
        """The version that is here with its tensors, or -1 and none; they do not change inside the block."""
        with self._copy.reading() as (version, tensors):
            yield version, tensors

    def wait(self, timeout_s: float) -> None:
        """Wait for a version to come or the run to end; raises what has ended the thread."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Raise what has ended the thread: a broker that was away too long."""
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
                known = -1
                while not self._closed.is_set() and self.state.closed is None:
                    if self.state.newest_version > self.version:
                        self._fetch(self.state.newest_version)
                    if self.state.newest_version > known:
                        known = self.state.newest_version
                        self._changed.set()
                    follower.poll(_POLL_S)
            finally:
                follower.close()
        except BaseException as error:  # this thread's edge: its owner raises it again
            self._failure = error
        self._changed.set()

    def _fetch(self, version: int) -> None:
        manifest = self.state.manifests[version]
        if manifest is self._refused and time.monotonic() < self._retry_at:
            return
        try:
            bring(self._copy, self._log, self.state.manifests, version, run=self._run)
        except LogUnreachable:
            raise
        except LogError as error:
            if self._refused is None or self._refused.version != version:
                self._say(f"version {version} cannot be read: {error}; this worker goes on with the weights it has and tries again")
            self._refused, self._retry_at = manifest, time.monotonic() + RETRY_S
            return
        if self._refused is not None:
            self._say(f"version {version} is here")
            self._refused = None
        self._changed.set()


class VersionWatch(WeightPrefetch):
    """The same for a worker that draws nothing itself: it follows which versions there are, and fetches none."""

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self.state.newest_version

    @contextmanager
    def taken(self) -> Iterator[tuple[int, Sequence[TensorBytes]]]:
        """The newest version, without its tensors."""
        yield self.version, ()
