"""The source of the records: a protocol, and its in-memory implementation.

The rule: within a partition records come in order and whole transactions only; between partitions there is no order.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record


class Unreadable(ValueError):
    """The run cannot be judged: no broker, no topics, no configuration; one line for a person."""


class Source(Protocol):
    """The topics of one run, by their plain names (`groups`), and the register of runs."""

    run: str

    def partitions(self, topic: str) -> range:
        """Partition numbers of a topic; none when it does not exist."""
        ...

    def begin(self, topic: str, partition: int) -> int:
        """The first offset that is still kept."""
        ...

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Every record that existed when the audit began, of the given partitions or all."""
        ...


class Listed:
    """Records in a list."""

    def __init__(self, run: str, records: Iterable[Record]) -> None:
        self.run = run
        self._topics: dict[str, dict[int, list[Record]]] = {}
        for record in records:
            self._topics.setdefault(plain(record.topic, run), {}).setdefault(record.partition, []).append(record)
        for partitions in self._topics.values():
            for held in partitions.values():
                held.sort(key=lambda record: record.offset)

    def partitions(self, topic: str) -> range:
        """Partition numbers up to the last one that holds a record."""
        return range(max(self._topics.get(topic, {}), default=-1) + 1)

    def begin(self, topic: str, partition: int) -> int:
        """The offset of the first record."""
        held = self._topics.get(topic, {}).get(partition)
        return held[0].offset if held else 0

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """One partition after the other."""
        for partition in self.partitions(topic) if partitions is None else partitions:
            yield from self._topics.get(topic, {}).get(partition, ())


def plain(topic: str, run: str) -> str:
    """A topic's name without the run's id.

    Example:
        plain("demo-1.groups", "demo-1")  # -> "groups"
    """
    return topic if topic == RUNS_TOPIC else topic.removeprefix(f"{run}.")
