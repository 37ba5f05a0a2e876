"""Sends policy versions in the background: a thread encodes and sends one version at a time while the next step is computed.

Once the chunks are acknowledged, the thread calls the owner of the ledger, which commits the manifest. Each record between the chunks is
read once and must be a duplicate or goes to the dead-letter topic; a version waits at most `READ_LIMIT_S` for that.

When a chain of deltas is long enough, its newest version is also sent as a full snapshot, concurrently with later versions, none of which
waits for it. The snapshot's manifest replaces the delta's, because readers use the last one of a version.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.infra.errors import Diverged, LogError, LogUnreachable
from penstock.infra.log import Log, Pending, Producer
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.host_memory import is_supported
from penstock.infra.tensors.stream import LARGEST, TensorBytes, broken_tensor, hash_of
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.config.services import WeightsSection
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.direct import IpcWeightSender
from penstock.pipeline.runtime.weights.publish import Base, chain_state, chunk_partitions, send_version, snapshot_partition
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.topics import weights
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

READ_LIMIT_S = 5.0
"""Longest time that one version waits for the gaps between chunks; the remaining ones are read before the next version."""


@dataclass(slots=True)
class ChunkGaps:
    """Tracks the offsets of the trainer's chunks, and checks foreign records between them."""

    session: Session
    ends: dict[int, int]
    """Chunk partition -> offset after the trainer's newest chunk; gaps before were checked when that was published."""
    unread: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Partition, start offset and end offset of the gaps that are not read yet."""

    def add(self, offsets: Iterable[tuple[int, int]]) -> None:
        """Add the gaps before these (partition, offset) pairs: the newest chunks, or the partitions' ends."""
        for partition, offset in sorted(offsets):
            start = self.ends.get(partition, 0)
            self.ends[partition] = offset + 1
            if start < offset:
                self.unread.append((partition, start, offset))

    def read(self) -> None:
        """Check the records in all gaps, for at most `READ_LIMIT_S`."""
        until = time.monotonic() + READ_LIMIT_S
        while self.unread and time.monotonic() < until:
            partition, start, end = self.unread.popleft()
            if (position := self._read_gap(partition, start, end, until=until)) < end:
                self.unread.appendleft((partition, position, end))

    def _read_gap(self, partition: int, start: int, end: int, *, until: float) -> int:
        """Check the records from `start` to `end`, a few at a time as each may be large; return the offset of the first unread one."""
        tp = self.session.topic("weights"), partition
        start = max(start, self.session.log.beginning_offsets([tp])[tp])  # those before were deleted
        if start >= end:
            return end
        with contextlib.closing(self.session.log.tail({tp: start})) as tail:
            while (position := tail.position(tp)) < end and time.monotonic() < until:
                for record in tail.poll(0.2, max_records=100):
                    if record.offset < end:
                        self._check(record)
            return position

    def _check(self, record: Record) -> None:
        """Report a record that no manifest lists as a duplicate, or write a dead letter about it."""
        try:
            with self.session.dead_letters.decoding(record):
                version = weights.read_chunk(record, run=self.session.run)[1].version
        except Unusable as error:
            self.session.dead_letters.write(record, error)
        else:  # a copy, or a chunk that an earlier trainer sent before it crashed
            self.session.reporter.duplicate(f"chunk of version {version} at {record.id}")


IN_FLIGHT_BYTES = 32 << 20
"""Largest size of sent chunks that are not acknowledged."""


@dataclass(slots=True)
class Publication:
    """A version that is being sent."""

    content: Weights
    version: int
    step: int
    base: Base | None
    copied_s: float
    """Seconds in which the trainer copied the weights."""
    started: float = field(default_factory=time.monotonic)
    awaited: float | None = None
    """`time.monotonic()` since when the trainer waits for the commit; None if it does not."""
    manifest: Manifest | None = None
    """Manifest of the version; None until all chunks are acknowledged."""
    adapted: Adapted | None = None
    """The weights as base and adapters, if only the adapters are sent."""
    shared: Sequence[TensorBytes] | None = None
    """The tensors in the memory that this machine's workers share, if they do."""
    failure: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def sent(self) -> bool:
        """True once the thread has ended."""
        return self.thread is not None and not self.thread.is_alive()


class Snapshot:
    """Sends a published version again in full, in a thread and one chunk at a time, so that later versions need not wait for it."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.failure: BaseException | None = None
        self.ended, self.abandoned = threading.Event(), threading.Event()

    def start(self, base: Base, published: Manifest, *, then: Callable[[Manifest], None], **settings: Any) -> None:
        """Send `base`, the version `published`, with these settings of `send_version`, and call `then` with the manifest."""

        def run() -> None:
            try:
                digest, step = published.digest, published.step
                then(send_version(self, base.tensors, version=base.version, step=step, digest=lambda: digest, **settings))
            except BaseException as error:  # the owner raises it in its thread
                self.failure = error
            self.ended.set()

        threading.Thread(target=run, daemon=True, name="snapshot").start()

    def send(self, outgoing: Outgoing) -> Pending:
        """Send a chunk and wait until it is acknowledged. Raises `LogError` if the snapshot is abandoned."""
        if self.abandoned.is_set():
            raise LogError("the trainer stops")
        pending = self._producer.send(outgoing)
        pending.offset()
        return pending


@dataclass(slots=True)
class WeightPublisher:
    """Sends versions as full snapshots, as deltas to the previous version in memory, or as LoRA adapters on version 0."""

    log: Log
    run: str
    config: WeightsSection
    count: int
    base: Base | None = None
    """The newest version, base of the next delta; None if the next version is a full snapshot or adapters."""
    notify: Callable[[str], None] = lambda _: None
    """Called with a line if weights cannot be shared with this machine's workers."""
    _producer: Producer | None = None
    _adapted: tuple[int, Adapted] | None = None
    """The newest version, if its adapters were sent."""
    _ipc_sender: IpcWeightSender | None = None
    """Shares the newest version with this machine's workers under `transport = "ipc"`."""
    snapshot: Snapshot | None = None
    """The snapshot that is being sent."""

    def start(
        self,
        content: Weights,
        *,
        version: int,
        step: int,
        manifests: Mapping[int, Manifest],
        full: bool = False,
        copied_s: float = 0.0,
        then: Callable[[Publication, Manifest], None] = lambda _publication, _manifest: None,
    ) -> Publication:
        """Start to send a version whose tensors are already copied, in `copied_s` seconds; `full` forces a full snapshot.

        The thread calls `then` once all chunks are acknowledged; its error becomes that of the publication.
        """
        adapted = None if full else self._adapters_to_send(content, manifests)
        base = None if full or adapted is not None or not self._may_be_delta(manifests) else self.base
        publication = Publication(content, version, step, base, copied_s, adapted=adapted)
        origin = manifests.get(0)
        publication.thread = threading.Thread(target=self._send, args=(publication, origin, then), daemon=True, name="publish")
        publication.thread.start()
        return publication

    def finish(self, publication: Publication) -> Manifest:
        """Wait for the thread; returns the version's manifest, or raises the error of the thread."""
        assert publication.thread is not None
        publication.thread.join()
        if publication.failure is not None:
            raise publication.failure
        assert publication.manifest is not None
        return publication.manifest

    def committed(self, publication: Publication) -> None:
        """Retain this version as base of the next delta, or only its adapters if the run sends adapters."""
        adapted = publication.adapted if publication.version else publication.content.adapted
        if adapted is not None and self.config.encoding != "merged":
            self.base, self._adapted = None, (publication.version, adapted)
            return
        tensors = publication.content.tensors if publication.shared is None else publication.shared
        self.base, self._adapted = Base(version=publication.version, tensors=sorted(tensors, key=lambda tensor: tensor.name)), None

    def newest(self, published: Manifest) -> Weights | None:
        """The weights of a published version, if it is the newest and still in memory."""
        version, hash_name = published.version, hash_of(published.digest)
        if self._adapted is not None and self._adapted[0] == version:
            return Weights(self._adapted[1].merged, hash_name)
        base = self.base
        return Weights(lambda: base.tensors, hash_name) if base is not None and base.version == version else None

    def read_back(self, manifests: Mapping[int, Manifest], version: int) -> LogError | None:
        """Read a published version as base of the next delta; return the error if that fails, else None. Raises `LogUnreachable`."""
        copy = WeightCopy()
        try:
            bring(copy, self.log, manifests, version, run=self.run)
        except LogUnreachable:
            raise
        except LogError as error:
            return error
        shared = self._share(copy.tensors, version, manifests[version].digest, manifests.get(0))
        self.base = Base(version=version, tensors=copy.tensors() if shared is None else shared)
        return None

    def check_chunks(self, manifests: Mapping[int, Manifest], version: int) -> LogError | None:
        """Read all chunks of a published version, to check that workers can; return the error if one is missing or damaged, else None."""
        try:
            with contextlib.closing(ChunkReader(self.log, self.run)) as reader:
                for manifest in weights.chain(manifests, version):
                    for _ in reader.read(manifest):
                        pass
        except LogUnreachable:
            raise
        except LogError as error:
            return error
        return None

    def close(self) -> None:
        """Close the producer and the memory shared with this machine's workers."""
        if self._producer is not None:
            self._producer.close()
        if self._ipc_sender is not None:
            self._ipc_sender.close()

    def _adapters_to_send(self, content: Weights, manifests: Mapping[int, Manifest]) -> Adapted | None:
        """The weights as LoRA adapters; None unless version 0 is their base and all versions after it were sent as adapters."""
        adapted, origin = content.adapted, manifests.get(0)
        if self.config.encoding == "merged" or adapted is None or origin is None:
            return None
        newest = manifests[max(manifests)]
        if newest.version and newest.encoding != "adapter":
            return None
        return adapted if adapted.below_digest(hash_of(origin.digest)) == origin.digest else None

    def start_snapshot(self, manifests: Mapping[int, Manifest], then: Callable[[Manifest], None]) -> None:
        """Start to send the newest version in full if its chain of deltas is long, which limits what a new worker must read.

        The thread calls `then` with the manifest once all chunks are acknowledged. While a snapshot is being sent, no other one is started.
        """
        base, partition = self.base, snapshot_partition(count=self.count)
        if base is None or partition is None or self._producer is None or self.snapshot is not None:
            return
        if chain_state(manifests, base.version, every=self.config.anchor_every) == "long":
            self.snapshot = Snapshot(self._producer)
            settings = {"run": self.run, "partitions": [partition], "max_bytes": self.config.chunk_mib * 2**20}
            self.snapshot.start(base, manifests[base.version], then=then, **settings)

    def finish_snapshot(self) -> bool:
        """Return True if a snapshot was committed since the last call. Raises the error of its thread."""
        snapshot = self.snapshot
        if snapshot is None or not snapshot.ended.is_set():
            return False
        self.snapshot = None
        if snapshot.failure is not None:
            raise snapshot.failure
        return True

    def abandon_snapshot(self) -> None:
        """End the thread of the snapshot, if any, after the chunk that is being sent."""
        if self.snapshot is not None:
            self.snapshot.abandoned.set()
            self.snapshot.ended.wait()
            self.snapshot = None

    def _may_be_delta(self, manifests: Mapping[int, Manifest]) -> bool:
        """True unless the previous version is not in memory, or a long chain has to end here instead of with a snapshot sent later."""
        if self.base is None or self.base.version != max(manifests, default=-1):
            return False
        every = self.config.anchor_every
        if every > 1 and snapshot_partition(count=self.count) is not None:
            return chain_state(manifests, self.base.version, every=every) != "dense"
        return chain_state(manifests, self.base.version, every=every - 1) == "short"

    def _share(
        self, tensors: Callable[[], Sequence[TensorBytes]], version: int, digest: str, origin: Manifest | None
    ) -> Sequence[TensorBytes] | None:
        """Offer a version to workers of this machine in shared memory; returns its tensors there, or None if that is impossible."""
        if self.config.transport != "ipc" or origin is None:
            return None
        if self._ipc_sender is None:
            if not is_supported():
                self.notify('weights.transport = "ipc" needs Linux with /proc and memfd: workers read weights from the log instead')
                return None
            self._ipc_sender = IpcWeightSender(self.run, origin, notify=self.notify)
        return self._ipc_sender.put(tensors(), version=version, digest=digest)

    def _send(self, publication: Publication, origin: Manifest | None, then: Callable[[Publication, Manifest], None]) -> None:
        """Encode and send the chunks of a version and call `then`; store its manifest or the error in the publication."""
        try:
            if self._producer is None:
                self._producer = self.log.producer(max_in_flight_bytes=IN_FLIGHT_BYTES, linger_ms=0.0)
            content, adapted = publication.content, publication.adapted
            if (name := broken_tensor(content.tensors)) is not None:
                broken = f"optimizer step {publication.step - 1} made weights in {name} that are not finite or exceed {LARGEST:g}"
                raise Diverged(f"training diverged: {broken}; weights version {publication.version} is not published")

            def digest() -> str:
                """Compute the digest in a separate thread, and offer the weights to this machine before the chunks are sent."""
                publication.shared = self._share(lambda: content.tensors, publication.version, content.digest, origin)
                return content.digest

            manifest = send_version(
                self._producer,
                content.tensors if adapted is None else (),
                run=self.run,
                version=publication.version,
                step=publication.step,
                partitions=chunk_partitions(publication.version, count=self.count),
                max_bytes=self.config.chunk_mib * 2**20,
                digest=digest if adapted is not None or content.is_hashed or self.config.transport == "ipc" else None,
                hash_name=content.hash_name,
                base=publication.base,
                adapters=adapted.blocks(weights.layout(origin)) if adapted is not None and origin is not None else None,
            )
            content.hashed(manifest.digest)
            if origin is None and not publication.version:
                publication.shared = self._share(lambda: content.tensors, 0, manifest.digest, manifest)
            if adapted is not None:
                content.forget()
            publication.manifest = manifest
            then(publication, manifest)
        except BaseException as error:  # `finish` raises it in the owner's thread
            publication.failure = error
