"""Chunks that are damaged, lost or wrong are found out, byte by byte; a copy then holds what it held, or nothing."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.tensors.host_memory import NONE
from penstock.infra.tensors.stream import TensorBytes
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.runtime.weights import read
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, send_version
from penstock.pipeline.runtime.weights.read import SILENCE_S, bring
from penstock.topics import weights
from penstock.topics.catalogue import topics_of
from penstock.topics.weights import Chunk, Manifest
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import with_chunk
from tests.support.log_helpers import EditedLog

RUN, PARTITIONS, CHUNK_BYTES = "damaged", 5, 48
ANCHOR, DELTA = 1, 2


def tensors_of(version: int) -> list[TensorBytes]:
    """70 elements of two types, of which a few differ from version to version."""
    rng = np.random.default_rng(0)
    flat, small = rng.integers(0, 2**16, 50, dtype=np.uint16), rng.integers(0, 2**32, 20, dtype=np.uint32)
    for number in range(version):
        flat[number * 7 : number * 7 + 3] += 1
        small[number] += 1
    return [
        TensorBytes(name="flat", dtype="bfloat16", shape=(50,), data=memoryview(flat).cast("B")),
        TensorBytes(name="small", dtype="float32", shape=(4, 5), data=memoryview(small).cast("B")),
    ]


class Published:
    """Versions 0 to 2 of a small model: two whole ones and a delta, each in several chunks."""

    def __init__(self) -> None:
        self.log, self.manifests = EditedLog(), dict[int, Manifest]()
        self.log.create_topics(topics_of(RUN, partitions=1, weight_partitions=PARTITIONS))
        producer = self.log.producer()
        for version in (0, ANCHOR, DELTA):
            base = Base(version=version - 1, tensors=tensors_of(version - 1)) if version == DELTA else None
            self.manifests[version] = send_version(
                producer, tensors_of(version), run=RUN, version=version, step=version, base=base,
                partitions=chunk_partitions(version, count=PARTITIONS), max_bytes=CHUNK_BYTES if base is None else 16,
            )  # fmt: skip

    def chunks(self, version: int) -> Iterator[Record]:
        for partition, offset in weights.chunk_places(self.manifests[version]):
            yield self.log.read(f"{RUN}.weights", partition, [offset])[0]

    def held(self, version: int) -> WeightCopy:
        copy = WeightCopy()
        bring(copy, self.log, self.manifests, version - 1, run=RUN)
        return copy

    def refused(self, copy: WeightCopy, version: int) -> str:
        """Why a version cannot be read; whole ones overwrite what was held, changes do not."""
        before = bytes(copy.data)
        with pytest.raises(LogError) as error:
            bring(copy, self.log, self.manifests, version, run=RUN)
        if self.manifests[version].encoding == "full":
            assert copy.version == NONE
        else:
            assert (copy.version, bytes(copy.data)) == (version - 1, before)
        return str(error.value)


@pytest.fixture(scope="module")
def published() -> Published:
    return Published()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :]


@pytest.mark.parametrize("version", [ANCHOR, DELTA])
def test_a_flipped_bit_in_any_byte_of_any_chunk_is_found_out(published: Published, version: int) -> None:
    copy, tried = published.held(version), 0
    for record in list(published.chunks(version)):
        for place in range(len(record.value)):
            published.log.replace(replace(record, value=flipped(bytes(record.value), place)))
            assert "header 'crc32' is" in published.refused(copy, version)
            tried += 1
        published.log.replace(record)
    assert tried > 1000
    bring(copy, published.log, published.manifests, version, run=RUN)
    assert copy.tensors() == tensors_of(version)


@pytest.mark.parametrize("version", [ANCHOR, DELTA])
@pytest.mark.parametrize("listed", [False, True], ids=["not in the manifest", "in the manifest, too"])
def test_any_wrong_byte_under_a_right_checksum_is_found_out(version: int, listed: bool) -> None:
    """`listed`: whoever wrote the chunk put the hash of the wrong bytes into the manifest, so that only the version's digest is left."""
    published = Published()
    sound, tried = published.manifests[version], 0
    for index, record in enumerate(list(published.chunks(version))):
        chunk = weights.read_chunk(record, run=RUN)[1]
        for place in range(len(chunk.data)):
            wrong = Chunk(version=version, index=index, data=flipped(bytes(chunk.data), place))
            published.log.replace(with_chunk(record, wrong, run=RUN))
            if listed:
                hashes = list(sound.chunk_sha256)
                hashes[index] = hashlib.sha256(wrong.data).hexdigest()
                published.manifests[version] = replace(sound, chunk_sha256=tuple(hashes))
            copy = published.held(version)
            try:
                bring(copy, published.log, published.manifests, version, run=RUN)
            except LogError:
                assert copy.version in (version - 1, NONE)
            else:  # a block that says it changes a longer piece changes the same elements of it
                assert listed and copy.version == version
            if copy.version != NONE:
                assert copy.tensors() == tensors_of(copy.version)
            tried += 1
        published.log.replace(record)
    assert tried == sound.nbytes


@pytest.mark.parametrize("version", [ANCHOR, DELTA])
def test_a_deleted_tail_of_any_partition_is_found_out(version: int) -> None:
    for partition in sorted({partition for partition, _ in weights.chunk_places(Published().manifests[version])}):
        published = Published()
        copy = published.held(version)
        last = max(offset for at, offset in weights.chunk_places(published.manifests[version]) if at == partition)
        published.log.truncate((f"{RUN}.weights", partition), last)
        assert f"no chunk at {RUN}.weights/{partition} offset {last}, which holds" in published.refused(copy, version)


def test_chunks_that_were_released_are_found_out() -> None:
    published = Published()
    copy = published.held(DELTA)
    partition, offset = weights.chunk_places(published.manifests[DELTA])[0]
    published.log.delete_records({(f"{RUN}.weights", partition): offset + 1})
    assert f"no chunk at {RUN}.weights/{partition} offset {offset}" in published.refused(copy, DELTA)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_a_manifest_without_chunks_is_found_out(encoding: str) -> None:
    published = Published()
    copy = published.held(DELTA)
    described = published.manifests[ANCHOR] if encoding == "full" else published.manifests[DELTA]
    empty = replace(
        described, version=DELTA, nbytes=0, chunk_partitions=(), chunk_offsets=(), chunk_sizes=(), chunk_sha256=(), digest="d" * 64
    )
    published.manifests[DELTA] = empty
    with pytest.raises(LogError, match="version 2"):
        bring(copy, published.log, published.manifests, DELTA, run=RUN)
    assert copy.version in (ANCHOR, NONE)


def test_a_record_that_is_no_chunk_in_the_place_of_one_is_found_out(published: Published) -> None:
    copy = published.held(DELTA)
    partition = published.manifests[DELTA].chunk_partitions[0]
    offset = published.log.producer().send(Outgoing(topic=f"{RUN}.weights", partition=partition, key=None, headers=(), value=b"x")).offset()
    moved = replace(published.manifests[DELTA], chunk_offsets=(offset, *published.manifests[DELTA].chunk_offsets[1:]))
    with pytest.raises(LogError, match=f"chunk at partition {partition} offset {offset} is damaged"):
        bring(copy, published.log, published.manifests | {DELTA: moved}, DELTA, run=RUN)
    assert copy.version == ANCHOR


def test_a_version_that_does_not_fit_its_digest_leaves_the_one_before_it_where_that_was_reached(published: Published) -> None:
    wrong = replace(published.manifests[DELTA], digest="d" * 64)
    copy = published.held(ANCHOR)
    with pytest.raises(LogError, match=r"digest .*, expected "):
        bring(copy, published.log, published.manifests | {DELTA: wrong}, DELTA, run=RUN)
    assert copy.version == NONE
    gone = replace(published.manifests[DELTA], chunk_offsets=tuple(offset + 1000 for offset in wrong.chunk_offsets))
    with pytest.raises(RecordMissing):
        bring(copy, published.log, published.manifests | {DELTA: gone}, DELTA, run=RUN)
    assert copy.version == ANCHOR


class SlowTail:
    """A tail on a slow link, by a clock of its own: each poll takes so long and gives one record at most, some polls none."""

    outage_s = 0.0

    def __init__(self, tail: Any, clock: list[float], *, poll_s: float, silent: bool) -> None:
        self.tail, self.clock, self.poll_s, self.silent = tail, clock, poll_s, silent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tail, name)

    def poll(self, timeout_s: float, *, max_records: int) -> list[Record]:
        self.clock[0] += self.poll_s
        return [] if self.silent else self.tail.poll(timeout_s, max_records=1)


@pytest.mark.parametrize("silent", [False, True])
def test_a_version_may_take_any_time_as_long_as_chunks_come(published: Published, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    clock, follow = [0.0], published.log.tail
    poll_s = 0.6 * SILENCE_S
    monkeypatch.setattr(read, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(published.log, "tail", lambda starts, **_: SlowTail(follow(starts), clock, poll_s=poll_s, silent=silent))
    if silent:
        with pytest.raises(LogError, match="weights of version 1: no chunk arrived for 60 s, 4 are missing"):
            bring(WeightCopy(), published.log, published.manifests, ANCHOR, run=RUN)
        return
    copy = WeightCopy()
    bring(copy, published.log, published.manifests, ANCHOR, run=RUN)
    assert copy.version == ANCHOR and clock[0] > 2 * SILENCE_S
