"""A log that notes which topics its user reads from and writes to."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.infra.log import Log
from penstock.topics.wire.record import Outgoing


class RecordingLog:
    """`log`, with the names of the topics that were read and written through this object, and of those whose ends were `asked` for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def read(self, topic: str, *arguments: Any, **options: Any) -> Any:
        self.reads.add(topic)
        return self._log.read(topic, *arguments, **options)

    def tail(self, starts: Mapping[tuple[str, int], Any], **options: Any) -> Any:
        self._note_reads(starts)
        return _Noting(self._log.tail(starts, **options), self)

    def end_offsets(self, partitions: Iterable[tuple[str, int]], **options: Any) -> Any:
        places = list(partitions)
        self.asked.update(topic for topic, _ in places)
        return self._log.end_offsets(places, **options)

    def member(self, group: str, topics: Sequence[str], **options: Any) -> Any:
        self.reads.update(topics)
        return self._log.member(group, topics, **options)

    def producer(self, **options: Any) -> Any:
        return _Noting(self._log.producer(**options), self)

    def transactions(self, transactional_id: str, **options: Any) -> Any:
        if claim := options.get("claim"):
            self._note_writes([claim])
        return _Noting(self._log.transactions(transactional_id, **options), self)

    def _note_reads(self, partitions: Iterable[tuple[str, int]]) -> None:
        self.reads.update(topic for topic, _ in partitions)

    def _note_writes(self, records: Iterable[Outgoing]) -> None:
        self.writes.update(record.topic for record in records)


class _Noting:
    """A tail, producer or transactional writer of a `RecordingLog`."""

    def __init__(self, inner: Any, log: RecordingLog) -> None:
        self._inner, self._noting = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, partitions: Mapping[tuple[str, int], Any]) -> None:
        self._noting._note_reads(partitions)
        self._inner.add(partitions)

    def send(self, outgoing: Outgoing) -> Any:
        self._noting._note_writes([outgoing])
        return self._inner.send(outgoing)

    def commit(self, records: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(records, Mapping):  # a tail commits offsets, which are no records
            self._noting._note_writes(records)
        return self._inner.commit(records, *arguments, **options)
