"""Recomputes weight digests from chunks in one pass through the topic `weights`, with one version at a time on disk.

A digest is over name, type, shape, size and bytes of each tensor, sorted by name, independent of chunk boundaries: BLAKE3 if it has the
prefix `blake3:`, else SHA-256.
"""

import hashlib
import math
import mmap
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from penstock.pipeline.inspect.audit.facts import ANY, ChunkFact, Facts, Recomputed
from penstock.pipeline.inspect.audit.source import Source
from penstock.topics import weights
from penstock.topics.catalogue import TOPICS
from penstock.topics.versions import weight_adapter, weight_delta
from penstock.topics.weights import Manifest
from penstock.topics.wire import errors
from penstock.topics.wire.record import Record, RecordId

NOT_NUMPY = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Element types that numpy lacks -> size in bytes."""
TREE = "blake3:"
"""Prefix of a BLAKE3 digest."""

Note = Callable[[Record], RecordId]
Refuse = Callable[[Record, str, str], None]


def verify_versions(source: Source, facts: Facts, *, note: Note, refuse: Refuse) -> None:
    """Add the recomputed digest of each version to the facts, and read every chunk partition to its end.

    `note` counts each record and returns its id; `refuse` takes a record that cannot be decoded, with kind and reason.
    """
    latest = LatestVersion()
    cursors = {partition: Cursor(source, partition, facts, note, refuse) for partition in source.partitions("weights") if partition}
    for fact in sorted(facts.first_manifests().values(), key=lambda fact: fact.manifest.version):
        facts.recomputed[fact.manifest.version] = _recompute(fact.manifest, cursors, facts, latest)
    for cursor in cursors.values():
        cursor.at(ANY)


class Cursor:
    """Forward reader of one chunk partition; adds a fact for every record."""

    def __init__(self, source: Source, partition: int, facts: Facts, note: Note, refuse: Refuse) -> None:
        self._records = source.read("weights", [partition])
        self._partition, self._facts, self._note, self._refuse = partition, facts, note, refuse
        self._last: tuple[int, memoryview | bytes | None] = (-1, None)

    def at(self, offset: int) -> memoryview | bytes | None:
        """Read up to an offset, and return the data of the chunk at it; None if there is no chunk or the reader is already past it."""
        while self._last[0] < offset and self._step():
            pass
        return self._last[1] if self._last[0] == offset else None

    def _step(self) -> bool:
        """Read the next record; False at the end of the partition."""
        record = next(self._records, None)
        if record is None:
            return False
        where = self._note(record)
        try:
            chunk = weights.read_chunk(record, run=self._facts.run)[1]
        except errors.Unusable as error:
            self._refuse(record, error.kind, str(error))
            self._last = (record.offset, None)
            return True
        self._facts.chunks[where] = ChunkFact(chunk.version, chunk.index, len(chunk.data), hashlib.sha256(chunk.data).hexdigest())
        self._last = (record.offset, chunk.data)
        return True


class LatestVersion:
    """Weights of the last verified version, in a temporary file; the base of the next delta."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.layout: Manifest | None = None
        """Manifest that lists the tensors."""
        self.data = memoryview(b"")
        self.origin: memoryview | None = None
        """Weights of version 0 in a separate file; set when the first adapter version is recomputed."""

    def lacks_base(self, manifest: Manifest) -> bool:
        """True if the base of a delta or adapter was deleted, or is invalid and was reported."""
        if manifest.encoding == "adapter":
            return self.version != 0 and self.origin is None
        return manifest.encoding == "delta" and self.version != manifest.base_version

    def recompute(self, manifest: Manifest, chunks: Iterator[memoryview]) -> str:
        """Apply a full snapshot, a delta on the latest version or an adapter on version 0, and return its digest. Raises `ValueError`."""
        if manifest.encoding == "delta":
            assert self.version == manifest.base_version
            self.version = None
            weight_delta.apply(b"".join(chunks), self.data)
        elif manifest.encoding == "adapter":
            if self.origin is None:
                assert self.version == 0
                self.origin = _mapped_file(len(self.data))
                self.origin[:] = self.data
            self.version = None
            weight_adapter.apply(b"".join(chunks), self.origin, self.data)
        else:
            self.version, self.layout, start = None, manifest, 0
            if len(self.data) != manifest.nbytes:
                self.data = _mapped_file(manifest.nbytes)
            for chunk in chunks:
                if start + len(chunk) > len(self.data):
                    raise ValueError("the chunks have more bytes than the manifest lists")
                self.data[start : start + len(chunk)] = chunk
                start += len(chunk)
        assert self.layout is not None
        recomputed = digest(self.layout, iter([self.data] if self.data else ()), tree=manifest.digest.startswith(TREE))
        self.version = manifest.version
        return recomputed


def _mapped_file(nbytes: int) -> memoryview:
    """Return memory backed by an unnamed temporary file."""
    with tempfile.TemporaryFile() as file:
        file.truncate(max(1, nbytes))
        return memoryview(mmap.mmap(file.fileno(), 0))[:nbytes]


def _recompute(manifest: Manifest, cursors: dict[int, Cursor], facts: Facts, latest: LatestVersion) -> Recomputed:
    """Return a version's digest from its chunks, the reason why it has none, or that retention deleted what it needs."""
    positions = weights.chunk_places(manifest)
    if any(facts.deleted(RecordId("weights", *position)) for position in positions) or latest.lacks_base(manifest):
        return Recomputed(None, None, released=True)
    try:
        return Recomputed(latest.recompute(manifest, _chunks_at(positions, cursors)), None)
    except ValueError as error:
        return Recomputed(None, str(error))


def _chunks_at(positions: Sequence[tuple[int, int]], cursors: dict[int, Cursor]) -> Iterator[memoryview]:
    """Yield the data of the chunks at these (partition, offset). Raises `ValueError` for a chunk that cannot be read."""
    for partition, offset in positions:
        data = cursors[partition].at(offset) if partition in cursors else None
        if data is None:
            raise ValueError(f"weights/{partition}/{offset} is not a readable chunk in ascending order")
        yield memoryview(data)


def digest(manifest: Manifest, chunks: Iterator[memoryview], *, tree: bool) -> str:
    """Compute the digest of tensors from their concatenated bytes: BLAKE3 if `tree`, else SHA-256. Raises `ValueError` for a wrong size."""
    hasher, chunk = blake3(max_threads=blake3.AUTO) if tree else hashlib.sha256(), memoryview(b"")
    for name, dtype, shape in sorted(zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)):
        size = math.prod(shape) * _item_bytes(dtype)
        hasher.update(f"{len(name)}:{name};{dtype};{','.join(map(str, shape))};{size};".encode())
        while size:
            chunk = chunk or next(chunks, memoryview(b""))
            if not chunk:
                raise ValueError(f"the chunks lack {size} bytes of tensor {name!r}")
            hasher.update(chunk[:size])
            size, chunk = size - len(chunk[:size]), chunk[size:]
    if chunk or next(chunks, None) is not None:
        raise ValueError("the chunks have more bytes than the tensors")
    return f"{TREE if tree else ''}{hasher.hexdigest()}"


def _item_bytes(dtype: str) -> int:
    try:
        return NOT_NUMPY[dtype] if dtype in NOT_NUMPY else np.dtype(dtype).itemsize
    except TypeError as error:
        raise ValueError(f"unknown element type {dtype!r}") from error


class TopicDigests:
    """SHA-256 over offset, timestamp, key, headers and payload of all records of each partition.

    A partition is named TOPIC/NUMBER. `spans` limits the digest of a partition to the records from a first to before an end offset.
    """

    def __init__(self, spans: Mapping[str, tuple[int, int]] | None = None) -> None:
        self._spans = spans
        self._hashes: dict[str, Any] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}
        """Partition -> (first offset, offset after the last record, number of records)."""
        self.later = Counter[str]()
        """Partition -> number of records after its span."""

    def add(self, where: RecordId, record: Record) -> None:
        """Add the next record of a partition to the partition's digest."""
        name, offset = f"{where.topic}/{where.partition}", where.offset
        first, end = (0, offset + 1) if self._spans is None else self._spans.get(name, (0, 0))
        if where.topic not in TOPICS or offset < first:
            return
        if offset >= end:
            self.later[name] += 1
            return
        hasher = self._hashes.setdefault(name, hashlib.sha256())
        for label, data in ((f"{offset}@{record.timestamp_ms}", record.key), *record.headers, ("", record.value)):
            hasher.update(f"{len(label)}:{label};{-1 if data is None else len(data)}:".encode("utf-8", "surrogatepass"))
            hasher.update(data or b"")
        start, _, count = self._seen.get(name, (offset, 0, 0))
        self._seen[name] = start, offset + 1, count + 1

    @property
    def ends(self) -> dict[str, int]:
        """Partition -> offset after the last record."""
        return {name: end for name, (_, end, _) in self._seen.items()}

    def as_table(self) -> dict[str, dict[str, int | str]]:
        """Return partition -> `first` and `end` offset, number of `records`, and `sha256`; empty partitions are left out."""
        return {
            name: {"first": first, "end": end, "records": count, "sha256": self._hashes[name].hexdigest()}
            for name, (first, end, count) in sorted(self._seen.items())
        }
