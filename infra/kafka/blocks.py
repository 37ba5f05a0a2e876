"""Records as they lie in the broker's answers: where each part of each record stands, found for thousands of records at once.

The rule: what is said of a record is what `wire.read_batch` would read; a record that contradicts itself is refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from kafka.record.util import decode_varint
from numpy.typing import NDArray

from penstock.infra.errors import LogError
from penstock.infra.kafka.client_repairs.record_format import read_headers
from penstock.topics.wire.record import RawHeaders, Record

Ints = NDArray[np.int64]
_LONGEST_VARINT = 10


class Batch(NamedTuple):
    """Where the records of one batch stand in some data, uncompressed."""

    start: int
    end: int
    records: int
    base_offset: int
    base_time_ms: int
    time_ms: int | None
    """The broker's time of a topic that keeps that one instead of the producer's."""
    compressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """R records of one partition in the order of their offsets; begins and ends are bytes of `data`."""

    topic: str
    partition: int
    data: bytes | bytearray
    offsets: Ints
    """[R]"""
    times_ms: Ints
    """[R]"""
    keys: Ints
    """[2, R] begins and ends; a record without a key has its end before its begin."""
    values: Ints
    """[2, R] likewise."""
    headers: Ints
    """[2, R] from their count to the end of the record."""

    def __len__(self) -> int:
        return len(self.offsets)

    def take(self, rows: Ints | NDArray[np.bool_]) -> "Block":
        """Some of the records, over the same data."""
        parts = {name: getattr(self, name)[..., rows] for name in ("offsets", "times_ms", "keys", "values", "headers")}
        return replace(self, **parts)

    def between(self, first: int, end: int) -> "Block":
        """The records from offset `first` on and below `end`: a batch that is asked for by an offset within it comes whole."""
        wanted = (self.offsets >= first) & (self.offsets < end)
        return self if wanted.all() else self.take(wanted)

    def records(self, rows: Iterable[int] | None = None) -> list[Record]:
        """Records as objects of their own; all of them, or those of some rows."""
        return [self._record(row) for row in (range(len(self)) if rows is None else rows)]

    def _record(self, row: int) -> Record:
        key, value = (self._bytes(*span[:, row].tolist()) for span in (self.keys, self.values))
        return Record(
            topic=self.topic,
            partition=self.partition,
            offset=int(self.offsets[row]),
            timestamp_ms=int(self.times_ms[row]),
            key=key,
            headers=self._headers(*self.headers[:, row].tolist()),
            value=value or b"",
        )

    def _headers(self, begin: int, end: int) -> RawHeaders:
        data = bytes(self.data[begin:end])
        try:
            found, position = read_headers(data, 0, missing=None)
        except (ValueError, IndexError) as error:
            raise self._damaged() from error
        if position != len(data):
            raise self._damaged()
        return found

    def _bytes(self, begin: int, end: int) -> bytes | None:
        return bytes(self.data[begin:end]) if end >= begin else None

    def _damaged(self) -> LogError:
        return damaged(self.topic, self.partition)


def damaged(topic: str, partition: int) -> LogError:
    """What is raised for records that contradict themselves."""
    return LogError(f"{topic}/{partition}: a record is damaged: its lengths contradict each other")


def parse(topic: str, partition: int, data: bytes | bytearray, batches: Sequence[Batch]) -> Block:
    """The records of some batches; raises `LogError` where their lengths contradict each other."""
    begins: list[int] = []
    for batch in batches:
        if _walk(data, batch, begins) != batch.end:
            raise damaged(topic, partition)
    counts = [batch.records for batch in batches]
    base_offsets, base_times, fixed = (
        np.repeat(np.array(column, np.int64), counts)
        for column in zip(
            *[(one.base_offset, one.base_time_ms, -1 if one.time_ms is None else one.time_ms) for one in batches], strict=True
        )
    )
    buffer = np.frombuffer(data, np.uint8)
    sizes, bodies = _varints(buffer, np.array(begins, np.int64))
    ends = bodies + sizes
    times, at = _varints(buffer, bodies + 1)
    deltas, at = _varints(buffer, at)
    keys, at = _spans(buffer, at)
    values, at = _spans(buffer, at)
    if (at >= ends).any():
        raise damaged(topic, partition)
    return Block(
        topic=topic,
        partition=partition,
        data=data,
        offsets=base_offsets + deltas,
        times_ms=np.where(fixed < 0, base_times + times, fixed),
        keys=keys,
        values=values,
        headers=np.stack([at, ends]),
    )


def _walk(data: bytes | bytearray, batch: Batch, begins: list[int]) -> int:
    """Note where the records of a batch begin; gives where the last one ends."""
    position, last = batch.start, batch.end
    for _ in range(batch.records):
        if position >= last:
            return -1
        begins.append(position)
        size = data[position]
        if size < 0x80:
            position += 1
        elif position + 1 < last and data[position + 1] < 0x80:
            size, position = size & 0x7F | data[position + 1] << 7, position + 2
        else:
            try:
                size, position = decode_varint(data, position)
            except (ValueError, IndexError):
                return -1
            size <<= 1
        if size < 0 or size & 1:  # a negative length
            return -1
        position += size >> 1
    return position


def _varints(buffer: NDArray[np.uint8], at: Ints) -> tuple[Ints, Ints]:
    """The zigzag numbers that begin at some places, and where each ends; beyond the end of the data stands its last byte."""
    numbers, more = np.zeros(len(at), np.uint64), np.ones(len(at), np.bool_)
    for index in range(_LONGEST_VARINT):
        byte = buffer.take(at, mode="clip").astype(np.uint64)
        numbers |= np.where(more, (byte & np.uint64(0x7F)) << np.uint64(7 * index), np.uint64(0))
        at = at + more
        more &= byte > 0x7F
        if not more.any():
            break
    return (numbers >> np.uint64(1)).view(np.int64) ^ -(numbers & np.uint64(1)).view(np.int64), at


def _spans(buffer: NDArray[np.uint8], at: Ints) -> tuple[Ints, Ints]:
    """Begin and end of what stands behind its length at some places, and where it goes on; -1 is the length of nothing at all."""
    sizes, begins = _varints(buffer, at)
    return np.stack([begins, begins + sizes]), begins + np.maximum(sizes, 0)
