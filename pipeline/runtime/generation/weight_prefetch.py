"""Fetches weights while the engine draws: a thread follows the run and brings a copy of the weights to the newest version.

The rule: a version counts once it is here whole and checked; versions that a newer one overtakes are left out. One that cannot be read
is tried again: the worker goes on with the weights that its engine has. Where workers of a machine share one copy, one of them reads for
all; which one that is is settled anew when it ends. Where the trainer shows its own copy (`direct`), nobody reads.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.log import Log
from penstock.infra.tensors.machine_memory import MachineMemory, is_supported
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import NONE, WeightCopy
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.weights.base_weights import BaseWeights
from penstock.pipeline.runtime.weights.direct import IpcWeightReceiver
from penstock.pipeline.runtime.weights.ends import read_ends
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.topics.weights import Manifest

RETRY_S = 10.0
"""How long after a failure a version is read again; at once when another manifest says where its chunks are."""
ASK_S = 1.0
"""How often a worker asks the one that reads for its machine for the memory that both see."""
_POLL_S = 0.5
_SHARED_POLL_S = 0.05
"""The same while another process reads a version: its end is seen, not announced."""
_CLOSE_S = 2.0


class WeightPrefetch:
    """Follows ledger and manifests for a worker that must not wait for them."""

    def __init__(
        self, log: Log, run: str, *, notify: Callable[[str], None] = lambda _: None, shared: bool = False, direct: bool = False
    ) -> None:
        """`notify` gets a line when a version cannot be read, and when it can be after all.

        `shared`: one copy for the machine's workers. `direct`: where the trainer is on this machine, what it has in its memory.
        """
        self.state = LedgerState(run, newest_only=True)
        """Kept up to date by the thread; other threads only read it."""
        self._copy = WeightCopy()
        self._shared = shared and is_supported()
        self._direct = direct and is_supported()
        self._ipc_receiver: IpcWeightReceiver | None = None
        """The trainer's memory, once this worker knows the run's version 0."""
        self._memory: MachineMemory | None = None
        """What this worker shares with others, once it knows the run's version 0."""
        self._ask_at = 0.0
        self._log, self._run, self._notify = log, run, notify
        self._reader, self._below = ChunkReader(log, run), BaseWeights()
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
        """The newest version whose tensors are here; -1 while there are none, or another version comes in the place of the last one."""
        version = self._copy.version
        return version if self._is_published(version) else NONE

    @contextmanager
    def taken(self) -> Iterator[tuple[int, Sequence[TensorBytes]]]:
        """The version that is here with its tensors, or -1 and none; they do not change inside the block."""
        with self._copy.reading() as (version, tensors):
            yield (version, tensors) if self._is_published(version) else (NONE, ())

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
            follower = LedgerFollower(self._log, self._run, self.state, read_ends(self._log, self._run, self.state))
            try:
                follower.catch_up()  # a joiner needs the newest version, none of those before it
                while not self._closed.is_set() and self.state.closed is None:
                    before, others = self.version, False
                    if self.state.newest_version > before and not (others := not self._reads_itself()):
                        self._fetch(self.state.newest_version)
                    if self.version == before:
                        follower.poll(_SHARED_POLL_S if others else _POLL_S)
                    if self.version != before:  # said at once: an idle worker waits for it
                        self._changed.set()
            finally:
                follower.close()
                self._reader.close()
                self._leave()
                if self._ipc_receiver is not None:
                    self._ipc_receiver.close()
        except BaseException as error:  # this thread's edge: its owner raises it again
            self._failure = error
        self._changed.set()

    def _is_published(self, version: int) -> bool:
        """Whether the copy's version is one that this worker knows of: another process may be ahead of it."""
        manifest = self.state.manifests.get(version)
        return version <= self.state.newest_version and (manifest is None or manifest.digest == self._copy.digest)

    def _reads_itself(self) -> bool:
        """Whether this worker reads from the log, for itself or for all of its machine; if not, see what others have there."""
        if self._sees_trainers():
            return False
        if not self._shared:
            return True
        if self._memory is None:
            origin = self.state.manifests[0]
            self._memory = MachineMemory(f"{self._run} {origin.created_ns} {origin.digest}")
            self._copy = WeightCopy(self._memory)
        try:
            if self._memory.claim():
                return True
            if time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + ASK_S
                self._attach(self._memory)
        except OSError as error:
            self._notify(f"weights cannot be shared with this machine's other workers ({error}): this one reads them for itself")
            self._leave()
            self._shared, self._copy = False, WeightCopy()
        return not self._shared

    def _sees_trainers(self) -> bool:
        """Whether the newest version is in the trainer's memory; this worker's copy is there then, and elsewhere if not."""
        if not self._direct:
            return False
        if self._ipc_receiver is None:
            self._ipc_receiver = IpcWeightReceiver(self._run, self.state.manifests[0])
        if not self._ipc_receiver.serves(self.state.manifests[self.state.newest_version]):
            if self._copy is self._ipc_receiver.copy:
                self._copy = WeightCopy()
            return False
        if self._copy is not self._ipc_receiver.copy:
            self._leave()
            self._copy = self._ipc_receiver.copy
        return True

    def _attach(self, memory: MachineMemory) -> None:
        """See what the reading process has. Raises `OSError`."""
        if (file := memory.request_file()) is not None:
            layout = self.state.manifests[0]
            self._copy.lay_out(names=layout.names, dtypes=layout.dtypes, shapes=layout.shapes)
            with self._copy.lock:
                memory.map(file)

    def _leave(self) -> None:
        if self._memory is not None:
            with self._copy.lock:
                self._memory.close()
            self._memory = None

    def _fetch(self, version: int) -> None:
        manifest = self.state.manifests[version]
        if manifest is self._refused and time.monotonic() < self._retry_at:
            return
        try:
            self._bring(version)
        except LogUnreachable:
            raise
        except LogError as error:
            if self._refused is None or self._refused.version != version:
                self._notify(f"version {version} cannot be read: {error}; this worker goes on with the weights it has and tries again")
            self._refused, self._retry_at = manifest, time.monotonic() + RETRY_S
            return
        if self._refused is not None:
            self._notify(f"version {version} is here")
            self._refused = None

    def _bring(self, version: int) -> None:
        """Read a version where reading ended last, or anew if that fails: what comes there may have been deleted since."""
        for was_open in (self._reader.is_open, False):
            try:
                bring(self._copy, self._log, self.state.manifests, version, run=self._run, reader=self._reader, below=self._below)
            except LogUnreachable:
                raise
            except LogError:
                self._reader.close()
                if not was_open:
                    raise
            else:
                return


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
