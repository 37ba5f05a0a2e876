"""The source of the records, as a protocol.

The rule: within a partition records come in order and whole transactions only; between partitions there is no order.
"""

from collections.abc import Iterator, Sequence
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
        """The offset from which on everything is kept."""
        ...

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Every record that existed when the audit began, of the given partitions or all."""
        ...


def plain(topic: str, run: str) -> str:
    """A topic's name without the run's id.

    Example:
        plain("demo-1.groups", "demo-1")  # -> "groups"
    """
    return topic if topic == RUNS_TOPIC else topic.removeprefix(f"{run}.")
