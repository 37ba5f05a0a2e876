"""Records as rows of an archive's tables.

The rule: of every record it is tried whether its row alone gives back the same bytes; where it does not, the row keeps the original.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.pipeline.archive.arrays import array
from penstock.pipeline.archive.layout import Kind
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import RawHeaders, Record


def to_table(kind: Kind, records: Sequence[Record], *, run: str) -> pa.Table:
    """One row a record, in their order."""
    payloads, rows = [], []
    for record in records:
        payload, row = _row(kind, record, run=run)
        payloads.append(payload)
        rows.append(row)
    columns = payload_columns(kind, payloads)
    place: dict[str, list[Any]] = {
        "partition": [record.partition for record in records],
        "offset": [record.offset for record in records],
        "timestamp": [record.timestamp_ms for record in records],
        "key": [record.key for record in records],
    }
    for field in kind.schema:
        if field.name not in columns:
            found = place[field.name] if field.name in place else [row.get(field.name) for row in rows]
            columns[field.name] = array(found, field.type)
    return pa.table([columns[name] for name in kind.schema.names], schema=kind.schema)


def _row(kind: Kind, record: Record, *, run: str) -> tuple[bytes | None, dict[str, Any]]:
    """The payload that stands in the typed columns, None for none, and the columns beside it."""
    whole: dict[str, Any] = {"headers": as_list(record.headers), "raw": record.value, "problem": None}
    said: Headers | None = None
    try:
        said, held = kind.read(record, run=run)
    except Unusable as error:
        whole["problem"] = f"{error.kind}: {error}"
        try:
            held = kind.decode(record.value)
        except Unusable:
            return None, whole
    worker = next((text for name, text in record.headers if name == "worker"), None)
    try:
        ours = kind.encode(held)
        expected = kind.headers(held, run=run, worker=worker and worker.decode("ascii"), value=record.value)
        follows = expected.encode(record.value) == record.headers
    except ValueError:  # what is no text, or arrays that do not fit together
        return None, whole
    if ours == record.value:
        del whole["raw"]
        if follows:
            del whole["headers"]
    for field in kind.facts:
        claim = getattr(said, field.name) if said else None
        whole[field.name] = getattr(expected, field.name) if claim is None else claim
    return ours, whole


def payload_columns(kind: Kind, payloads: Sequence[bytes | None]) -> dict[str, pa.Array]:
    """By name the columns of payloads that our own encoder has written; nulls where there is none."""
    batches = [pa.ipc.open_stream(payload).read_next_batch() for payload in payloads if payload is not None]
    if not batches:
        return {name: pa.nulls(len(payloads), kind.schema.field(name).type) for name in kind.payload}
    table = pa.Table.from_batches(batches, schema=kind.codec.schema).combine_chunks()
    table = pa.table({ours: table[name].cast(kind.schema.field(ours).type) for ours, name in kind.payload.items()})
    if len(batches) < len(payloads):
        there = iter(range(len(batches)))
        table = table.take(array([None if payload is None else next(there) for payload in payloads], pa.int64()))
    return {name: table[name].combine_chunks() for name in table.column_names}


def as_list(headers: RawHeaders) -> list[dict[str, Any]]:
    """Headers as Arrow takes them."""
    return [{"name": name, "value": value} for name, value in headers]
