"""Reads an archive through the interface of a log: restores records from rows, with their offsets and exact bytes."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.infra.errors import ConfigError, RecordMissing
from penstock.infra.log import Partition, Start
from penstock.infra.sandbox import parquet
from penstock.pipeline.archive.files import NOTE, Archive, find_archive
from penstock.pipeline.archive.layout import WORKER, Kind, kind_of
from penstock.pipeline.archive.relocation import signed
from penstock.topics import groups
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import RawHeaders, Record

_RECORD_COLUMNS = ("partition", "offset", "key", "worker", "headers", "raw", "problem")


def to_records(kind: Kind, table: pa.Table, *, run: str) -> Iterator[Record]:
    """Restore records from rows of a table, in order. Raises `ValueError` with partition and offset for a damaged row."""
    table = typed(kind, table)
    names = [name for name in _RECORD_COLUMNS if name in kind.schema.names and name not in kind.payload]
    rows = table.select(names).to_pylist()
    times = table["timestamp"].cast(pa.int64()).to_pylist()
    payloads = _payloads(kind, table, [row["raw"] is not None for row in rows])
    for _, numbers in groupby(range(len(rows)), key=lambda number: (rows[number]["partition"], rows[number]["offset"])):
        first, *more = numbers
        row, payload = rows[first], payloads[first]
        try:
            value, headers = _content(kind, row, payload and payload.slice(0, 1 + len(more)), run=run)
        except (Unusable, pa.ArrowException, ValueError) as error:
            place = f"{kind.name}/{row['partition']}@{row['offset']}"
            raise ValueError(f"the row of {place} is damaged, no record can be restored from it: {error}") from error
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
    """Return the table with exactly the columns and types of `kind.schema`. Raises `ValueError` for a column that does not fit."""
    table, columns = _with_later_columns(kind, table), []
    for field in kind.schema:
        if (count := table.column_names.count(field.name)) != 1:
            raise ValueError(f"table {kind.name}: column {field.name!r} is {'duplicated' if count else 'missing'}")
        column = table[field.name]
        if column.type != field.type and "dictionary" in str(column.type):  # casting could take unbounded memory
            raise ValueError(f"table {kind.name}: column {field.name!r} has type {str(column.type)[:100]}, expected {field.type}")
        try:
            columns.append(column if column.type == field.type else column.cast(field.type))
            columns[-1].validate(full=True)
        except pa.ArrowException as error:
            raise ValueError(f"table {kind.name}: column {field.name!r}: {' '.join(str(error).split())[:300]}") from error
        if field.name in ("partition", "offset", "timestamp") and column.null_count:
            raise ValueError(f"table {kind.name}: column {field.name!r} must not contain null")
    return pa.Table.from_arrays(columns, names=kind.schema.names)


def _with_later_columns(kind: Kind, table: pa.Table) -> pa.Table:
    """Append null columns for nullable columns that later releases added."""
    for name, theirs in kind.payload.items():
        field = kind.codec.schema.field(theirs)
        if field.nullable and name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), field.type))
    for fact in kind.facts:  # except for the worker, these follow from the payload
        if fact.name not in table.column_names and fact.name != WORKER.name:
            table = table.append_column(fact.name, pa.nulls(len(table), fact.type))
    return table


def whole_groups(records: Iterable[Record], *, run: str) -> Iterator[Record]:
    """Yield the records of one partition of `groups`, with the digest of each multi-part group computed over all its restored parts."""
    parts: list[Record] = []
    for record in records:
        part = _part(record, run=run)
        if part is None or part[0] != len(parts):
            yield from parts
            parts = []
        if part is None or part[0] != len(parts):
            yield record
            continue
        parts.append(record)
        if len(parts) == part[1]:
            yield from _digested(parts)
            parts = []
    yield from parts


def _part(record: Record, *, run: str) -> tuple[int, int] | None:
    """Return (part, number of parts) for a record of a multi-part group; None for any other record."""
    try:
        headers = groups.check(record, run=run)
    except Unusable:
        return None
    return (headers.part, headers.parts) if headers.part is not None and headers.parts is not None and headers.parts > 1 else None


def _digested(parts: list[Record]) -> list[Record]:
    digest = groups.digest([part.value for part in parts]).encode()
    if all(("sha256", digest) in part.headers for part in parts):
        return parts
    changed = [tuple((name, digest if name == "sha256" else text) for name, text in part.headers) for part in parts]
    return [replace(part, headers=signed(headers, part.value)) for part, headers in zip(parts, changed, strict=True)]


def _payloads(kind: Kind, table: pa.Table, original: Sequence[bool]) -> list[pa.RecordBatch | None]:
    """Return, for each row, the payload columns from this row on, with their original types; None for a row with `raw` bytes."""
    if all(original):
        return [None] * len(original)
    schema = kind.codec.schema
    # Rows with raw bytes may have nulls in columns that are not nullable.
    ours = table.filter(table["raw"].is_null())
    columns = [ours[name].cast(schema.field(theirs).type).combine_chunks() for name, theirs in kind.payload.items()]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    numbers = iter(range(len(batch)))
    return [None if has_raw else batch.slice(next(numbers)) for has_raw in original]


def _content(kind: Kind, row: dict[str, Any], payload: pa.RecordBatch | None, *, run: str) -> tuple[bytes, RawHeaders]:
    stored: RawHeaders | None = None if row["headers"] is None else tuple((header["name"], header["value"]) for header in row["headers"])
    if payload is None:
        if stored is None:
            raise ValueError("column `raw` has bytes, but column `headers` is null")
        return row["raw"], stored
    content = kind.decode(kind.codec.schema.serialize().to_pybytes() + payload.serialize().to_pybytes())
    value = kind.encode(content)
    if stored is None:
        return value, kind.headers(content, run=run, worker=row.get("worker"), value=value).encode(value)
    return value, stored if row["problem"] is not None else signed(stored, value)


CACHED_ROW_GROUPS = 8
"""Equal to the default number of partitions, because a replay reads the groups of a step from all of them."""


def open_archive(path: str) -> "ArchivedLog | None":
    """Open the archive in the directory `path`; None if `path` is a run id and not a directory. Raises `ConfigError`."""
    directory = Path(path)
    if "/" not in path and not (directory / NOTE).exists() and not any(directory.glob(f"*/{NOTE}")):
        return None
    try:
        return ArchivedLog(find_archive(directory))
    except ValueError as error:
        raise ConfigError(str(error)) from error


class ArchivedLog:
    """One archive with the read methods of `penstock.infra.log.Log`; ends are those of the last complete export."""

    def __init__(self, archive: Archive) -> None:
        self.archive, self._note = archive, archive.required_note()
        self._row_group = lru_cache(CACHED_ROW_GROUPS)(self._typed_row_group)

    @property
    def run(self) -> str:
        return self._note.run

    def topics(self, prefix: str = "") -> list[str]:
        """Names of the run's topics and of the topic of all runs."""
        names = [topic if topic == RUNS_TOPIC else f"{self.run}.{topic}" for topic in self._note.partitions]
        return sorted(name for name in names if name.startswith(prefix))

    def partitions(self, topic: str) -> int | None:
        """Number of partitions of a topic; None if the topic is not archived."""
        return self._note.partitions.get(self._plain(topic))

    def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """First offsets that were retained when the archive was created."""
        return {(topic, number): self._note.begins[self._plain(topic)][number] for topic, number in partitions}

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """Offsets after the last archived record."""
        return {(topic, number): self._end(kind_of(self._plain(topic), number), number) for topic, number in partitions}

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """Return the records at these offsets, in order. Raises `RecordMissing` with the missing offsets."""
        kind, ordered = kind_of(self._plain(topic), partition), sorted(set(offsets))
        records: dict[int, Record] = {}
        for row_group in self.archive.row_groups(kind, partition):
            if bisect_left(ordered, row_group.first) < bisect_left(ordered, row_group.last + 1):
                rows = _rows_at(kind, self._row_group(topic, partition, row_group.path, row_group.number), ordered)
                records |= {record.offset: record for record in self._restored(kind, partition, [rows])}
        if missing := [offset for offset in offsets if offset not in records]:
            raise RecordMissing(f"{topic}/{partition} has no record at offset {', '.join(map(str, missing[:10]))} in {self.archive.path}")
        return [records[offset] for offset in offsets]

    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, fetch_bytes: int | None = None) -> "ArchivedTail":
        """Return a reader that reads these partitions one after the other."""
        return ArchivedTail(self, starts)

    def records(self, kind: Kind, partition: int, *, first: int = 0) -> Iterator[Record]:
        """Yield the records of a partition from offset `first`; only one row group is in memory."""
        end = self._end(kind, partition)
        tables = (
            parquet.rows(row_group.path, row_group.number)
            for row_group in self.archive.row_groups(kind, partition)
            if row_group.last >= first and row_group.first < end
        )
        return (record for record in self._restored(kind, partition, tables) if first <= record.offset < end)

    def close(self) -> None:
        """Nothing to close: no file is open between calls."""

    def _typed_row_group(self, topic: str, partition: int, path: Path, number: int) -> pa.Table:
        return typed(kind_of(self._plain(topic), partition), parquet.rows(path, number))

    def _restored(self, kind: Kind, partition: int, tables: Iterable[pa.Table]) -> Iterator[Record]:
        records = self._in_order(kind, partition, tables)
        return whole_groups(records, run=self.run) if kind.name == "groups" else records

    def _in_order(self, kind: Kind, partition: int, tables: Iterable[pa.Table]) -> Iterator[Record]:
        """Restore the records of rows. Raises `ValueError` for a row of another partition or offsets that do not ascend."""
        last = -1
        for record in (record for table in tables for record in to_records(kind, table, run=self.run)):
            if record.partition != partition or record.offset <= last:
                folder = self.archive.folder(kind, partition)
                raise ValueError(
                    f"{folder} is damaged: after offset {last} of partition {partition} comes offset {record.offset} of {record.partition}"
                )
            last = record.offset
            yield record

    def _plain(self, topic: str) -> str:
        return topic.removeprefix(f"{self.run}.")

    def _end(self, kind: Kind, partition: int) -> int:
        if kind.topic in self._note.ends:
            return self._note.ends[kind.topic][partition]
        archived = self.archive.next_offset(kind, partition)
        return self._note.begins[kind.topic][partition] if archived is None else archived


def _rows_at(kind: Kind, table: pa.Table, offsets: Sequence[int]) -> pa.Table:
    """Return the rows at these offsets, and for groups the rows of their other parts."""
    selected = pc.is_in(table["offset"], value_set=pa.array(offsets, pa.int64()))
    if kind.name == "groups":
        numbers = table["group"].filter(selected).drop_null()
        selected = pc.or_(selected, pc.is_in(table["group"], value_set=numbers.combine_chunks()))
    return table.filter(selected)


class ArchivedTail:
    """Reads the archived records of some partitions in order."""

    outage_s = 0.0

    def __init__(self, log: ArchivedLog, starts: Mapping[Partition, Start]) -> None:
        self._log = log
        self._ends: dict[Partition, int] = {}
        self._positions: dict[Partition, int] = {}
        self.add(starts)

    def add(self, starts: Mapping[Partition, Start]) -> None:
        """Add these partitions, or set their positions to these offsets."""
        self._ends |= self._log.end_offsets(starts)
        self._positions |= {
            tp: 0 if start == "earliest" else self._ends[tp] if start == "latest" else start for tp, start in starts.items()
        }
        self._records = (
            record
            for (topic, number), first in list(self._positions.items())
            for record in self._log.records(kind_of(topic.removeprefix(f"{self._log.run}."), number), number, first=first)
        )

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        """Return the next records; empty at the end."""
        records = list(islice(self._records, max_records))
        for record in records:
            self._positions[record.topic, record.partition] = record.offset + 1
        if not records:
            self._positions = dict(self._ends)
        return records

    def read_to_end(self, timeout_s: float = 60.0) -> list[Record]:
        records = list(self._records)
        self._positions = dict(self._ends)
        return records

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing to close."""


class ArchivedSource:
    """An archive as source of an audit; implements `penstock.pipeline.inspect.audit.source.Source`."""

    def __init__(self, log: ArchivedLog) -> None:
        self.run, self._log = log.run, log

    def partitions(self, topic: str) -> range:
        """Partition numbers of a topic; empty if the topic was not exported."""
        return range(self._log.partitions(topic) or 0)

    def start_offset(self, topic: str, partition: int) -> int:
        """Return the first offset after which there are no gaps. Records may have been deleted between two exports."""
        first = self._log.beginning_offsets([(topic, partition)])[topic, partition]
        return max(first, self._log.archive.gap_end(kind_of(topic, partition), partition))

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Yield the records of a topic, partition by partition."""
        for partition in self.partitions(topic) if partitions is None else partitions:
            yield from self._log.records(kind_of(topic, partition), partition)
