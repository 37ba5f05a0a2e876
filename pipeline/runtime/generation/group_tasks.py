"""A rollout worker's groups: which samples each still needs, and which prompts may be committed.

The rule: a group needs K samples and is begun as K + r; the first K that end are its samples. A partition's committed offset is the
contiguous low watermark of prompts whose samples are all acknowledged; the commit's note says where in `rollouts` the samples of the
prompts above it begin.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.infra.engines.base import Completion
from penstock.infra.log import Pending
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import RolloutOffsetMetadata
from penstock.pipeline.scheduling.id_set import IdSet
from penstock.topics.prompts import Prompt
from penstock.topics.samples import cause_of
from penstock.topics.wire.record import Record


@dataclass(slots=True)
class GroupTask:
    """One group: its prompt and the state of its samples."""

    prompt: Prompt
    partition: int
    offset: int
    """Of the prompt."""
    inherited: bool = False
    """True if the prompt was in the log when its partition was assigned: an earlier owner may still be drawing it."""
    begun: bool = False
    """True once the engine was asked for its samples."""
    finished: bool = False
    """True once this worker has nothing left to do for it."""
    drawing: set[int] = field(default_factory=set)
    """Samples that the engine was asked for and has not returned."""
    drawn: dict[int, Completion] = field(default_factory=dict)
    """Samples that the engine returned and that are not sent."""
    broken: dict[int, Completion] = field(default_factory=dict)
    """Samples that their environment broke: they are published only where the group cannot get enough others."""
    sent: dict[int, Pending] = field(default_factory=dict)
    """Samples that are sent and not acknowledged, each with the record that it is in."""
    known: dict[int, int] = field(default_factory=dict)
    """Sample -> its offset in `rollouts`, acknowledged, whoever sent it."""

    @property
    def group(self) -> int:
        """The group's number."""
        return self.prompt.group

    @property
    def needed(self) -> int:
        """How many samples still have to be drawn."""
        return max(0, self.prompt.samples_per_prompt - len(self.known.keys() | self.sent.keys() | self.drawn.keys()))

    @property
    def done(self) -> bool:
        """Whether all its samples are acknowledged, whoever sent them."""
        return len(self.known) >= self.prompt.samples_per_prompt

    def wanted(self, *, oversample: int) -> list[int]:
        """The samples to ask the engine for: of K + r those that are not in the log; none when the group has enough."""
        begun = range(self.prompt.samples_per_prompt + oversample)
        return [sample for sample in begun if sample not in self.known] if self.needed else []

    def begin(self, samples: list[int]) -> None:
        """Note that the engine draws these samples."""
        self.begun, self.drawing = True, set(samples)

    def take(self, completion: Completion) -> None:
        """Keep a sample that the engine returned, if the group needs it."""
        if completion.sample in self.drawing:
            self.drawing.discard(completion.sample)
            if self.needed and completion.sample not in self.known:
                (self.broken if cause_of(getattr(completion, "turns", None)) else self.drawn)[completion.sample] = completion
        for sample in sorted(self.broken)[: self.needed if not self.drawing else 0]:
            self.drawn[sample] = self.broken.pop(sample)

    def send(self, samples: Iterable[int], pending: Pending) -> None:
        """Note that drawn samples are sent, in one record."""
        for sample in samples:
            del self.drawn[sample]
            self.sent[sample] = pending

    def acknowledge(self) -> Iterator[tuple[int, int]]:
        """(sample, offset) of each sent sample that has reached the log meanwhile; raises `LogError` for one that did not."""
        for sample, pending in list(self.sent.items()):
            if pending.done():
                del self.sent[sample]
                yield sample, pending.offset(0.0)

    def note(self, sample: int, offset: int) -> None:
        """Note that a sample is in the log; drawn samples that the group needs no longer are dropped, the highest first."""
        self.known.setdefault(sample, offset)
        self.drawn.pop(sample, None)
        surplus = len(self.known.keys() | self.sent.keys()) + len(self.drawn) - self.prompt.samples_per_prompt
        for highest in sorted(self.drawn, reverse=True)[: max(0, surplus)]:
            del self.drawn[highest]


@dataclass(slots=True)
class OwnedPartition:
    """One partition of `prompts` that this worker owns, and of `rollouts` beside it."""

    position: int = 0
    """Offset after the last prompt that was delivered."""
    inherited_end: int = 0
    """Where `prompts` ended when the partition was assigned."""
    rollouts_end: int = 0
    """All samples before this offset in `rollouts` are known."""
    gap: bool = False
    """True if somebody else has written to `rollouts` since."""
    early: dict[int, dict[int, int]] = field(default_factory=dict)
    """Group -> sample -> offset, of samples whose prompt is not delivered yet."""
    newest: int = -1
    """The highest group number delivered: the feeder's numbers rise, so samples of higher ones belong to prompts to come."""
    committed: tuple[int, str] | None = None


@dataclass(slots=True)
class GroupTasks:
    """The groups of all partitions that a worker owns.

    Groups that are begun survive a rebalance: their worker draws on, and `assign` drops those that turn out to be another's.
    """

    oversample: int = 0
    """r: samples begun beyond those a group needs."""
    partitions: dict[int, OwnedPartition] = field(default_factory=dict)
    tasks: dict[int, GroupTask] = field(default_factory=dict)
    """Group -> its task: those delivered and above the watermark, and those begun."""
    _delivered: IdSet = field(default_factory=IdSet)
    """Groups whose prompt was delivered since the partitions were assigned."""

    def revoke(self) -> None:
        """Forget all partitions and every group that is not begun: what stays with this worker comes again."""
        self.partitions.clear()
        self.tasks = {task.group: task for task in self.groups_in_flight()}
        self._delivered = IdSet()

    def assign(self, partition: int, *, offset: int, inherited_end: int, rollouts_end: int) -> None:
        """Begin with a partition at its committed offset."""
        self.partitions[partition] = OwnedPartition(position=offset, inherited_end=inherited_end, rollouts_end=rollouts_end)

    def add(self, record: Record, prompt: Prompt) -> bool:
        """Queue a prompt; False when it repeats a group that was delivered before."""
        owned = self.partitions.get(record.partition)
        if owned is None:
            return True
        owned.position = max(owned.position, record.offset + 1)
        owned.newest = max(owned.newest, prompt.group)
        task = self.tasks.get(prompt.group)
        if prompt.group in self._delivered or (task is not None and (task.partition, task.offset) != (record.partition, record.offset)):
            return False
        self._delivered.add(prompt.group)
        if task is None:
            known = owned.early.pop(prompt.group, {})
            inherited = record.offset < owned.inherited_end
            self.tasks[prompt.group] = GroupTask(prompt, record.partition, record.offset, inherited=inherited, known=known)
        return True

    def skip(self, record: Record) -> None:
        """Pass over a record that is no prompt, so that the watermark passes it too."""
        owned = self.partitions.get(record.partition)
        if owned is not None:
            owned.position = max(owned.position, record.offset + 1)

    def waiting(self) -> list[GroupTask]:
        """Groups that may be begun, in no particular order."""
        return [task for task in self.tasks.values() if not task.begun and not task.done]

    def groups_in_flight(self) -> list[GroupTask]:
        """Groups that are begun and not finished."""
        return [task for task in self.tasks.values() if task.begun and not task.finished]

    def note(self, partition: int, group: int, sample: int, offset: int) -> None:
        """Note that a sample is in the log, whoever sent it."""
        owned, task = self.partitions.get(partition), self.tasks.get(group)
        if task is not None and task.partition == partition:
            task.note(sample, offset)
        elif owned is not None and group > owned.newest:
            owned.early.setdefault(group, {}).setdefault(sample, offset)

    def acknowledge(self) -> int:
        """Note the sent samples that have reached the log; returns how many groups are finished with them.

        Where the offsets of a partition have a gap, somebody else has written there.
        """
        finished = 0
        for task in self.groups_in_flight():
            for sample, offset in task.acknowledge():
                task.note(sample, offset)
                owned = self.partitions.get(task.partition)
                if owned is not None and offset >= owned.rollouts_end:
                    owned.gap = owned.gap or offset > owned.rollouts_end
                    owned.rollouts_end += not owned.gap
            task.finished = task.done and not (task.drawing or task.drawn or task.sent)
            finished += task.finished
        return finished

    def caught_up(self, partition: int, end: int) -> None:
        """Note that all samples before `end` of a partition of `rollouts` are known."""
        owned = self.partitions[partition]
        owned.rollouts_end, owned.gap = max(owned.rollouts_end, end), False

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition -> (offset, note) to commit, of those where something moved since the last call; drops what is below."""
        moved = {}
        for number, owned in self.partitions.items():
            tasks = [task for task in self.tasks.values() if task.partition == number]
            offset = min((task.offset for task in tasks if task.offset < owned.position and not task.done), default=owned.position)
            for task in tasks:
                if task.done and task.offset < offset:
                    del self.tasks[task.group]
            owned.early = {group: samples for group, samples in owned.early.items() if group > owned.newest}
            held = [task.known for task in tasks if task.group in self.tasks] + list(owned.early.values())
            first = min((at for samples in held for at in samples.values()), default=owned.rollouts_end)
            mark = offset, offset_metadata.encode(RolloutOffsetMetadata(first))
            if mark != owned.committed:
                moved[number] = owned.committed = mark
        return moved
