"""Fetches weights while the engine generates: a thread follows the run and updates a copy of the weights to the newest version.

A version is available once it is complete and checked; overtaken versions are skipped. A failed read is retried, and the engine keeps its
weights. If workers of a machine share one copy, one of them reads for all, and another takes over when it exits. If the trainer shares
its memory (`direct`), no worker reads, and a version may be loaded before its manifest is in the log: nothing that was generated with it
is published until then. A late joiner starts near the ends of ledger and manifests: joining costs the same at any time.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.log import Log, Partition
from penstock.infra.tensors.host_memory import NONE, is_supported
from penstock.infra.tensors.machine_memory import MachineMemory
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.topic_reader import between
from penstock.pipeline.runtime.weights.direct import IpcWeightReceiver, attach
from penstock.pipeline.runtime.weights.read import BaseWeights, ChunkReader, bring
from penstock.topics import ledger, weights
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NEAR = 256
"""Number of offsets at the end of a partition that are read first."""
FETCH_BYTES = 256 << 10
"""[bytes] Fetched at once of the ledger and of the manifests: most records after the first manifest are not needed."""
FIRST = 16
"""Number of offsets at the start of the manifests' partition, among which is that of version 0."""


def read_ends(log: Log, run: str, state: LedgerState) -> dict[Partition, int]:
    """Fill a new `state` from the end of the run's log; returns the offsets from which to follow ledger and manifests."""
    book, manifests = (f"{run}.ledger", 0), (f"{run}.weights", weights.MANIFESTS)
    return {manifests: _read_manifests(log, manifests, state), book: _read_ledger(log, book, state)}


def _read_ledger(log: Log, at: Partition, state: LedgerState) -> int:
    """Apply the last entries of the ledger to `state`; return the offset from which to follow it: its start if it is short."""
    start, end = log.beginning_offsets([at])[at], log.end_offsets([at])[at]
    if end - start > 2 * NEAR:
        records = list(between(log, at, end - NEAR, end, fetch_bytes=FETCH_BYTES))
        if (first := _first_of_longest(records, lambda record: ledger.read(record, run=state.run)[1].seq)) is not None:
            state.last_seq = first[1] - 1
            state.apply_usable(records[first[0] :])
            return end
    return start


def _read_manifests(log: Log, at: Partition, state: LedgerState) -> int:
    """Apply the manifests of version 0 and of the newest version's chain to `state`; return the offset from which to follow them.

    That is the start, and nothing is applied, if there are few manifests or the chain is not complete at the end.
    """
    start, end = log.beginning_offsets([at])[at], log.end_offsets([at])[at]
    span, ledger_state = NEAR, LedgerState(state.run)
    ledger_state.apply_usable(between(log, at, start, min(end, start + FIRST), fetch_bytes=FETCH_BYTES))
    origin = ledger_state.manifests.get(0)
    while origin is not None and end - start > 2 * span:
        records = list(between(log, at, end - span, end, fetch_bytes=FETCH_BYTES))
        first = _first_of_longest(records, lambda record: weights.read(record, run=state.run)[1].version)
        ledger_state = LedgerState(state.run)
        ledger_state.add(origin)
        if first is not None:
            ledger_state.newest_version = first[1] - 1
            ledger_state.apply_usable(records[first[0] :])
            if _is_whole(ledger_state):
                for _, manifest in sorted(ledger_state.manifests.items()):
                    state.add(manifest)
                return end
        span *= 4
    return start


def _is_whole(ledger_state: LedgerState) -> bool:
    """True if all manifests of the newest version's chain are present.

    Version 0 may have been sent again later, but not after another version is out: adapters go with its manifest near the beginning.
    """
    try:
        first, *others = weights.chain(ledger_state.manifests, ledger_state.newest_version)
    except ValueError:
        return False
    return first.version > 0 or (bool(others) and others[0].begins_chain)


def _first_of_longest(records: list[Record], number_of: Callable[[Record], int]) -> tuple[int, int] | None:
    """(index, number) of the first record of the longest run of consecutive numbers; None if no record is usable.

    `number_of` returns a record's number, or raises `Unusable`.
    """
    numbers = list[tuple[int, int]]()
    for index, record in enumerate(records):
        with suppress(Unusable):
            numbers.append((index, number_of(record)))
    lengths = dict[int, int]()
    for _, number in reversed(numbers):
        lengths[number] = max(lengths.get(number, 0), 1 + lengths.get(number + 1, 0))
    return max(numbers, key=lambda pair: (lengths[pair[1]], -pair[0]), default=None)


RETRY_S = 10.0
"""Delay before a version is read again after a failure; none if another manifest locates its chunks."""
REQUEST_EVERY_S = 1.0
"""How often a worker requests the shared memory from the one that reads for the machine."""
_POLL_S = 0.5
_SHARED_POLL_S = 0.05
"""Interval of checks for a new version while another process reads it into shared memory, which announces nothing."""
_CLOSE_S = 2.0


class WeightPrefetch:
    """A thread that follows the run and fetches the newest version while the engine generates."""

    def __init__(
        self, log: Log, run: str, *, notify: Callable[[str], None] = lambda _: None, shared: bool = False, direct: bool = False
    ) -> None:
        """Start the thread; `notify` gets a line when a version cannot be read, and when it was read after that.

        `shared`: one copy for the machine's workers. `direct`: use the trainer's memory if it is on this machine.
        """
        self.state = LedgerState(run, newest_only=True)
        """Updated by the thread; other threads only read it."""
        self._copy = WeightCopy()
        self._shared = shared and is_supported()
        self._direct = direct and is_supported()
        self._ipc_receiver: IpcWeightReceiver | None = None
        """The trainer's memory, once this worker has version 0 of the run's manifests."""
        self._memory: MachineMemory | None = None
        """Memory shared with other workers, once this worker has version 0 of the run's manifests."""
        self._request_at = 0.0
        self._log, self._run, self._notify = log, run, notify
        self._reader, self._base = ChunkReader(log, run), BaseWeights()
        self._ahead: tuple[int, str] | None = None
        """Version and digest of weights that were taken before the log had their manifest."""
        self._refused: Manifest | None = None
        """The manifest of the version whose read failed last."""
        self._retry_at = 0.0
        self._failure: BaseException | None = None
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="weights")
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest version in the local copy; -1 if there is none, or while it is being overwritten."""
        version = self._copy.version
        return version if self._may_load(version) else NONE

    @contextmanager
    def taken(self) -> Iterator[tuple[int, Sequence[TensorBytes]]]:
        """The local version with its tensors, or -1 and none; they do not change inside the block."""
        published = self.published()
        with self._copy.reading() as (version, tensors):
            loadable = self._may_load(version)
            if loadable and version > published:
                self._check_same(version, self._copy.digest)
                self._ahead = version, self._copy.digest
            yield (version, tensors) if loadable else (NONE, ())

    def published(self) -> int:
        """The newest version in the log: samples of a later version must not be published yet.

        Raises `LogError` if the log has other weights of a version than those that were taken, as when a trainer exits before it publishes
        them and its successor publishes others. The worker then has to start again, and what it generated with them is lost.
        """
        newest = self.state.newest_version
        if self._ahead is not None and self._ahead[0] <= newest:
            manifest = self.state.manifests.get(self._ahead[0])
            self._check_same(self._ahead[0], manifest.digest if manifest is not None else "no longer in the log")
            self._ahead = None
        return newest

    def _check_same(self, version: int, digest: str) -> None:
        """Raise `LogError` if weights were taken before their publication, and those of `version` have another digest."""
        if self._ahead is not None and self._ahead != (version, digest):
            loaded, had = self._ahead
            raise LogError(
                f"version {loaded} was loaded before its publication, with digest {had}, but version {version} was published with {digest}:"
                " this worker must restart, and loses what it generated with it"
            )

    def wait(self, timeout_s: float) -> None:
        """Wait for a new version or the end of the run; raises an error of the thread."""
        self._changed.wait(timeout_s)
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Raise an error of the thread, such as a timeout in an outage."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _follow(self) -> None:
        """Follow the run and fetch new versions until it is closed; the body of the thread, whose error `check` raises."""
        try:
            follower = LedgerFollower(self._log, self._run, self.state, read_ends(self._log, self._run, self.state))
            try:
                follower.catch_up()  # a joiner needs the newest version, none of those before it
                while not self._closed.is_set() and self.state.closed is None:
                    before, newest = self.version, self.state.newest_version
                    others = self._sees_trainers()
                    if newest > self.version and not others and not (others := not self._reads_itself()):
                        self._fetch(newest)
                    if self.version == before:
                        follower.poll(_SHARED_POLL_S if others else _POLL_S)
                    if (self.version, self.state.newest_version) != (before, newest):  # an idle worker waits for it
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

    def _may_load(self, version: int) -> bool:
        """True if the version in the copy is in this worker's manifests, or the trainer is publishing it."""
        if version == self.state.newest_version + 1:
            return self._ipc_receiver is not None and self._copy is self._ipc_receiver.copy
        manifest = self.state.manifests.get(version)
        return version <= self.state.newest_version and (manifest is None or manifest.digest == self._copy.digest)

    def _reads_itself(self) -> bool:
        """True if this worker reads from the log, for itself or for its machine; otherwise attach to the shared copy."""
        if not self._shared:
            return True
        if self._memory is None:
            origin = self.state.manifests[0]
            self._memory = MachineMemory(f"{self._run} {origin.created_ns} {origin.digest}")
            self._copy = WeightCopy(self._memory)
        try:
            if self._memory.claim():
                return True
            if time.monotonic() >= self._request_at:
                self._request_at = time.monotonic() + REQUEST_EVERY_S
                attach(self._copy, self._memory, self.state.manifests[0])
        except OSError as error:
            self._notify(f"weights cannot be shared with other workers on this machine ({error}): this worker reads its own copy")
            self._leave()
            self._shared, self._copy = False, WeightCopy()
        return not self._shared

    def _sees_trainers(self) -> bool:
        """True if the trainer's memory contains the newest version or the next one; this worker then uses that memory."""
        if not self._direct or self.state.newest_version < 0:
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

    def _leave(self) -> None:
        """Release the memory that is shared with other workers, if this worker uses it."""
        if self._memory is not None:
            with self._copy.lock:
                self._memory.close()
            self._memory = None

    def _fetch(self, version: int) -> None:
        """Read a version into the copy; after a failure `notify` gets one line, and it is read again after `RETRY_S`."""
        manifest = self.state.manifests[version]
        if manifest is self._refused and time.monotonic() < self._retry_at:
            return
        try:
            self._bring(version)
        except LogUnreachable:
            raise
        except LogError as error:
            if self._refused is None or self._refused.version != version:
                self._notify(f"weight version {version} cannot be read: {error}; this worker keeps its current weights and retries")
            self._refused, self._retry_at = manifest, time.monotonic() + RETRY_S
            return
        if self._refused is not None:
            self._notify(f"weight version {version} was read")
            self._refused = None

    def _bring(self, version: int) -> None:
        """Read a version from the current position; if that fails, because chunks were deleted, from the start of its chain."""
        for was_open in (self._reader.is_open, False):
            try:
                bring(self._copy, self._log, self.state.manifests, version, run=self._run, reader=self._reader, below=self._base)
            except LogUnreachable:
                raise
            except LogError:
                self._reader.close()
                if not was_open:
                    raise
            else:
                return


class VersionWatch(WeightPrefetch):
    """Follows which versions exist without fetching them, for a worker without an engine."""

    @property
    def version(self) -> int:
        return self.state.newest_version

    @contextmanager
    def taken(self) -> Iterator[tuple[int, Sequence[TensorBytes]]]:
        yield self.version, ()
