"""The replies that an environment worker knows, of the partitions that it owns.

The rule: the first reply to a call counts, and replies of a group are kept until its samples are in `rollouts`: whoever takes a partition
over begins to read at the oldest reply of a group that is not done, so that an answered call is never asked again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.topics.turns.calls import TurnKey
from penstock.topics.turns.replies import Reply

Turn = tuple[int, int, int]
"""Group, sample, number of the model's turn."""


@dataclass(slots=True)
class _Partition:
    position: int
    """Offset after the last reply that was read."""
    behind: int
    """Where `replies` ended when the partition was assigned."""
    replies: dict[int, dict[TurnKey, Reply]] = field(default_factory=dict)
    """Group -> its replies."""
    first: dict[int, int] = field(default_factory=dict)
    """Group -> offset of its first reply."""


@dataclass(slots=True)
class RecordedReplies:
    """What was answered, by partition."""

    _partitions: dict[int, _Partition] = field(default_factory=dict)
    _attempts: dict[Turn, int] = field(default_factory=dict)
    """The highest attempt of a turn that was answered or asked here."""
    _committed: dict[int, int] = field(default_factory=dict)

    @property
    def caught_up(self) -> bool:
        """Whether all replies are known that were there when the partitions were assigned."""
        return all(held.position >= held.behind for held in self._partitions.values())

    def assign(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Own these partitions from now on, whose replies come from `starts` on; what is known of those that stay is kept."""
        kept = self._partitions
        self._partitions = {}
        for partition, start in starts.items():
            held = kept.get(partition) or _Partition(start, 0)
            held.position, held.behind = start, ends[partition]
            self._partitions[partition] = held
        self._committed = {}

    def revoke(self) -> None:
        """Wait for the next assignment."""
        for held in self._partitions.values():
            held.behind = held.position + 1

    def passes(self, partition: int, offset: int) -> None:
        """Note that the record at an offset was read, whatever it was."""
        if (held := self._partitions.get(partition)) is not None:
            held.position = max(held.position, offset + 1)

    def wants(self, partition: int, key: TurnKey) -> bool:
        """Whether a reply is the first to its call, in an owned partition."""
        held = self._partitions.get(partition)
        return held is not None and key not in held.replies.get(key.group, {})

    def add(self, partition: int, offset: int, reply: Reply) -> None:
        """Keep a reply that is wanted."""
        held = self._partitions[partition]
        held.replies.setdefault(reply.group, {})[reply.key] = reply
        held.first.setdefault(reply.group, offset)
        turn = (reply.group, reply.sample, reply.turn)
        self._attempts[turn] = max(self._attempts.get(turn, 0), reply.attempt)

    def find(self, partition: int, key: TurnKey) -> Reply | None:
        """The reply to a call, if it is known."""
        held = self._partitions.get(partition)
        return None if held is None else held.replies.get(key.group, {}).get(key)

    def next_attempt(self, turn: Turn) -> int:
        """One more than the highest attempt of a turn that was answered or asked; 0 at first."""
        self._attempts[turn] = self._attempts.get(turn, -1) + 1
        return self._attempts[turn]

    def forget(self, ended: Callable[[int, int], bool]) -> None:
        """Drop the replies of groups of which `ended(partition, group)` holds."""
        for partition, held in self._partitions.items():
            for group in [group for group in held.replies if ended(partition, group)]:
                for key in held.replies.pop(group):
                    self._attempts.pop((key.group, key.sample, key.turn), None)
                del held.first[group]

    def offsets(self) -> Iterator[tuple[int, int]]:
        """(partition, offset) to commit, of those that moved since the last call."""
        for partition, held in self._partitions.items():
            offset = min(held.first.values(), default=held.position)
            if self._committed.get(partition) != offset and held.position >= held.behind:
                self._committed[partition] = offset
                yield partition, offset
