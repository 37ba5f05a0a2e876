"""Records as rows of an archive's tables.

The rule: of every record it is tried whether its row alone gives back the same bytes; where it does not, the row keeps the original.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.infra.kafka.bulk import BulkReader
from penstock.pipeline.archive.layout import PLACE, Kind
from penstock.pipeline.archive.relocation import signed
from penstock.pipeline.archive.sound_samples import read_sound
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import RawHeaders, Record

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Ends an Arrow IPC stream."""


def read_tables(reader: BulkReader, kind: Kind, partition: int, *, run: str, first: int, end: int) -> Iterator[tuple[pa.Table, int]]:
    """(rows, the offset after them) of a partition from offset `first` on and below `end`. Raises `LogError`."""
    for block in reader.read(kind.kafka_name(run), partition, first=first, end=end):
        records: Sequence[Record] = block
        if kind.name == "runs":  # the register of all runs; a record without a value only removes one
            records = [record for record in block if record.key == run.encode() and record.value]
        yield to_table(kind, records, run=run), block[-1].offset + 1


def to_table(kind: Kind, records: Sequence[Record], *, run: str) -> pa.Table:
    """The rows of each record's payload, in the records' order; one row for a payload without any."""
    numbers, columns = read_sound(records, run=run) if kind.name == "rollouts" else ([], {})
    if not numbers:
        return _each(kind, records, run=run)[0]
    sound = _table(kind, [records[number] for number in numbers], {name: columns.get(name) for name in kind.schema.names})
    if len(numbers) == len(records):
        return sound
    others = sorted(set(range(len(records))) - set(numbers))
    rest, counts = _each(kind, [records[number] for number in others], run=run)
    order = np.argsort(np.concatenate([numbers, np.repeat(others, counts)]), kind="stable")
    return pa.concat_tables([sound, rest]).take(pa.array(order))


def _each(kind: Kind, records: Sequence[Record], *, run: str) -> tuple[pa.Table, list[int]]:
    """The rows of records that are decoded and encoded again one by one, and how many rows each has."""
    rows = [_row(kind, record, run=run) for record in records]
    columns, counts = _payload_columns(kind, [row.payload for row in rows])
    repeated = None if max(counts, default=1) == 1 else pa.array(np.repeat(np.arange(len(counts)), counts))
    for field in kind.schema:
        if field.name not in columns and field not in PLACE:
            values = pa.array([row.beside.get(field.name) for row in rows], field.type)
            # Columns about the record are repeated in each of its rows.
            columns[field.name] = values if repeated is None else values.take(repeated)
    return _table(kind, np.repeat(np.array(records, object), counts).tolist(), columns), counts


def _table(kind: Kind, records: Sequence[Record], columns: dict[str, pa.Array | None]) -> pa.Table:
    """The table of some columns, a row for each of `records`; of a column that is not there nulls."""
    place = {
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "key": [record.key for record in records],
    }
    arrays = []
    for field in kind.schema:
        column = columns.get(field.name)
        if field.name in place:
            arrays.append(pa.array(place[field.name], field.type))
        else:
            arrays.append(pa.nulls(len(records), field.type) if column is None else column.cast(field.type))
    return pa.table(arrays, schema=kind.schema)


@dataclass(frozen=True, slots=True)
class _Row:
    payload: bytes | None
    """What our own encoder makes of the record's payload; None if it cannot be decoded."""
    beside: dict[str, Any]
    """The columns that are not the payload's."""


def _row(kind: Kind, record: Record, *, run: str) -> _Row:
    record = _scrubbed(kind, record)
    try:
        claimed, content = kind.read(record, run=run)
        problem = None
    except Unusable as error:
        claimed, problem = None, f"{error.kind}: {error}"
        try:
            content = kind.decode(record.value)
        except Unusable:
            return _original(record, problem)
    worker = next((text for name, text in record.headers if name == "worker"), None)
    try:
        payload = kind.encode(content)
        expected = kind.headers(content, run=run, worker=worker and worker.decode("ascii"), value=record.value)
        follows = expected.encode(record.value) == record.headers
    except ValueError:  # a worker's name that is no ASCII, or arrays that do not fit together
        return _original(record, problem)
    beside: dict[str, Any] = {"problem": problem}
    if payload != record.value:
        beside["raw"] = record.value
    if "raw" in beside or not follows:
        beside["headers"] = _as_structs(record.headers)
    for field in kind.facts:
        claim = getattr(claimed, field.name, None)
        beside[field.name] = getattr(expected, field.name) if claim is None else claim
    return _Row(payload, beside)


def _scrubbed(kind: Kind, record: Record) -> Record:
    """The record without the passwords that earlier releases wrote; the original bytes would keep them."""
    if kind.name not in ("runs", "run", "ledger") or (b'"security"' not in record.value and b'"tracking_uri"' not in record.value):
        return record
    try:
        value = kind.encode(kind.decode(record.value))
    except (Unusable, ValueError):
        return record
    return replace(record, value=value, headers=signed(record.headers, value)) if len(value) < len(record.value) else record


def _original(record: Record, problem: str | None) -> _Row:
    """A row that keeps the record's own bytes only."""
    return _Row(None, {"headers": _as_structs(record.headers), "raw": record.value, "problem": problem})


def _payload_columns(kind: Kind, payloads: Sequence[bytes | None]) -> tuple[dict[str, pa.Array], list[int]]:
    """By name the columns of payloads that our own encoder has written, and the rows of each; a row of nulls where there is none."""
    streams = [payload for payload in payloads if payload is not None]
    if not streams:
        return {name: pa.nulls(len(payloads), kind.schema.field(name).type) for name in kind.payload}, [1] * len(payloads)
    batches = _batches(kind.codec.schema, streams)
    batch, sizes = pa.concat_batches(batches), iter([len(batch) for batch in batches])
    columns = {ours: batch[name].cast(kind.schema.field(ours).type) for ours, name in kind.payload.items()}
    counts = [1 if payload is None else next(sizes) for payload in payloads]
    if len(streams) == len(payloads):
        return columns, counts
    numbers = iter(range(len(batch)))
    places = [None if payload is None else next(numbers) for payload, count in zip(payloads, counts, strict=True) for _ in range(count)]
    rows = pa.array(places, pa.int64())
    return {name: column.take(rows) for name, column in columns.items()}, counts


def _batches(schema: pa.Schema, streams: Sequence[bytes]) -> list[pa.RecordBatch]:
    """One batch a stream, all of them with `schema`: columns that a stream lacks, because it has no value for them, are null."""
    head, types, found = schema.serialize().to_pybytes(), {field.name: field.type for field in schema}, []
    for complete, alike in groupby(streams, key=lambda stream: stream.startswith(head)):
        if complete:  # as one stream: parsing a schema costs more than all else about a sample
            found += pa.ipc.open_stream(b"".join([head, *(stream[len(head) : -len(_END)] for stream in alike), _END]))
            continue
        for stream in alike:
            batch = pa.ipc.open_stream(stream).read_next_batch()
            there = batch.schema.names
            columns = [batch[name].cast(type_) if name in there else pa.nulls(len(batch), type_) for name, type_ in types.items()]
            found.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return found


def _as_structs(headers: RawHeaders) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in headers]
