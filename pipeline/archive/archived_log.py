"""An archive as a log to read from: whoever folds a run's topics can fold an archived run's.

The rule: the records that would come back by an import, at their offsets; nothing can be written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from penstock.infra.errors import LogError
from penstock.infra.log import Partition, Start
from penstock.pipeline.archive.files import Archive
from penstock.pipeline.archive.layout import kind_of
from penstock.pipeline.archive.restore import to_records, whole_groups
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record


class ArchivedLog:
    """The reading half of `penstock.infra.log.Log` over one archive."""

    def __init__(self, archive: Archive) -> None:
        note = archive.note()
        if note is None:
            raise ValueError(f"{archive.path} holds no export")
        self._archive, self._note = archive, note

    def topics(self, prefix: str = "") -> list[str]:
        """The run's topics, and the register."""
        names = [topic if topic == RUNS_TOPIC else f"{self._note.run}.{topic}" for topic in self._note.partitions]
        return sorted(name for name in names if name.startswith(prefix))

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic had; None for another run's."""
        return self._note.partitions.get(self._plain(topic))

    def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offsets that were kept when the archive was begun."""
        return {(topic, number): self._note.begins[self._plain(topic)][number] for topic, number in partitions}

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """The offset after what is archived."""
        return {place: self._end(place) for place in partitions}

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """The records at exactly these offsets, in the order asked; raises `LogError` naming those that are missing."""
        wanted = set(offsets)
        found = {record.offset: record for record in self.records(topic, partition, min(offsets, default=0)) if record.offset in wanted}
        if missing := [offset for offset in offsets if offset not in found]:
            raise LogError(f"{topic}/{partition} has no record at offset {', '.join(map(str, missing[:10]))} in {self._archive.path}")
        return [found[offset] for offset in offsets]

    def tail(self, starts: Mapping[Partition, Start], *, committed: bool = True, group: str | None = None) -> "ArchivedTail":
        """A reader of these partitions, one after the other."""
        return ArchivedTail(self, starts)

    def records(self, topic: str, partition: int, first: int) -> Iterator[Record]:
        """A partition's records from an offset on."""
        kind, run = kind_of(self._plain(topic), partition), self._note.run
        rows = (record for table in self._archive.rows(kind, partition) for record in to_records(kind, table, run=run))
        found = whole_groups(rows, run=run) if kind.name == "groups" else rows
        return (record for record in found if record.offset >= first)

    def close(self) -> None:
        """Nothing is held."""

    def _plain(self, topic: str) -> str:
        return topic.removeprefix(f"{self._note.run}.")

    def _end(self, place: Partition) -> int:
        topic, number = self._plain(place[0]), place[1]
        if topic in self._note.ends:
            return self._note.ends[topic][number]
        found = self._archive.next_offset(kind_of(topic, number), number)
        return found if found is not None else self._note.begins[topic][number]


class ArchivedTail:
    """Gives out the records of some partitions in order."""

    outage_s = 0.0

    def __init__(self, log: ArchivedLog, starts: Mapping[Partition, Start]) -> None:
        ends = log.end_offsets(starts)
        begins = {place: 0 if start == "earliest" else ends[place] if start == "latest" else start for place, start in starts.items()}
        self._positions = dict(begins)
        self._ends = ends
        self._rest = (record for (topic, number), first in begins.items() for record in log.records(topic, number, first))

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        """The next records; none at the end."""
        found = list(islice(self._rest, max_records))
        for record in found:
            self._positions[record.topic, record.partition] = record.offset + 1
        if not found:
            self._positions = dict(self._ends)
        return found

    def read_to_end(self, timeout_s: float = 60.0) -> list[Record]:
        """All that is left."""
        found = list(self._rest)
        self._positions = dict(self._ends)
        return found

    def position(self, partition: Partition) -> int:
        """The offset of the next record."""
        return self._positions[partition]

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing is held."""
