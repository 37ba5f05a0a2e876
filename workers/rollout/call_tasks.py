"""A rollout worker's calls: which have no reply, and what may be committed.

A call is generated unless its reply is in the log. A partition's committed offset is the contiguous low watermark of calls with replies;
the offset metadata tell where in `replies` the replies to later calls start, and some before: a new environment worker may repeat calls.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.infra.log import Pending
from penstock.pipeline.agents.engine import turn_number
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import CallOffsetMetadata
from penstock.topics.turns.calls import Call, TurnKey

MAX_REPLIED = 4096
"""Calls with replies of a partition below the watermark that are remembered."""


@dataclass(slots=True, eq=False)
class CallTask:
    """One call that has no reply."""

    call: Call
    key: TurnKey
    partition: int
    offset: int
    inherited: bool
    """True if it was in the log when its partition was assigned: an earlier owner may still generate it."""
    sent: Pending | None = None
    """Its reply, which is being sent."""

    @property
    def number(self) -> int:
        """Group number of its turn in the engine; lower groups come first."""
        return turn_number(self.key.group, self.key.sample, self.key.turn)


@dataclass(slots=True)
class CallPartition:
    """One partition of `calls` that this worker owns, and the same one of `replies`."""

    position: int
    """Offset after the last call that was delivered."""
    inherited_end: int
    """End offset of `calls` when the partition was assigned."""
    replies_end: int
    """All replies before this offset were read or sent."""
    replied: "OrderedDict[TurnKey, tuple[int, int]]" = field(default_factory=OrderedDict)
    """Key -> offset of the reply, and of the call, -1 if that was not delivered here."""
    committed: tuple[int, str] | None = None


@dataclass(slots=True)
class CallTasks:
    """The calls of all partitions that a worker owns; those in flight survive a rebalance if their partitions stay."""

    partitions: dict[int, CallPartition] = field(default_factory=dict)
    tasks: dict[TurnKey, CallTask] = field(default_factory=dict)
    """Those without an acknowledged reply."""
    generating: dict[int, CallTask] = field(default_factory=dict)
    """Number -> the task that the engine generates."""

    def revoke(self) -> None:
        """Forget all partitions and every call that is not in flight: those that stay with this worker are delivered again."""
        self.partitions.clear()
        self.tasks = {task.key: task for task in self.tasks.values() if task.sent is not None or self.generating.get(task.number) is task}

    def assign(self, partition: int, *, offset: int, inherited_end: int, replies_end: int) -> None:
        """Add a partition at its committed offset."""
        self.partitions[partition] = CallPartition(offset, inherited_end, replies_end)

    def gone(self) -> list[CallTask]:
        """Drop and return the calls of partitions that are another worker's now."""
        gone = [task for task in self.tasks.values() if task.partition not in self.partitions]
        for task in gone:
            del self.tasks[task.key]
        return gone

    def add(self, call: Call, key: TurnKey, *, partition: int, offset: int) -> None:
        """Queue a call unless it has a reply, or is queued already."""
        owned = self.partitions.get(partition)
        if owned is None:
            return
        self.passes(partition, offset)
        if key in owned.replied:
            owned.replied[key] = owned.replied[key][0], offset
        elif key not in self.tasks:
            self.tasks[key] = CallTask(call, key, partition, offset, inherited=offset < owned.inherited_end)

    def passes(self, partition: int, offset: int) -> None:
        """Record that the record at an offset was delivered, usable or not."""
        if (owned := self.partitions.get(partition)) is not None:
            owned.position = max(owned.position, offset + 1)

    def replied(self, partition: int, key: TurnKey, offset: int) -> CallTask | None:
        """Record that a reply is in the log, from any worker; returns the call if it was queued here."""
        owned, task = self.partitions.get(partition), self.tasks.pop(key, None)
        if owned is not None:
            owned.replies_end = max(owned.replies_end, offset + 1)
            owned.replied.setdefault(key, (offset, -1 if task is None else task.offset))
        return task

    def waiting(self) -> list[CallTask]:
        """Calls that may be started, the lowest group first; of two for one turn one at a time."""
        ready = {task.number: task for task in self.tasks.values() if task.sent is None and task.number not in self.generating}
        return [task for _, task in sorted(ready.items())]

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition -> (offset, metadata) to commit, of those that moved since the last call."""
        lowest: dict[int, int] = {}
        for task in self.tasks.values():
            lowest[task.partition] = min(task.offset, lowest.get(task.partition, task.offset))
        moved = {}
        for number, owned in self.partitions.items():
            offset = min(lowest.get(number, owned.position), owned.position)
            inherited = owned.position < owned.inherited_end  # which calls have replies is not read yet
            while not inherited and len(owned.replied) > MAX_REPLIED and next(iter(owned.replied.values()))[1] < offset:
                owned.replied.popitem(last=False)
            first = min((reply for reply, _ in owned.replied.values()), default=owned.replies_end)
            mark = offset, offset_metadata.encode(CallOffsetMetadata(first))
            if mark != owned.committed:
                moved[number] = owned.committed = mark
        return moved
