"""Protocol of a record source. Records of one partition are in order and committed; partitions are not ordered among each other."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record


class Unreadable(ValueError):
    """The run cannot be audited: no broker, topics or configuration. Its text is one line for the user."""


class Source(Protocol):
    """The topics of one run, by their plain names (`groups`), and the register of runs."""

    run: str

    def partitions(self, topic: str) -> range:
        """Partition numbers of a topic; none if it does not exist."""
        ...

    def start_offset(self, topic: str, partition: int) -> int:
        """The first retained offset."""
        ...

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Every record up to the end offsets at the audit's start, of these partitions or of all."""
        ...


def plain(topic: str, run: str) -> str:
    """A topic's name without the run's id.

    Example:
        plain("demo-1.groups", "demo-1")  # -> "groups"
    """
    return topic if topic == RUNS_TOPIC else topic.removeprefix(f"{run}.")
