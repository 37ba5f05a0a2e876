"""Tracks which (group, sample) pairs of the owned partitions are already in `rollouts`, from any worker. Reads headers only."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.infra.log import Log, Partition, Start, Tail
from penstock.pipeline.runtime.topic_reader import read_to_current_end
from penstock.topics import rollouts
from penstock.topics.wire.errors import Unusable


class Published(NamedTuple):
    """A sample that is in the log."""

    partition: int
    group: int
    sample: int
    offset: int


class PublishedSamples:
    """Follows the owned partitions of `rollouts`; each read continues where the last one ended."""

    def __init__(self, log: Log, run: str) -> None:
        self._log, self._run, self._topic = log, run, f"{run}.rollouts"
        self._tail: Tail | None = None

    def follow(self, starts: Mapping[int, int]) -> list[Published]:
        """Follow these partitions instead, each from its start or the first retained record; returns their samples."""
        self.close()
        if starts:
            first_offsets = self._log.beginning_offsets((self._topic, partition) for partition in starts)
            first: dict[Partition, Start] = {at: max(first, starts[at[1]]) for at, first in first_offsets.items()}
            self._tail = self._log.tail(first)
        return self.read_new()

    def read_new(self) -> list[Published]:
        """The samples that were written since the last read; raises `LogError` if they cannot be read."""
        samples = []
        for record in read_to_current_end(self._log, self._tail) if self._tail else ():
            try:
                headers = rollouts.check(record, run=self._run)
            except Unusable:
                continue  # the scorer owns reading `rollouts`
            assert headers.group is not None
            samples += [Published(record.partition, headers.group, sample, record.offset) for sample in rollouts.tokens_of(headers)]
        return samples

    def position(self, partition: int) -> int:
        """Position in a followed partition."""
        assert self._tail is not None
        return self._tail.position((self._topic, partition))

    def skip(self, partition: int, offset: int) -> None:
        """Move the position in a followed partition to `offset`."""
        assert self._tail is not None
        self._tail.seek((self._topic, partition), offset)

    def close(self) -> None:
        """Close the reader."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
