"""A rollout worker's calls: which are unanswered, and what may be committed.

The rule: a call is drawn unless its reply is in the log. A partition's committed offset is the contiguous low watermark of answered calls;
the commit's note says where in `replies` the replies to the calls above it begin, and to some before it: an environment worker that takes
over may repeat what it could not see yet.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.infra.log import Pending
from penstock.pipeline.envs.agents.engine import turn_number
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import CallOffsetMetadata
from penstock.topics.turns.calls import Call, TurnKey

KEPT = 4096
"""Answered calls of a partition below the watermark that are remembered."""


@dataclass(slots=True, eq=False)
class CallTask:
    """One call that has no reply."""

    call: Call
    key: TurnKey
    partition: int
    offset: int
    inherited: bool
    """True if it was in the log when its partition was assigned: an earlier owner may be drawing it still."""
    sent: Pending | None = None
    """Its reply, which is on its way to the log."""

    @property
    def number(self) -> int:
        """What an engine knows its turn by; lower groups come first."""
        return turn_number(self.key.group, self.key.sample, self.key.turn)


@dataclass(slots=True)
class CallPartition:
    """One partition of `calls` that this worker owns, and of `replies` beside it."""

    position: int
    """Offset after the last call that was delivered."""
    inherited_end: int
    """Where `calls` ended when the partition was assigned."""
    replies_end: int
    """All replies before this offset are known."""
    answered: "OrderedDict[TurnKey, tuple[int, int]]" = field(default_factory=OrderedDict)
    """Key -> offset of the reply, and of the call, -1 where that was not delivered here."""
    committed: tuple[int, str] | None = None


@dataclass(slots=True)
class CallTasks:
    """The calls of all partitions that a worker owns; those that are drawn survive a rebalance, as far as their partitions stay."""

    partitions: dict[int, CallPartition] = field(default_factory=dict)
    tasks: dict[TurnKey, CallTask] = field(default_factory=dict)
    """Those without an acknowledged reply."""
    drawing: dict[int, CallTask] = field(default_factory=dict)
    """Number -> the task that the engine draws."""

    def revoke(self) -> None:
        """Forget all partitions and every call that is not drawn: what stays with this worker comes again."""
        self.partitions.clear()
        self.tasks = {task.key: task for task in self.tasks.values() if task.sent is not None or self.drawing.get(task.number) is task}

    def assign(self, partition: int, *, offset: int, inherited_end: int, replies_end: int) -> None:
        """Begin with a partition at its committed offset."""
        self.partitions[partition] = CallPartition(offset, inherited_end, replies_end)

    def gone(self) -> list[CallTask]:
        """Drop the calls of partitions that are another's now; returns them."""
        gone = [task for task in self.tasks.values() if task.partition not in self.partitions]
        for task in gone:
            del self.tasks[task.key]
        return gone

    def add(self, call: Call, key: TurnKey, *, partition: int, offset: int) -> None:
        """Queue a call unless it is answered, or here already."""
        owned = self.partitions.get(partition)
        if owned is None:
            return
        self.passes(partition, offset)
        if key in owned.answered:
            owned.answered[key] = owned.answered[key][0], offset
        elif key not in self.tasks:
            self.tasks[key] = CallTask(call, key, partition, offset, inherited=offset < owned.inherited_end)

    def passes(self, partition: int, offset: int) -> None:
        """Note that the record at an offset was delivered, whatever it was."""
        if (owned := self.partitions.get(partition)) is not None:
            owned.position = max(owned.position, offset + 1)

    def answered(self, partition: int, key: TurnKey, offset: int) -> CallTask | None:
        """Note that a reply is in the log, whoever sent it; returns the call if it was to be drawn here."""
        owned, task = self.partitions.get(partition), self.tasks.pop(key, None)
        if owned is not None:
            owned.replies_end = max(owned.replies_end, offset + 1)
            owned.answered.setdefault(key, (offset, -1 if task is None else task.offset))
        return task

    def waiting(self) -> list[CallTask]:
        """Calls that may be begun, the lowest group first; of two for one turn one at a time."""
        ready = {task.number: task for task in self.tasks.values() if task.sent is None and task.number not in self.drawing}
        return [task for _, task in sorted(ready.items())]

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition -> (offset, note) to commit, of those where something moved since the last call."""
        lowest: dict[int, int] = {}
        for task in self.tasks.values():
            lowest[task.partition] = min(task.offset, lowest.get(task.partition, task.offset))
        moved = {}
        for number, owned in self.partitions.items():
            offset = min(lowest.get(number, owned.position), owned.position)
            inherited = owned.position < owned.inherited_end  # then it is not known yet which calls are answered
            while not inherited and len(owned.answered) > KEPT and next(iter(owned.answered.values()))[1] < offset:
                owned.answered.popitem(last=False)
            first = min((reply for reply, _ in owned.answered.values()), default=owned.replies_end)
            mark = offset, offset_metadata.encode(CallOffsetMetadata(first))
            if mark != owned.committed:
                moved[number] = owned.committed = mark
        return moved
