"""Writes a version's chunks, describes them in a manifest, which the caller commits, and finds the chunks that can be deleted."""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.infra import faults
from penstock.infra.log import Pending
from penstock.infra.tensors.stream import HASH, ITEM_BYTES, Hash, Hasher, TensorBytes, in_name_order
from penstock.topics import weights
from penstock.topics.versions import weight_delta
from penstock.topics.weights import FIRST, Chunk, Manifest
from penstock.topics.wire.record import Outgoing

ENCODERS = max(2, min(8, (os.cpu_count() or 2) // 4))
"""Threads that compare two versions: numpy lets go of the interpreter, and one thread alone reads less than the memory gives."""

EARLY_CHUNK_BYTES, EARLY_CHUNKS = 2 << 20, 32
"""The first chunks are smaller: a delta of some MB is on its way while it is still compared, and is read from all partitions at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A published version to which the next one is a delta."""

    version: int
    tensors: Sequence[TensorBytes]
    """Tensors sorted by name."""


class Sender(Protocol):
    """Sends single records, as a `Producer`."""

    def send(self, outgoing: Outgoing) -> Pending: ...


def send_version(
    producer: Sender,
    tensors: Sequence[TensorBytes],
    *,
    run: str,
    version: int,
    step: int,
    partitions: Sequence[int],
    max_bytes: int,
    digest: Callable[[], str] | None = None,
    hash_name: Hash = HASH,
    base: Base | None = None,
    adapters: Iterable[Any] | None = None,
) -> Manifest:
    """Send a version, in full or as a delta to `base`; returns the manifest once all chunks are acknowledged.

    The chunks go to `partitions` in turn. `digest` is called for the digest of the tensors, in a thread; without it each part of a tensor
    is hashed while it is compared or sent, so that memory is read once. `adapters`, blocks of `weight_adapter`, are sent instead of
    tensors; then `digest` returns the digest of the merged weights.
    """
    ordered = in_name_order(tensors)
    if base is not None and _layout(ordered) != _layout(base.tensors):
        base = None
    writer = ChunkWriter(producer=producer, run=run, version=version, partitions=partitions, max_bytes=max_bytes)
    with ThreadPoolExecutor(1, "digest") as executor:
        hasher = Hasher(hash_name)
        computed = executor.submit(digest) if digest is not None else None
        if adapters is not None:
            for data in adapters:
                writer.add(data)
        else:
            _send_tensors(writer, ordered, base, None if digest is not None else (hasher, executor))
        writer.finish()
        computed = computed or executor.submit(hasher.digest)
    described = ordered if base is None else []
    return Manifest(
        version=version,
        step=step,
        encoding="adapter" if adapters is not None else "full" if base is None else "delta",
        base_version=0 if adapters is not None else None if base is None else base.version,
        digest=computed.result(),
        nbytes=sum(writer.sizes),
        names=tuple(tensor.name for tensor in described),
        dtypes=tuple(tensor.dtype for tensor in described),
        shapes=tuple(tensor.shape for tensor in described),
        chunk_partitions=tuple(writer.partition(index) for index in range(len(writer.sizes))),
        chunk_offsets=tuple(pending.offset() for pending in writer.pending),
        chunk_sizes=tuple(writer.sizes),
        chunk_sha256=tuple(writer.hashes),
        created_ns=time.time_ns(),
    )


def chunk_partitions(version: int, *, count: int) -> list[int]:
    """The partitions of a version's chunks, in order, in a topic with `count` partitions.

    Version 0 has one of its own, so that what follows it can be deleted; the others start at a different one each.
    """
    if version == 0 or count <= weights.FIRST:
        return [weights.ORIGIN]
    others = list(range(weights.FIRST, snapshot_partition(count=count) or count))
    turn = version % len(others)
    return others[turn:] + others[:turn]


def snapshot_partition(*, count: int) -> int | None:
    """The partition for snapshots of versions that were sent as deltas, so that chunks in any partition are in the order of versions.

    None in a topic with too few partitions for one.
    """
    return count - 1 if count > weights.FIRST + 1 else None


def manifest_record(manifest: Manifest, *, run: str) -> Outgoing:
    value = weights.encode(manifest)
    headers = weights.headers(manifest, run=run).encode(value)
    return Outgoing(topic=f"{run}.weights", partition=weights.MANIFESTS, key=str(manifest.version).encode(), headers=headers, value=value)


@dataclass(slots=True, kw_only=True)
class ChunkWriter:
    """Divides a stream of bytes into chunks, and sends each as soon as it is full."""

    producer: Sender
    run: str
    version: int
    partitions: Sequence[int]
    max_bytes: int
    sizes: list[int] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    _chunk: bytearray = field(default_factory=bytearray)

    def partition(self, index: int) -> int:
        return self.partitions[index % len(self.partitions)]

    def add(self, data: Any) -> None:
        """Append bytes to the stream, and send the chunks that they fill; `data` is any buffer."""
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            size = self._size()
            taken = view[start : start + size - len(self._chunk)]
            self._chunk += taken
            start += len(taken)
            if len(self._chunk) == size:
                self._send()

    def _size(self) -> int:
        return min(self.max_bytes, EARLY_CHUNK_BYTES) if len(self.sizes) < EARLY_CHUNKS else self.max_bytes

    def finish(self) -> None:
        """Send the last chunk, which may be shorter; none is empty."""
        if self._chunk:
            self._send()

    def _send(self) -> None:
        """Send the open chunk, and record its size and SHA-256 for the manifest."""
        index, data = len(self.sizes), bytes(self._chunk)
        self._chunk.clear()
        chunk = Chunk(version=self.version, index=index, data=data)
        topic, key = f"{self.run}.weights", str(self.version).encode()
        outgoing = weights.outgoing_chunk(chunk, run=self.run, topic=topic, key=key, partition=self.partition(index))
        self.pending.append(self.producer.send(outgoing))
        faults.reach("chunk.sent")
        self.sizes.append(len(data))
        self.hashes.append(hashlib.sha256(data).hexdigest())


def _send_tensors(
    writer: ChunkWriter, new: Sequence[TensorBytes], base: Base | None, hashing: tuple[Hasher, ThreadPoolExecutor] | None
) -> None:
    """Send tensors, or their delta to `base`, in parts of a tensor, several of which are compared and hashed concurrently.

    `hashing` is the hasher to feed and the executor in which it runs; None if the digest is computed elsewhere.
    """
    start, ahead = 0, deque[tuple[Future[list[Any]], Future[None] | None]]()

    def send_first() -> None:
        encoded, hashed = ahead.popleft()
        for part in encoded.result():
            writer.add(part)
        if hashed is not None:
            hashed.result()

    with ThreadPoolExecutor(ENCODERS, "encode") as encoders:
        for index, after in enumerate(new):
            item, becomes = ITEM_BYTES[after.dtype], memoryview(after.data).cast("B")
            was = None if base is None else memoryview(base.tensors[index].data).cast("B")
            if hashing is not None:
                hashing[1].submit(hashing[0].start, after)
            for low, nbytes, _ in weight_delta.pieces([(after.nbytes, item)]):
                piece = slice(low, low + nbytes)
                hashed = None if hashing is None else hashing[1].submit(hashing[0].update, becomes[piece])
                ahead.append((encoders.submit(_encoded, was, becomes, piece, start + low, item), hashed))
                if len(ahead) > 2 * ENCODERS:
                    send_first()
            start += after.nbytes
        while ahead:
            send_first()


def _encoded(was: memoryview | None, becomes: memoryview, piece: slice, start: int, item: int) -> list[Any]:
    return [becomes[piece]] if was is None else weight_delta.encode(was[piece], becomes[piece], start=start, item=item)


def _layout(tensors: Sequence[TensorBytes]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


def chain_state(manifests: Mapping[int, Manifest], version: int, *, every: int) -> Literal["short", "long", "dense"]:
    """State of a version's chain of deltas: "long" from `every` of them on, or as many bytes as its snapshot has.

    A long chain is "dense" if its newest delta has more than half the bytes of the snapshot, so that another snapshot costs little more.
    """
    snapshot, *deltas = weights.chain(manifests, version)
    if len(deltas) < every and sum(delta.nbytes for delta in deltas) < snapshot.nbytes:
        return "short"
    return "dense" if not deltas or 2 * deltas[-1].nbytes > snapshot.nbytes else "long"


def is_anchor(manifest: Manifest, *, every: int) -> bool:
    """True for a full snapshot, or for every `every`-th version sent as adapters."""
    return manifest.encoding == "full" or (manifest.encoding == "adapter" and manifest.version % every == 0)


def deletable(manifests: Mapping[int, Manifest], *, ends: Mapping[int, int], every: int, needed: Collection[int] = ()) -> dict[int, int]:
    """Partition -> offset below which no process needs chunks, for all partitions but that of version 0; empty if nothing can be deleted.

    `ends` are the offsets after the trainer's newest chunk in each partition, `every` is `weights.anchor_every`, `needed` are versions that
    a process may still read. Two anchors are retained, so that a worker that reads the older one has time until the next is published.
    """
    anchors = sorted(version for version, manifest in manifests.items() if version and is_anchor(manifest, every=every))
    # Version 0 is always retained: it starts a chain only if no later version does.
    starts = [next((link.version for link in weights.chain(manifests, version) if link.version), 0) for version in needed]
    oldest = min([*anchors[-2:], *starts], default=0)
    if len(anchors) < 2:
        return {}
    retained = dict(ends)
    for version, manifest in manifests.items():
        if version >= oldest:
            for partition, offset in weights.chunk_places(manifest):
                retained[partition] = min(retained.get(partition, offset), offset)
    return {partition: offset for partition, offset in retained.items() if partition >= FIRST and offset}
