"""Converts records to rows of an archive's tables. A row that does not restore the record's exact bytes also stores these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.infra.kafka.bulk import BulkReader
from penstock.pipeline.archive.layout import RECORD, Kind
from penstock.pipeline.archive.relocation import signed
from penstock.pipeline.archive.sound_samples import read_sound
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import RawHeaders, Record

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Ends an Arrow IPC stream."""


def read_tables(reader: BulkReader, kind: Kind, partition: int, *, run: str, first: int, end: int) -> Iterator[tuple[pa.Table, int]]:
    """Yield (rows, the offset after them) of a partition from `first` up to `end`. Raises `LogError`."""
    for block in reader.read(kind.kafka_name(run), partition, first=first, end=end):
        records: Sequence[Record] = block
        if kind.name == "runs":  # the register of all runs; a record without a value is a tombstone
            records = [record for record in block if record.key == run.encode() and record.value]
        yield to_table(kind, records, run=run), block[-1].offset + 1


def to_table(kind: Kind, records: Sequence[Record], *, run: str) -> pa.Table:
    """The rows of records, in their order; one row for a payload without rows."""
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
    """(rows of records that are decoded and encoded one by one, number of rows of each)."""
    rows = [_row(kind, record, run=run) for record in records]
    columns, counts = _payload_columns(kind, [row.payload for row in rows])
    repeated = None if max(counts, default=1) == 1 else pa.array(np.repeat(np.arange(len(counts)), counts))
    for field in kind.schema:
        if field.name not in columns and field not in RECORD:
            values = pa.array([row.columns.get(field.name) for row in rows], field.type)
            # The record's own columns are repeated in each of its rows.
            columns[field.name] = values if repeated is None else values.take(repeated)
    return _table(kind, np.repeat(np.array(records, object), counts).tolist(), columns), counts


def _table(kind: Kind, records: Sequence[Record], columns: dict[str, pa.Array | None]) -> pa.Table:
    """A table with one row for each of `records`; missing columns are null."""
    own = {
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "key": [record.key for record in records],
    }
    arrays = []
    for field in kind.schema:
        column = columns.get(field.name)
        if field.name in own:
            arrays.append(pa.array(own[field.name], field.type))
        else:
            arrays.append(pa.nulls(len(records), field.type) if column is None else column.cast(field.type))
    return pa.table(arrays, schema=kind.schema)


@dataclass(frozen=True, slots=True)
class _Row:
    payload: bytes | None
    """The payload encoded again; None if it cannot be decoded."""
    columns: dict[str, Any]
    """Values of the columns that are not the payload's."""


def _row(kind: Kind, record: Record, *, run: str) -> _Row:
    record = _scrubbed(kind, record)
    try:
        read_headers, content = kind.read(record, run=run)
        problem = None
    except Unusable as error:
        read_headers, problem = None, f"{error.kind}: {error}"
        try:
            content = kind.decode(record.value)
        except Unusable:
            return _original(record, problem)
    worker = next((text for name, text in record.headers if name == "worker"), None)
    try:
        payload = kind.encode(content)
        expected = kind.headers(content, run=run, worker=worker and worker.decode("ascii"), value=record.value)
        follows = expected.encode(record.value) == record.headers
    except ValueError:  # a worker name that is not ASCII, or arrays of different lengths
        return _original(record, problem)
    columns: dict[str, Any] = {"problem": problem}
    if payload != record.value:
        columns["raw"] = record.value
    if "raw" in columns or not follows:
        columns["headers"] = _as_structs(record.headers)
    for field in kind.facts:
        value = getattr(read_headers, field.name, None)
        columns[field.name] = getattr(expected, field.name) if value is None else value
    return _Row(payload, columns)


def _scrubbed(kind: Kind, record: Record) -> Record:
    """The record without passwords, which earlier releases wrote."""
    if kind.name not in ("runs", "run", "ledger") or (b'"security"' not in record.value and b'"tracking_uri"' not in record.value):
        return record
    try:
        value = kind.encode(kind.decode(record.value))
    except (Unusable, ValueError):
        return record
    return replace(record, value=value, headers=signed(record.headers, value)) if len(value) < len(record.value) else record


def _original(record: Record, problem: str | None) -> _Row:
    """A row with the record's original bytes only."""
    return _Row(None, {"headers": _as_structs(record.headers), "raw": record.value, "problem": problem})


def _payload_columns(kind: Kind, payloads: Sequence[bytes | None]) -> tuple[dict[str, pa.Array], list[int]]:
    """(columns of encoded payloads by name, number of rows of each); a row of nulls for None."""
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
    indices = [None if payload is None else next(numbers) for payload, count in zip(payloads, counts, strict=True) for _ in range(count)]
    rows = pa.array(indices, pa.int64())
    return {name: column.take(rows) for name, column in columns.items()}, counts


def _batches(schema: pa.Schema, streams: Sequence[bytes]) -> list[pa.RecordBatch]:
    """One batch per stream, all with `schema`; columns that a stream lacks are null."""
    head, types, batches = schema.serialize().to_pybytes(), {field.name: field.type for field in schema}, []
    for complete, alike in groupby(streams, key=lambda stream: stream.startswith(head)):
        if complete:  # as one stream: parsing the schema is the largest cost of a sample
            batches += pa.ipc.open_stream(b"".join([head, *(stream[len(head) : -len(_END)] for stream in alike), _END]))
            continue
        for stream in alike:
            batch = pa.ipc.open_stream(stream).read_next_batch()
            names = batch.schema.names
            columns = [batch[name].cast(type_) if name in names else pa.nulls(len(batch), type_) for name, type_ in types.items()]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=schema))
    return batches


def _as_structs(headers: RawHeaders) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in headers]
