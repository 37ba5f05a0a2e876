"""Records written and read by our code against the client library's own."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import encode_varint

from penstock.infra.kafka.client_repairs import faults, record_format
from penstock.topics.wire.record import RawHeaders

faults.apply()

_names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
_headers = st.lists(st.tuples(_names, st.binary(max_size=200)), max_size=9).map(tuple)
_records = st.lists(
    st.tuples(st.integers(0, 2**41), st.none() | st.binary(max_size=40), st.binary(max_size=9000), _headers), min_size=1, max_size=8
)
Rows = list[tuple[int, bytes | None, bytes, RawHeaders]]


def build(rows: Rows, *, packed: bool) -> bytes:
    """One batch of these (time, key, value, headers), by us or by the library."""
    builder: Any = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 10_000_000)
    for offset, (time_ms, key, value, headers) in enumerate(rows):
        assert builder.append(offset, time_ms, key, value, record_format.PackedHeaders(headers) if packed else list(headers)) is not None
    return bytes(builder.build())


def read(raw: bytes) -> list[Any]:
    """The batch as we read it."""
    return list(record_format._records(DefaultRecordBatch(raw), "t", 3))


@given(_records)
@settings(max_examples=60, deadline=None)
def test_our_batches_are_the_librarys_byte_for_byte(rows: Rows) -> None:
    assert build(rows, packed=True) == build(rows, packed=False)


@given(_records)
@settings(max_examples=60, deadline=None)
def test_we_read_what_the_library_reads(rows: Rows) -> None:
    raw = build(rows, packed=False)
    theirs = [(one.offset, one.timestamp, one.key, one.value, tuple(one.headers)) for one in DefaultRecordBatch(raw)]
    ours = [(one.offset, one.timestamp_ms, one.key, one.value, one.headers) for one in read(raw)]
    assert ours == theirs
    assert {(one.topic, one.partition) for one in read(raw)} == {("t", 3)}


@given(_records, st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_batch_is_a_corrupt_record_and_nothing_worse(rows: Rows, data: st.DataObject) -> None:
    raw = bytearray(build(rows, packed=True))
    start = DefaultRecordBatch(bytes(raw))._pos
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(start, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        records = read(bytes(raw))
    except CorruptRecordError:
        return
    assert len(records) == len(rows)


def test_a_batch_that_is_full_takes_no_more() -> None:
    builder: Any = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1000)
    empty = record_format.PackedHeaders(())
    assert builder.append(0, None, None, bytes(5000), empty) is not None  # the first one always fits
    assert builder.append(1, None, None, b"x", empty) is None


def test_a_foreign_header_name_that_is_no_text_is_readable_all_the_same() -> None:
    body = record_format.record_body(
        offset_delta=0, time_delta_ms=0, key=None, value=b"v", headers=record_format.PackedHeaders((("??", b"1"),))
    )
    body = body.replace(b"??", b"\xff\xfe")
    prefix = bytearray()
    encode_varint(len(body), prefix.append)
    raw = bytes(prefix) + body
    (record,) = record_format.read_batch(raw, 0, 1, topic="t", partition=0, base_offset=7, base_time_ms=5)
    assert record.headers == (("\\xff\\xfe", b"1"),)
    assert (record.offset, record.timestamp_ms) == (7, 5)


def test_a_record_that_lies_about_its_length_is_refused() -> None:
    raw = bytes([100]) + bytes(10)
    with pytest.raises(CorruptRecordError):
        list(record_format.read_batch(raw, 0, 1, topic="t", partition=0, base_offset=0, base_time_ms=0))
