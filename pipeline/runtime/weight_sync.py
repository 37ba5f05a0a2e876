"""Weights through the log: a version is chunks in partitions 1… and one fenced manifest in partition 0.

The rule: a reader applies a version when it is whole and its digest fits, or not at all.
"""

import hashlib
import time
from collections.abc import Sequence

from penstock.infra import faults
from penstock.infra.errors import LogError
from penstock.infra.log import Log, Pending, Producer
from penstock.infra.tensors.stream import TensorBytes, join, split
from penstock.infra.tensors.stream import digest as tensors_digest
from penstock.topics import weights
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing


def send_chunks(
    producer: Producer,
    tensors: Sequence[TensorBytes],
    *,
    run: str,
    version: int,
    step: int,
    partitions: int,
    max_bytes: int,
    digest: str | None = None,
) -> Manifest:
    """Send a version's chunks and describe them once every one is acknowledged; the manifest is the caller's to commit.

    `partitions` counts those for chunks, numbered from 1. `digest` is that of the tensors, where it is known already.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    places: list[int] = []
    sizes: list[int] = []
    hashes: list[str] = []
    pending: list[Pending] = []
    for index, data in enumerate(split(ordered, max_bytes=max_bytes)):
        chunk = Chunk(version=version, index=index, data=data)
        partition = 1 + index % partitions
        value = weights.encode_chunk(chunk)
        headers = weights.chunk_headers(chunk, run=run).encode(value)
        pending.append(
            producer.send(Outgoing(topic=f"{run}.weights", partition=partition, key=str(version).encode(), headers=headers, value=value))
        )
        faults.reach("chunk.sent")
        places.append(partition)
        sizes.append(len(data))
        hashes.append(hashlib.sha256(data).hexdigest())
    return Manifest(
        version=version,
        step=step,
        encoding="full",
        base_version=None,
        digest=digest or tensors_digest(ordered),
        nbytes=sum(sizes),
        names=tuple(tensor.name for tensor in ordered),
        dtypes=tuple(tensor.dtype for tensor in ordered),
        shapes=tuple(tensor.shape for tensor in ordered),
        chunk_partitions=tuple(places),
        chunk_offsets=tuple(one.offset() for one in pending),
        chunk_sizes=tuple(sizes),
        chunk_sha256=tuple(hashes),
        created_ns=time.time_ns(),
    )


def manifest_record(manifest: Manifest, *, run: str) -> Outgoing:
    """The manifest as it is written to partition 0."""
    value = weights.encode(manifest)
    headers = weights.headers(manifest, run=run).encode(value)
    return Outgoing(topic=f"{run}.weights", partition=0, key=str(manifest.version).encode(), headers=headers, value=value)


def fetch(log: Log, manifest: Manifest, *, run: str) -> list[TensorBytes]:
    """The tensors of a version, checked against its digest. Raises `LogError` naming what is gone or broken."""
    by_partition: dict[int, list[int]] = {}
    for partition, offset in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True):
        by_partition.setdefault(partition, []).append(offset)
    chunk_at: dict[tuple[int, int], Chunk] = {}
    for partition, offsets in by_partition.items():
        for record in log.read(f"{run}.weights", partition, offsets):
            try:
                chunk_at[partition, record.offset] = weights.read_chunk(record, run=run)[1]
            except Unusable as error:
                raise LogError(
                    f"weights of version {manifest.version}: chunk at partition {partition} offset {record.offset} is broken: {error}"
                ) from error
    chunks = [chunk_at[at].data for at in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True)]
    try:
        return join(chunks, names=manifest.names, dtypes=manifest.dtypes, shapes=manifest.shapes, expected_digest=manifest.digest)
    except ValueError as error:
        raise LogError(f"weights of version {manifest.version}: {error}") from error
