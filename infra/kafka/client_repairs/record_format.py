"""Kafka's record format v2 in a third of the client library's CPU time; small records with headers are all this pipeline sends.

The rule: the bytes written and the records read are exactly those of the library, which a property test compares.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from kafka import errors
from kafka.consumer import fetcher
from kafka.net import selector
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder, DefaultRecordMetadata
from kafka.record.util import decode_varint, encode_varint

from penstock.topics.wire.record import RawHeaders, Record


def varint(value: int) -> bytes:
    """How a length is written in a record.

    Example:
        varint(100)  # -> b"\xc8\x01"
    """
    out = bytearray()
    encode_varint(value, out.append)
    return bytes(out)


_SMALL = tuple(varint(value) for value in range(1 << 13))
"""Zigzag varints of the lengths, offsets and time differences nearly every record has."""
_NONE = varint(-1)
_KNOWN_NAMES = 1000
"""Header names kept encoded and decoded; there are a dozen, and foreign records must not fill the memory."""

_encoded_names: dict[str, bytes] = {}
_decoded_names: dict[bytes, str] = {}


def _length(value: int) -> bytes:
    return _SMALL[value] if 0 <= value < 1 << 13 else varint(value)


def _encode_name(name: str) -> bytes:
    raw = name.encode()
    encoded = _length(len(raw)) + raw
    if len(_encoded_names) < _KNOWN_NAMES:
        _encoded_names[name] = encoded
    return encoded


def _decode_name(raw: bytes) -> str:
    name = raw.decode(errors="backslashreplace")  # a foreign record must not stop its reader
    if len(_decoded_names) < _KNOWN_NAMES:
        _decoded_names[raw] = name
    return name


class PackedHeaders:
    """Headers as they stand in a record; false, so that the library does not measure them once more."""

    __slots__ = ("raw",)

    def __init__(self, headers: RawHeaders) -> None:
        parts = [_length(len(headers))]
        for name, value in headers:
            parts += (_encoded_names.get(name) or _encode_name(name), _length(len(value)), value)
        self.raw = b"".join(parts)

    def __bool__(self) -> bool:
        return False


def record_body(
    *, offset_delta: int, time_delta_ms: int, key: bytes | None, value: bytes | bytearray | memoryview | None, headers: PackedHeaders
) -> bytes:
    """One record without its leading length."""
    return b"".join(
        (
            b"\x00",  # attributes: none are defined
            _length(time_delta_ms),
            _length(offset_delta),
            _NONE if key is None else _length(len(key)),
            key or b"",
            _NONE if value is None else _length(len(value)),
            b"" if value is None else value,
            headers.raw,
        )
    )


def read_headers(raw: bytes, position: int, *, missing: Any = b"") -> tuple[RawHeaders, int]:
    """The headers whose count begins at `position`, and where they end; `missing` stands for a value that is none.

    Raises ValueError or IndexError where they contradict themselves.
    """
    fields, position = decode_varint(raw, position)
    headers = []
    for _ in range(fields):
        size = raw[position] >> 1
        if raw[position] > 0x7F or raw[position] & 1:
            size, position = decode_varint(raw, position)
        else:
            position += 1
        name = raw[position : position + size]
        position += size
        size = raw[position] >> 1
        if raw[position] > 0x7F or raw[position] & 1:
            size, position = decode_varint(raw, position)
        else:
            position += 1
        headers.append((_decoded_names.get(name) or _decode_name(name), raw[position : position + size] if size >= 0 else missing))
        position += max(size, 0)
    return tuple(headers), position


def read_batch(
    raw: bytes, start: int, count: int, *, topic: str, partition: int, base_offset: int, base_time_ms: int, time_ms: int | None = None
) -> Iterator[Record]:
    """The records of one batch whose first record begins at `start`; raises CorruptRecordError where they contradict themselves.

    `time_ms` is the broker's time of a topic that keeps that one instead of the producer's.
    """
    position = start
    try:
        for _ in range(count):
            length, position = decode_varint(raw, position)
            end = position + length
            time_delta, position = decode_varint(raw, position + 1)
            offset_delta, position = decode_varint(raw, position)
            size, position = decode_varint(raw, position)
            key = None
            if size >= 0:
                key = raw[position : position + size]
                position += size
            size, position = decode_varint(raw, position)
            value = b""
            if size >= 0:
                value = raw[position : position + size]
                position += size
            headers, position = read_headers(raw, position)
            if position != end:
                raise errors.CorruptRecordError(f"a record of {length} bytes ends {position - end} bytes off")
            yield Record(
                topic=topic,
                partition=partition,
                offset=base_offset + offset_delta,
                timestamp_ms=base_time_ms + time_delta if time_ms is None else time_ms,
                key=key,
                headers=headers,
                value=value,
            )
    except (ValueError, IndexError) as error:
        raise errors.CorruptRecordError(f"a record cannot be read: {error!r}") from error
    if position != len(raw):
        raise errors.CorruptRecordError(f"{len(raw) - position} bytes follow the last record of a batch")


def install() -> None:
    """Use the above inside the library; `poll` yields our `Record` then."""
    selector.log_trace = lambda *_: None
    DefaultRecordBatchBuilder.append = _append(DefaultRecordBatchBuilder.append)
    DefaultRecordBatch.__init__ = _init
    fetcher.Fetcher.PartitionRecords._unpack_records = _unpack


def _append(stock: Any) -> Any:
    def append(self: Any, offset: int, timestamp: int | None, key: Any, value: Any, headers: Any) -> Any:
        if not isinstance(headers, PackedHeaders):
            return stock(self, offset, timestamp, key, value, headers)
        if timestamp is None:
            timestamp = int(time.time() * 1000)
        first = self._first_timestamp is None
        if first:
            self._first_timestamp = self._max_timestamp = timestamp
        body = record_body(offset_delta=offset, time_delta_ms=timestamp - self._first_timestamp, key=key, value=value, headers=headers)
        prefix = _length(len(body))
        size = len(prefix) + len(body)
        if not first and size + len(self._buffer) > self._batch_size:
            return None
        self._max_timestamp = max(self._max_timestamp, timestamp)
        self._num_records += 1
        self._last_offset = offset
        self._buffer += prefix
        self._buffer += body
        return DefaultRecordMetadata(offset, size, timestamp)

    return append


def _init(self: Any, buffer: Any) -> None:
    """As in the library, but over immutable bytes: a slice of them is the value, where stock copies twice."""
    self._buffer = bytes(buffer)
    self._header_data = self.HEADER_STRUCT.unpack_from(self._buffer)
    self._pos = self.HEADER_STRUCT.size
    self._num_records = self._header_data[12]
    self._next_record_index = 0
    self._decompressed = False


def _unpack(self: Any, topic_partition: Any, records: Any, *_: Any) -> Iterator[Record]:
    """The library's generator without its per-record bookkeeping: skips aborted transactions and control records alike."""
    topic, partition = topic_partition
    committed_only = self.isolation_level == fetcher.IsolationLevel.READ_COMMITTED
    for batch in _batches(records):
        if batch.magic != 2:
            raise errors.CorruptRecordError(f"{topic}/{partition} has records in message format {batch.magic}, older than Kafka 0.11")
        if self.check_crcs and not batch.validate_crc():
            raise errors.CorruptRecordError(f"a batch of {topic}/{partition} at offset {batch.base_offset} fails its checksum")
        self.leader_epoch = batch.leader_epoch
        skipped = batch.is_control_batch
        if committed_only and batch.has_producer_id():
            self._consume_aborted_transactions_up_to(batch.last_offset)
            if self._contains_abort_marker(batch):
                self.aborted_producer_ids.discard(batch.producer_id)
            else:
                skipped = skipped or self._is_batch_aborted(batch)
        if not skipped:
            for record in _records(batch, topic, partition):
                self.next_fetch_offset = record.offset + 1
                yield record
        # The last offset of a batch stays when compaction removes the record: going on behind it avoids reading it for ever.
        self.next_fetch_offset = batch.next_offset
    self.drain()


def _batches(records: Any) -> Iterable[Any]:
    while (batch := records.next_batch()) is not None:
        yield batch


def _records(batch: Any, topic: str, partition: int) -> Iterator[Record]:
    batch._maybe_uncompress()
    return read_batch(
        bytes(batch._buffer),
        batch._pos,
        batch.records_count,
        topic=topic,
        partition=partition,
        base_offset=batch.base_offset,
        base_time_ms=batch.first_timestamp,
        time_ms=batch.max_timestamp if batch.timestamp_type == batch.LOG_APPEND_TIME else None,
    )
