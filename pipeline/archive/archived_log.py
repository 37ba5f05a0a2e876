"""An archive as a log to read from: what reads a run's topics can read an archived run's.

The rule: the records that were exported, at their offsets, up to the ends that the last whole export reached; nothing can be written.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from penstock.infra.errors import ConfigError, RecordMissing
from penstock.infra.log import Partition, Start
from penstock.pipeline.archive.files import NOTE, Archive, find_archive
from penstock.pipeline.archive.layout import Kind, kind_of
from penstock.pipeline.archive.restore import to_records, typed, whole_groups
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record

ROW_GROUPS_KEPT = 8
"""As many as partitions by default: a replay reads a step's groups from each of them in turn."""


def open_archive(path: str) -> "ArchivedLog | None":
    """The archive in a folder; None for what can only be a run's id. Raises `ConfigError`."""
    directory = Path(path)
    if "/" not in path and not (directory / NOTE).exists() and not any(directory.glob(f"*/{NOTE}")):
        return None
    try:
        return ArchivedLog(find_archive(directory))
    except ValueError as error:
        raise ConfigError(str(error)) from error


class ArchivedLog:
    """The reading half of `penstock.infra.log.Log` over one archive."""

    def __init__(self, archive: Archive) -> None:
        note = archive.note()
        if note is None:
            raise ValueError(f"{archive.path} holds no export")
        self.archive, self._note = archive, note
        self._row_group = lru_cache(ROW_GROUPS_KEPT)(self._typed_row_group)

    @property
    def run(self) -> str:
        """The run that is archived."""
        return self._note.run

    def topics(self, prefix: str = "") -> list[str]:
        """The run's topics, and the register."""
        names = [topic if topic == RUNS_TOPIC else f"{self.run}.{topic}" for topic in self._note.partitions]
        return sorted(name for name in names if name.startswith(prefix))

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has; None for another run's."""
        return self._note.partitions.get(self._plain(topic))

    def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offsets that were kept when the archive was begun."""
        return {(topic, number): self._note.begins[self._plain(topic)][number] for topic, number in partitions}

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """The offset after what is archived."""
        return {(topic, number): self._end(kind_of(self._plain(topic), number), number) for topic, number in partitions}

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """The records at exactly these offsets, in the order asked. Raises `RecordMissing` naming those that are not there."""
        kind, wanted = kind_of(self._plain(topic), partition), sorted(set(offsets))
        records: dict[int, Record] = {}
        for row_group in self.archive.row_groups(kind, partition):
            if bisect_left(wanted, row_group.first) < bisect_left(wanted, row_group.last + 1):
                rows = _rows_at(kind, self._row_group(topic, partition, row_group.path, row_group.number), wanted)
                records |= {record.offset: record for record in self._restored(kind, partition, [rows])}
        if missing := [offset for offset in offsets if offset not in records]:
            raise RecordMissing(f"{topic}/{partition} has no record at offset {', '.join(map(str, missing[:10]))} in {self.archive.path}")
        return [records[offset] for offset in offsets]

    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, fetch_bytes: int | None = None) -> "ArchivedTail":
        """A reader of these partitions, one after the other."""
        return ArchivedTail(self, starts)

    def records(self, kind: Kind, partition: int, *, first: int = 0) -> Iterator[Record]:
        """A partition's records from an offset on, a row group in memory."""
        end = self._end(kind, partition)
        tables = (
            self.archive.row_group(row_group.path, row_group.number)
            for row_group in self.archive.row_groups(kind, partition)
            if row_group.last >= first and row_group.first < end
        )
        return (record for record in self._restored(kind, partition, tables) if first <= record.offset < end)

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _typed_row_group(self, topic: str, partition: int, path: Path, number: int) -> pa.Table:
        return typed(kind_of(self._plain(topic), partition), self.archive.row_group(path, number))

    def _restored(self, kind: Kind, partition: int, tables: Iterable[pa.Table]) -> Iterator[Record]:
        records = self._in_order(kind, partition, tables)
        return whole_groups(records, run=self.run) if kind.name == "groups" else records

    def _in_order(self, kind: Kind, partition: int, tables: Iterable[pa.Table]) -> Iterator[Record]:
        """The records of rows. Raises `ValueError` for a row of another partition, and for offsets that do not rise."""
        last = -1
        for record in (record for table in tables for record in to_records(kind, table, run=self.run)):
            if record.partition != partition or record.offset <= last:
                folder = self.archive.folder(kind, partition)
                raise ValueError(f"{folder}: a row of partition {record.partition}, offset {record.offset} follows offset {last}")
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
    """The rows at some offsets, and the other parts of the groups among them."""
    chosen = pc.is_in(table["offset"], value_set=pa.array(offsets, pa.int64()))
    if kind.name == "groups":
        numbers = table["group"].filter(chosen).drop_null()
        chosen = pc.or_(chosen, pc.is_in(table["group"], value_set=numbers.combine_chunks()))
    return table.filter(chosen)


class ArchivedTail:
    """Gives out the records of some partitions in order."""

    outage_s = 0.0

    def __init__(self, log: ArchivedLog, starts: Mapping[Partition, Start]) -> None:
        self._ends = log.end_offsets(starts)
        begins = {place: 0 if start == "earliest" else self._ends[place] if start == "latest" else start for place, start in starts.items()}
        self._positions = dict(begins)
        self._rest = (
            record
            for (topic, number), first in begins.items()
            for record in log.records(kind_of(topic.removeprefix(f"{log.run}."), number), number, first=first)
        )

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        """The next records; none at the end."""
        records = list(islice(self._rest, max_records))
        for record in records:
            self._positions[record.topic, record.partition] = record.offset + 1
        if not records:
            self._positions = dict(self._ends)
        return records

    def read_to_end(self, timeout_s: float = 60.0) -> list[Record]:
        """All that is left."""
        records = list(self._rest)
        self._positions = dict(self._ends)
        return records

    def position(self, partition: Partition) -> int:
        """The offset of the next record."""
        return self._positions[partition]

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing is held."""


class ArchivedSource:
    """An archive as the audit reads it: a `penstock.pipeline.audit.source.Source`."""

    def __init__(self, log: ArchivedLog) -> None:
        self.run, self._log = log.run, log

    def partitions(self, topic: str) -> range:
        """Its partitions; none when the topic was not exported."""
        return range(self._log.partitions(topic) or 0)

    def begin(self, topic: str, partition: int) -> int:
        """The offset from which on nothing is missing: what was deleted between two exports is missing as what was deleted before."""
        begin = self._log.beginning_offsets([(topic, partition)])[topic, partition]
        return max(begin, self._log.archive.gap_end(kind_of(topic, partition), partition))

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """One partition after the other."""
        for partition in self.partitions(topic) if partitions is None else partitions:
            yield from self._log.records(kind_of(topic, partition), partition)
