"""Which samples of the owned partitions stand in `rollouts` already, whoever wrote them.

The rule: only headers are read, and what is there when a question is asked is in the answer.
"""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.infra.log import Log, Start, Tail
from penstock.topics import rollouts
from penstock.topics.wire.errors import Unusable

READ_LIMIT_S = 120.0


class Existing(NamedTuple):
    """A sample that stands in the log."""

    partition: int
    group: int
    sample: int
    offset: int


class ExistingSamples:
    """Follows the owned partitions of a run's `rollouts`, each look from where the one before ended."""

    def __init__(self, log: Log, run: str) -> None:
        self._log, self._run, self._topic = log, run, f"{run}.rollouts"
        self._tail: Tail | None = None

    def follow(self, starts: Mapping[int, int]) -> list[Existing]:
        """What stands in these partitions, each from its start; they are the followed ones from now on."""
        self.close()
        if starts:
            first: dict[tuple[str, int], Start] = {(self._topic, partition): start for partition, start in starts.items()}
            self._tail = self._log.tail(first)
        return self.news()

    def news(self) -> list[Existing]:
        """What has come since the last look, up to this moment; raises `LogError` when that cannot be read."""
        found = []
        for record in self._tail.read_to_end(READ_LIMIT_S) if self._tail else ():
            try:
                headers = rollouts.check(record, run=self._run)
            except Unusable:
                continue  # the scorer owns reading `rollouts`
            if headers.group is not None and headers.sample is not None:
                found.append(Existing(record.partition, headers.group, headers.sample, record.offset))
        return found

    def position(self, partition: int) -> int:
        """Where the last look at a followed partition ended."""
        assert self._tail is not None
        return self._tail.position((self._topic, partition))

    def skip(self, partition: int, offset: int) -> None:
        """Let the next look at a followed partition begin at `offset`: what is before it is known."""
        assert self._tail is not None
        self._tail.seek((self._topic, partition), offset)

    def close(self) -> None:
        """Stop following."""
        if self._tail is not None:
            self._tail.close()
            self._tail = None
