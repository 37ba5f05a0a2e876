"""`weights`: one manifest per policy version in partition 0, its bytes in chunks in the others. Trainer -> rollout workers.

A manifest is written after its chunks and names their offsets; a version is usable only if all its chunks exist and its digest matches.
Chunks of a full snapshot (`weights/1`) are a complete version, those of a delta (`weights/2`) the difference of two (`weight_delta`), those
of adapters (`weights/3`) are merged into version 0 (`weight_adapter`). A later manifest of a version with the same digest replaces the
first: its chunks are a snapshot of a version that was sent as a delta, or were sent again because others were lost."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.topics.wire.checked import require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload, as_row
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import fields_of
from penstock.topics.wire.headers import Headers, match, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "weights/1"
SCHEMAS = {"full": SCHEMA, "delta": "weights/2", "adapter": "weights/3"}
"""The same columns for each encoding: a release without an encoding must not take its chunks for a full snapshot."""
CHUNK_SCHEMA = "weights-chunk/1"
MANIFESTS, ORIGIN, FIRST = 0, 1, 2
"""Partitions: that of the manifests, that of version 0, which is never deleted, and the first of all other versions' chunks."""

NOWHERE = -1
"""Offset of a chunk that is not in the imported archive."""
_REQUIRED = ("policy-version-min",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive bytes of a weight version."""

    version: int
    index: int
    """Index of the slice in the version, from 0."""
    data: bytes | memoryview
    """At most 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Tensors and chunks of a weight version: tensors in name order, chunks by index."""

    version: int
    step: int
    """Optimizer steps taken before this version."""
    base_version: int | None
    """The version that the chunks change; `None` for a full snapshot."""
    nbytes: int
    """Bytes in all chunks."""
    created_ns: int
    encoding: str
    """Meaning of the chunks; "full": the tensors' bytes; "delta" or "adapter": blocks of `weight_delta` or `weight_adapter`."""
    digest: str
    """Digest of names, types, shapes and bytes of all tensors, independent of the chunks."""
    names: tuple[str, ...]
    """Empty if the chunks change a base, which has the names."""
    dtypes: tuple[str, ...]
    """Element types, as "float32" or "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each tensor."""
    chunk_partitions: tuple[int, ...]
    chunk_offsets: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    chunk_sha256: tuple[str, ...]
    """Hex SHA-256 of each chunk's data."""

    @property
    def begins_chain(self) -> bool:
        """True if the version can be loaded from its own chunks, alone or with those of version 0, which is never deleted."""
        return self.encoding != "delta"


CODEC = Codec(SCHEMA, fields=fields_of(Manifest))
CHUNK_CODEC = Codec(CHUNK_SCHEMA, fields=fields_of(Chunk))


def encode(manifest: Manifest) -> bytes:
    """Return the payload of a manifest. Raises `ValueError` if its lists contradict each other."""
    if problem := _flaw(manifest):
        raise ValueError(f"manifest of weight version {manifest.version} is invalid: {problem}")
    return CODEC.encode(as_row(manifest))


def decode(value: Payload) -> Manifest:
    """Return the manifest in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require_whole(row, "version", "step", "base_version", "nbytes", "created_ns")
    manifest = Manifest(**row)
    problem = _flaw(manifest)
    require(problem is None, problem or "")
    return manifest


def decode_chunk(value: Payload) -> Chunk:
    """Return the chunk in a payload, its data a view of `value`. Raises `Unusable`."""
    (row,) = CHUNK_CODEC.decode(value)
    require_whole(row, "version", "index")
    return Chunk(**row)


def headers(manifest: Manifest, *, run: str, worker: str | None = None) -> Headers:
    """The headers of a manifest."""
    return Headers(run=run, schema=SCHEMAS[manifest.encoding], policy_version_min=manifest.version, worker=worker)


def check(record: Record, *, run: str) -> Headers:
    """Return the headers of a manifest's record of `run`, without decoding its payload. Raises `Unusable`."""
    schema = next((name for name in SCHEMAS.values() if ("schema", name.encode()) in record.headers), SCHEMA)
    return read_headers(record.headers, record.value, run=run, schema=schema, required=_REQUIRED)


def read(record: Record, *, run: str) -> tuple[Headers, Manifest]:
    """Return headers and payload of a manifest's record of `run`, which must agree. Raises `Unusable`."""
    checked = check(record, run=run)
    manifest = decode(record.value)
    match(checked, policy_version_min=manifest.version, schema=SCHEMAS[manifest.encoding])
    return checked, manifest


_CHUNKS = Format(CHUNK_CODEC, decode_chunk, lambda chunk: {"policy_version_min": chunk.version, "part": chunk.index}, _REQUIRED)
encode_chunk, chunk_headers, outgoing_chunk, read_chunk = _CHUNKS.encode, _CHUNKS.headers, _CHUNKS.outgoing, _CHUNKS.read


def chain(manifests: Mapping[int, Manifest], version: int) -> list[Manifest]:
    """Return the manifests from which a version is assembled: its full snapshot, then each delta. Raises `ValueError` if one is missing."""
    links: list[Manifest] = []
    number: int | None = version
    while number is not None:
        if number not in manifests:
            raise ValueError(f"weight version {version} cannot be assembled: the manifest of its base version {number} is missing")
        links.append(manifests[number])
        number = links[-1].base_version if links[-1].encoding != "full" else None
        if number is not None and number >= links[-1].version:
            raise ValueError(f"weight version {links[-1].version} is based on version {number}, which is not older")
    return links[::-1]


def layout(manifest: Manifest) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (name, element type, shape) of the tensors of a complete version, in the order of their bytes."""
    return sorted(zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True))


def chunk_places(manifest: Manifest) -> list[tuple[int, int]]:
    """Return (partition, offset) of each chunk of a version, in order."""
    return list(zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True))


def _flaw(manifest: Manifest) -> str | None:
    """Return the first contradiction between the lists of a manifest; None if there is none."""
    tensors = {len(manifest.names), len(manifest.dtypes), len(manifest.shapes)}
    chunks = {len(manifest.chunk_partitions), len(manifest.chunk_offsets), len(manifest.chunk_sizes), len(manifest.chunk_sha256)}
    if len(tensors) != 1 or len(chunks) != 1:
        return f"its lists of tensors have lengths {sorted(tensors)}, its lists of chunks {sorted(chunks)}; each kind must have one length"
    if manifest.encoding not in SCHEMAS:
        return f"encoding is {manifest.encoding[:60]!r}, expected one of {', '.join(SCHEMAS)}"
    if manifest.encoding != "full" and (manifest.names or manifest.base_version is None):
        return f"encoding {manifest.encoding} with base version {manifest.base_version} and {len(manifest.names)} tensors is contradictory"
    if manifest.encoding == "adapter" and manifest.base_version != 0:
        return f"LoRA adapters must be based on version 0, not {manifest.base_version}"
    positions = (*manifest.chunk_partitions, *manifest.chunk_offsets)
    if min(positions, default=0) < NOWHERE or min(itertools.chain(*manifest.shapes), default=0) < 0:
        return "a partition, an offset or a tensor dimension is negative"
    if min(manifest.chunk_sizes, default=0) < 0 or sum(manifest.chunk_sizes) != manifest.nbytes:
        return f"its chunks have {sum(manifest.chunk_sizes)} bytes in all, expected {manifest.nbytes}"
    return None
