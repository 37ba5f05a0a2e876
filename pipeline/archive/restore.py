"""Rows of an archive as records again.

The rule: a row that was not changed gives the bytes that were exported; one whose typed columns were changed gives a record that can be
read, with the checksum and digest of its new content; an original that a row keeps (`raw`) comes back whatever the columns say.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.pipeline.archive.layout import WORKER, Kind
from penstock.pipeline.archive.relocation import signed
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import RawHeaders, Record

_BESIDE = ("partition", "offset", "key", "worker", "headers", "raw", "problem")


def to_records(kind: Kind, table: pa.Table, *, run: str) -> Iterator[Record]:
    """The records of some rows, in their order, with the digests of single parts. Raises `ValueError` naming a row's place."""
    table = typed(kind, table)
    beside = [name for name in _BESIDE if name in kind.schema.names and name not in kind.payload]
    rows = table.select(beside).to_pylist()
    times = table["timestamp"].cast(pa.int64()).to_pylist()
    payloads = _payloads(kind, table, [row["raw"] is not None for row in rows])
    for _, numbers in groupby(range(len(rows)), key=lambda number: (rows[number]["partition"], rows[number]["offset"])):
        first, *more = numbers
        row, payload = rows[first], payloads[first]
        try:
            value, headers = _content(kind, row, payload and payload.slice(0, 1 + len(more)), run=run)
        except (Unusable, pa.ArrowException, ValueError) as error:
            raise ValueError(f"{kind.name} partition {row['partition']} offset {row['offset']} cannot be a record: {error}") from error
        yield Record(
            topic=kind.kafka_name(run),
            partition=row["partition"],
            offset=row["offset"],
            timestamp_ms=times[first],
            key=row["key"],
            headers=headers,
            value=value,
        )


def typed(kind: Kind, table: pa.Table) -> pa.Table:
    """The kind's columns with its types, cast from those of another writer. Raises `ValueError` naming a column."""
    table, columns = _with_later_columns(kind, table), []
    for field in kind.schema:
        if (count := table.column_names.count(field.name)) != 1:
            raise ValueError(f"{kind.name}: column {field.name!r} is {'in it twice' if count else 'missing'}")
        column = table[field.name]
        if column.type != field.type and "dictionary" in str(column.type):  # a cast could repeat a value without bounds
            raise ValueError(f"{kind.name}: column {field.name!r} is {str(column.type)[:100]}, expected {field.type}")
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
            columns[-1].validate(full=True)
        except pa.ArrowException as error:
            raise ValueError(f"{kind.name}: column {field.name!r}: {' '.join(str(error).split())[:300]}") from error
        if field.name in ("partition", "offset", "timestamp") and column.null_count:
            raise ValueError(f"{kind.name}: column {field.name!r} has a null")
    return pa.Table.from_arrays(columns, names=kind.schema.names)


def _with_later_columns(kind: Kind, table: pa.Table) -> pa.Table:
    """The table with nulls where a payload may have them and an earlier release had no such column."""
    for name, theirs in kind.payload.items():
        field = kind.codec.schema.field(theirs)
        if field.nullable and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), field.type))
    for fact in kind.facts:  # what they say follows from the payload
        if fact.name not in table.column_names and fact.name != WORKER.name:
            table = table.append_column(fact.name, pa.nulls(len(table), fact.type))
    return table


def whole_groups(records: Iterable[Record], *, run: str) -> Iterator[Record]:
    """The records of one partition of `groups`, where groups of several parts have the digest of what their parts hold now."""
    held: list[Record] = []
    for record in records:
        said = _part(record, run=run)
        if said is None or said[0] != len(held):
            yield from held
            held = []
        if said is None or said[0] != len(held):
            yield record
            continue
        held.append(record)
        if len(held) == said[1]:
            yield from _digested(held)
            held = []
    yield from held


def _part(record: Record, *, run: str) -> tuple[int, int] | None:
    """Which part of how many, of a group of several."""
    try:
        said = groups.check(record, run=run)
    except Unusable:
        return None
    return (said.part, said.parts) if said.part is not None and said.parts is not None and said.parts > 1 else None


def _digested(parts: list[Record]) -> list[Record]:
    found = groups.digest([part.value for part in parts]).encode()
    if all(("sha256", found) in part.headers for part in parts):
        return parts
    changed = [tuple((name, found if name == "sha256" else text) for name, text in part.headers) for part in parts]
    return [replace(part, headers=signed(headers, part.value)) for part, headers in zip(parts, changed, strict=True)]


def _payloads(kind: Kind, table: pa.Table, original: Sequence[bool]) -> list[pa.RecordBatch | None]:
    """For each row the payloads' columns from it on, as they were before they were archived; None where the original is kept."""
    if all(original):
        return [None] * len(original)
    schema = kind.codec.schema
    # A row whose original is kept may have nulls where a payload has none.
    ours = table.filter(table["raw"].is_null())
    columns = [ours[name].cast(schema.field(theirs).type).combine_chunks() for name, theirs in kind.payload.items()]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    numbers = iter(range(len(batch)))
    return [None if kept else batch.slice(next(numbers)) for kept in original]


def _content(kind: Kind, row: dict[str, Any], payload: pa.RecordBatch | None, *, run: str) -> tuple[bytes, RawHeaders]:
    """A record's payload and headers."""
    stored: RawHeaders | None = None if row["headers"] is None else tuple((header["name"], header["value"]) for header in row["headers"])
    if payload is None:
        if stored is None:
            raise ValueError("a row with `raw` needs its `headers`")
        return row["raw"], stored
    held = kind.decode(kind.codec.schema.serialize().to_pybytes() + payload.serialize().to_pybytes())
    value = kind.encode(held)
    if stored is None:
        return value, kind.headers(held, run=run, worker=row.get("worker"), value=value).encode(value)
    return value, stored if row["problem"] is not None else signed(stored, value)
