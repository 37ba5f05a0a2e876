"""A run's records in a list, as a source of the audit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from penstock.pipeline.inspect.audit.report import Audit
from penstock.pipeline.inspect.audit.source import plain
from penstock.topics.wire.record import Record


class Listed:
    """Records in a list; `begins` has the first kept offset of each topic and partition whose earlier records were deleted."""

    def __init__(self, run: str, records: Iterable[Record], *, begins: Mapping[tuple[str, int], int] | None = None) -> None:
        self.run, self._begins = run, begins or {}
        self._topics: dict[str, dict[int, list[Record]]] = {}
        for record in records:
            self._topics.setdefault(plain(record.topic, run), {}).setdefault(record.partition, []).append(record)
        for partitions in self._topics.values():
            for held in partitions.values():
                held.sort(key=lambda record: record.offset)

    def partitions(self, topic: str) -> range:
        """Up to the last one that holds a record."""
        return range(max(self._topics.get(topic, {}), default=-1) + 1)

    def start_offset(self, topic: str, partition: int) -> int:
        """The first offset that is kept."""
        return self._begins.get((topic, partition), 0)

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """One partition after the other."""
        for partition in self.partitions(topic) if partitions is None else partitions:
            held = self._topics.get(topic, {}).get(partition, ())
            yield from (record for record in held if record.offset >= self.start_offset(topic, partition))


def broken(found: Audit) -> set[str]:
    """The names of the checks that report something."""
    return {result.check.name for result in found.results if result.violations}
