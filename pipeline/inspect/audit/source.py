"""Protocol of a source of records for the audit. It yields committed records; order is guaranteed only within a partition."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.wire.record import Record


class Unreadable(ValueError):
    """The run cannot be audited, e.g. because topics are missing. The message is one line for the user."""


class Source(Protocol):
    """The topics of one run, by names without the run id (`groups`), and the topic of all runs."""

    run: str

    def partitions(self, topic: str) -> range:
        """Partition numbers of a topic; empty if the topic does not exist."""
        ...

    def start_offset(self, topic: str, partition: int) -> int: ...

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Yield every record of these partitions, or of all, up to the end offsets at the start of the audit."""
        ...


def plain(topic: str, run: str) -> str:
    """Remove the run id from a topic's name: `plain("demo-1.groups", "demo-1")` is "groups"."""
    return topic if topic == RUNS_TOPIC else topic.removeprefix(f"{run}.")
