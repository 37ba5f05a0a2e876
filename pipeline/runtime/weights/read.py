"""Reads a policy version from the log: an anchor plus deltas, or only the deltas after the local version."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.log import Log, Start, Tail
from penstock.infra.tensors.host_memory import allocated, copy_bytes
from penstock.infra.tensors.stream import TensorBytes, hash_of
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.topics import weights
from penstock.topics.versions import weight_adapter, weight_delta
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


class BaseWeights:
    """A copy of version 0, made when it is first needed, into which adapters are merged."""

    def __init__(self) -> None:
        self._data: memoryview | None = None
        self._digest = ""

    def serves(self, copy: WeightCopy, origin: Manifest) -> bool:
        """True if adapters on version 0, described by `origin`, can be merged into this copy without reading version 0."""
        return self._data is not None and self._digest == origin.digest and len(self._data) == len(copy.data)

    def keep(self, copy: WeightCopy, origin: Manifest) -> None:
        """Retain the bytes of version 0, which the copy now contains."""
        self._data, self._digest = allocated(len(copy.data)), origin.digest
        copy_bytes(self._data, copy.data)

    def forget(self) -> None:
        """Drop the bytes, so that version 0 is read again for the next version."""
        self._data = None

    def merge(self, copy: WeightCopy, stream: memoryview) -> None:
        """Overwrite the copy with version 0 and the adapters in `stream`. Raises `ValueError` with nothing overwritten."""
        assert self._data is not None, "version 0 is read before adapters on it"
        copy.change(partial(weight_adapter.apply, stream, self._data))


SILENCE_S = 60.0
"""A version of which no chunk comes for this long cannot be read for the time being; a slow link may take any time for all of them."""
POLL_S = 0.2
POLL_RECORDS = 8
"""Records taken at once: each may be as long as a chunk."""
FETCH_BYTES = 1 << 20
"""Fetched of a partition at once: less than a chunk, so that a response, and with it the buffer, is one chunk."""
LOOK_AFTER_S = 1.0
"""After this long without a chunk the missing ones are looked up in the partitions."""
EARLY_BYTES = 64 << 20
"""Bytes of early chunks of later versions that are buffered; others are read again."""
NEAR_RECORDS = 16
"""A reader seeks unless the next chunk is at most this many records ahead."""


def fetch(log: Log, manifests: Mapping[int, Manifest], version: int, *, run: str) -> list[TensorBytes]:
    """The tensors of a version, checked against its digest. Raises `LogError` that names what is missing or damaged."""
    copy = WeightCopy()
    bring(copy, log, manifests, version, run=run)
    return copy.tensors()


def bring(
    copy: WeightCopy, log: Log, manifests: Mapping[int, Manifest], version: int, *, run: str, reader: "ChunkReader | None" = None,
    below: BaseWeights | None = None,
) -> int:  # fmt: skip
    """Update a copy to a version and check its digest; returns the bytes of chunks that were read.

    A `reader` stays open, so that the next call need not connect; close it after an error. Without one, one is made for this call.
    `below` keeps version 0 where versions are adapters, so that the next call need not read it.
    Raises `LogError`; the copy then holds the version it held before, or a later one whose digest was checked, or none.
    """
    try:
        chain = weights.chain(manifests, version)
    except ValueError as error:
        raise LogError(str(error)) from error
    held = next((index for index, link in enumerate(chain) if copy.holds(link.version, link.digest)), -1)
    if held < 0 and below is not None and len(chain) > 1 and chain[1].encoding == "adapter" and below.serves(copy, chain[0]):
        held = 0
    with contextlib.ExitStack() as ending:
        if reader is None:
            reader = ending.enter_context(contextlib.closing(ChunkReader(log, run)))
        return _follow(copy, chain[0], chain[held + 1 :], reader, below)


def _follow(copy: WeightCopy, origin: Manifest, links: Sequence[Manifest], reader: "ChunkReader", below: BaseWeights | None) -> int:
    """Apply the versions `links` in order to a copy of version `origin`, verify the digest of the last one applied; return the bytes read.

    Adapters are merged into `below`, or into the copy itself if there is none. After an error, too, the digest is verified.
    """
    reached, before = None, reader.nbytes
    reader.expect({location for link in links for location in weights.chunk_places(link)})
    try:
        for link in links:
            if link.encoding == "full":
                _replace(copy, link, reader)
            elif link.encoding == "delta":
                _apply(link, reader, lambda stream: copy.change(partial(weight_delta.apply, stream)))
            elif below is None:
                _apply(link, reader, lambda stream: copy.change(lambda data: weight_adapter.apply(stream, data, data)))
            else:
                if not below.serves(copy, origin):
                    below.keep(copy, origin)
                _apply(link, reader, partial(below.merge, copy))
            reached = link
    finally:
        reader.expect(())
        if reached is not None:
            _hold(copy, reached, below)
    return reader.nbytes - before


def _replace(copy: WeightCopy, manifest: Manifest, reader: "ChunkReader") -> None:
    """Read a full snapshot into a copy. Raises `LogError` if chunks are missing or damaged, or do not fill the tensors."""
    try:
        copy.allocate(names=manifest.names, dtypes=manifest.dtypes, shapes=manifest.shapes)
    except ValueError as error:
        raise LogError(f"weights of version {manifest.version}: {error}") from error
    if manifest.nbytes != len(copy.data):
        raise LogError(f"weights of version {manifest.version}: the chunks have {manifest.nbytes} bytes, the tensors {len(copy.data)}")
    _collect(manifest, reader, copy.data)


def _apply(manifest: Manifest, reader: "ChunkReader", change: Callable[[memoryview], None]) -> None:
    """Read a delta or adapters completely, then overwrite what they change; `change` rejects malformed data."""
    stream = allocated(manifest.nbytes)
    _collect(manifest, reader, stream)
    try:
        change(stream)
    except ValueError as error:
        raise LogError(f"weights of version {manifest.version}: {error}") from error


def _collect(manifest: Manifest, reader: "ChunkReader", into: memoryview) -> None:
    """Read all chunks of a version into a buffer, each at its position."""
    starts = list(accumulate(manifest.chunk_sizes, initial=0))
    for chunk in reader.read(manifest):
        copy_bytes(into[starts[chunk.index] : starts[chunk.index + 1]], chunk.data)


def _hold(copy: WeightCopy, manifest: Manifest, below: BaseWeights | None) -> None:
    """Mark a copy as the version of a manifest if its digest matches; otherwise raise `LogError`, and forget the retained version 0."""
    if (actual := copy.computed(hash_of(manifest.digest))) != manifest.digest:
        if below is not None:
            below.forget()
        raise LogError(f"weights of version {manifest.version}: digest {actual}, expected {manifest.digest}")
    copy.hold(manifest.version, manifest.digest)


@dataclass(slots=True)
class ChunkReader:
    """Reads chunks of versions from all partitions at once."""

    log: Log
    run: str
    silence_s: float = SILENCE_S
    nbytes: int = 0
    """Bytes of chunks that were read."""
    _expected: Collection[tuple[int, int]] = ()
    _tail: Tail | None = field(default=None, repr=False)
    _followed: set[int] = field(default_factory=set)
    _early: dict[tuple[int, int], Record] = field(default_factory=dict)
    _early_bytes: int = 0

    @property
    def is_open(self) -> bool:
        """True if the reader is connected and continues at its position."""
        return self._tail is not None

    def expect(self, locations: Collection[tuple[int, int]]) -> None:
        """Announce the (partition, offset) of later chunks: one that arrives early is buffered instead of read twice."""
        self._expected, self._early, self._early_bytes = locations, {}, 0

    def read(self, manifest: Manifest) -> Iterator[Chunk]:
        """The chunks of a version as they arrive, in any order, each checked. Raises `LogError`."""
        left = {location: index for index, location in enumerate(weights.chunk_places(manifest))}
        self._check_retained(manifest, left)
        for location in [location for location in left if location in self._early]:
            record = self._early.pop(location)
            self._early_bytes -= len(record.value)
            yield self.checked(record, manifest, left.pop(location))
        if not left:
            return
        tail = self._aim(left)
        last = looked = time.monotonic()
        while left:
            records = tail.poll(POLL_S, max_records=POLL_RECORDS)
            for record in records:
                if (location := (record.partition, record.offset)) in left:
                    yield self.checked(record, manifest, left.pop(location))
                elif location in self._expected and self._early_bytes + len(record.value) <= EARLY_BYTES:
                    self._early[location] = record
                    self._early_bytes += len(record.value)
            now = time.monotonic()
            if records:
                last = looked = time.monotonic()
            elif tail.outage_s > 0:
                last = now
            elif now - looked > LOOK_AFTER_S:
                looked = now
                self._check_retained(manifest, left)
            if now - last > self.silence_s:
                raise LogError(f"weights of version {manifest.version}: no chunk arrived for {self.silence_s:g} s, {len(left)} are missing")
            self._check_passed(manifest, left, tail)

    def _aim(self, left: Collection[tuple[int, int]]) -> Tail:
        """Position the reader at the missing chunks; one that is close continues, because it has already fetched them."""
        topic, starts = f"{self.run}.weights", dict[tuple[str, int], Start]()
        for partition, offset in sorted(left, reverse=True):  # the first chunk of each partition comes last
            starts[topic, partition] = offset
        if self._tail is None:
            self._tail = self.log.tail(starts, fetch_bytes=FETCH_BYTES)
        elif moved := {at: offset for at, offset in starts.items() if not self._comes_to(self._tail, at, offset)}:
            self._tail.add(moved)
        self._followed |= {partition for _, partition in starts}
        return self._tail

    def _comes_to(self, tail: Tail, at: tuple[str, int], offset: Start) -> bool:
        """True if the tail follows the partition and reaches this offset within a few records, so that it need not seek."""
        return at[1] in self._followed and isinstance(offset, int) and 0 <= offset - tail.position(at) <= NEAR_RECORDS

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail, self._followed = None, set()

    def checked(self, record: Record, manifest: Manifest, index: int) -> Chunk:
        """The chunk in a record, if it is the one that a manifest lists at `index`. Raises `LogError`."""
        what = f"weights of version {manifest.version}: chunk at partition {record.partition} offset {record.offset}"
        try:
            chunk = weights.read_chunk(record, run=self.run)[1]
        except Unusable as error:
            raise LogError(f"{what} is damaged: {error}") from error
        if (chunk.version, chunk.index) != (manifest.version, index):
            raise LogError(f"{what} contains chunk {chunk.index} of version {chunk.version}, expected chunk {index}")
        if len(chunk.data) != manifest.chunk_sizes[index] or hashlib.sha256(chunk.data).hexdigest() != manifest.chunk_sha256[index]:
            raise LogError(f"{what} is damaged: its SHA-256 differs from that in the manifest")
        self.nbytes += len(chunk.data)
        return chunk

    def _check_retained(self, manifest: Manifest, left: Collection[tuple[int, int]]) -> None:
        """Raise `RecordMissing` if a partition starts after a chunk, or ends before it."""
        topic = f"{self.run}.weights"
        partitions = [(topic, partition) for partition in {partition for partition, _ in left}]
        first_offsets, ends = self.log.beginning_offsets(partitions), self.log.end_offsets(partitions, committed=False)
        lost = [(p, offset) for p, offset in left if not first_offsets[topic, p] <= offset < ends[topic, p]]
        _require_none(manifest, lost, topic, lambda p: f"which holds offsets {first_offsets[topic, p]} to {ends[topic, p] - 1}")

    def _check_passed(self, manifest: Manifest, left: Collection[tuple[int, int]], tail: Tail) -> None:
        """Raise `RecordMissing` if reading has passed the offset of a chunk without receiving it."""
        topic = f"{self.run}.weights"
        positions = {partition: tail.position((topic, partition)) for partition, _ in left}
        lost = [(partition, offset) for partition, offset in left if offset < positions[partition]]
        _require_none(manifest, lost, topic, lambda _: "where the log has no record")


def _require_none(manifest: Manifest, lost: list[tuple[int, int]], topic: str, why: Callable[[int], str]) -> None:
    """Raise `RecordMissing` if `lost`, the (partition, offset) of missing chunks, has any; `why(partition)` ends the message."""
    if lost:
        partition, offset = min(lost)
        more = f"; {len(lost) - 1} more are missing" if len(lost) > 1 else ""
        raise RecordMissing(
            f"weights of version {manifest.version}: no chunk at {topic}/{partition} offset {offset}, {why(partition)}{more}"
        )
