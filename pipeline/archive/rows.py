"""Records as rows of an archive's tables.

The rule: of every record it is tried whether its row alone gives back the same bytes; where it does not, the row keeps the original.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.infra.kafka.bulk import BulkReader
from penstock.pipeline.archive.layout import Kind
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
    """One row a record, in their order."""
    rows = [_row(kind, record, run=run) for record in records]
    columns = payload_columns(kind, [row.payload for row in rows])
    place: dict[str, list[Any]] = {
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "key": [record.key for record in records],
    }
    for field in kind.schema:
        if field.name not in columns:
            values = place[field.name] if field.name in place else [row.beside.get(field.name) for row in rows]
            columns[field.name] = pa.array(values, field.type)
    return pa.table([columns[name] for name in kind.schema.names], schema=kind.schema)


@dataclass(frozen=True, slots=True)
class _Row:
    payload: bytes | None
    """What our own encoder makes of the record's payload; None if it cannot be decoded."""
    beside: dict[str, Any]
    """The columns that are not the payload's."""


def _row(kind: Kind, record: Record, *, run: str) -> _Row:
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


def _original(record: Record, problem: str | None) -> _Row:
    """A row that keeps the record's own bytes only."""
    return _Row(None, {"headers": _as_structs(record.headers), "raw": record.value, "problem": problem})


def payload_columns(kind: Kind, payloads: Sequence[bytes | None]) -> dict[str, pa.Array]:
    """By name the columns of payloads that our own encoder has written; nulls where there is none."""
    streams = [payload for payload in payloads if payload is not None]
    if not streams:
        return {name: pa.nulls(len(payloads), kind.schema.field(name).type) for name in kind.payload}
    schema = kind.codec.schema.serialize().size
    # Payloads of one schema as one stream: parsing a schema costs more than all else about a sample.
    joined = b"".join([streams[0][:schema], *(stream[schema : -len(_END)] for stream in streams), _END])
    batch = pa.concat_batches(list(pa.ipc.open_stream(joined)))
    columns = {ours: batch[name].cast(kind.schema.field(ours).type) for ours, name in kind.payload.items()}
    if len(streams) == len(payloads):
        return columns
    numbers = iter(range(len(streams)))
    rows = pa.array([None if payload is None else next(numbers) for payload in payloads], pa.int64())
    return {name: column.take(rows) for name, column in columns.items()}


def _as_structs(headers: RawHeaders) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in headers]
