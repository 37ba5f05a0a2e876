"""A rollout worker's groups: the samples each still needs, and the prompts that may be committed.

A group needs K samples and is started as K + r; the first K that end are its samples. A partition's committed offset is the contiguous
low watermark of prompts whose samples are all acknowledged; the offset metadata tell where in `rollouts` the samples of later prompts
start.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.infra.engines.base import Completion
from penstock.infra.log import Log, Partition, Pending, Start, Tail, read_to_current_end
from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import RolloutOffsetMetadata
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics import rollouts
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import cause_of
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


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
        """Follow exactly these partitions of `rollouts`, each from its start offset or the first retained record; return their samples."""
        self.close()
        if starts:
            first_offsets = self._log.beginning_offsets((self._topic, partition) for partition in starts)
            first: dict[Partition, Start] = {at: max(first, starts[at[1]]) for at, first in first_offsets.items()}
            self._tail = self._log.tail(first)
        return self.read_new()

    def read_new(self) -> list[Published]:
        """Samples that were written since the last read. Raises `LogError` if they cannot be read."""
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
        assert self._tail is not None
        return self._tail.position((self._topic, partition))

    def skip(self, partition: int, offset: int) -> None:
        """Continue in a partition at this offset, because the samples before it are this worker's own."""
        assert self._tail is not None
        self._tail.seek((self._topic, partition), offset)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None


@dataclass(slots=True)
class GroupTask:
    """A group to be generated: its prompt and the state of each sample."""

    prompt: Prompt
    partition: int
    offset: int
    """Offset of the prompt."""
    inherited: bool = False
    """True if the prompt was in the log when its partition was assigned: an earlier owner may still generate its samples."""
    started: bool = False
    """True once its samples were submitted to the engine."""
    finished: bool = False
    """True once this worker has nothing left to do for it."""
    generating: set[int] = field(default_factory=set)
    """Samples that the engine has not returned."""
    completed: dict[int, Completion] = field(default_factory=dict)
    """Samples that the engine returned and that are not sent."""
    broken: dict[int, Completion] = field(default_factory=dict)
    """Samples whose environment broke: published only if the group cannot get enough others."""
    sent: dict[int, Pending] = field(default_factory=dict)
    """Samples that are sent and not acknowledged, each with its record."""
    published: dict[int, int] = field(default_factory=dict)
    """Sample -> its offset in `rollouts`, acknowledged, from any worker."""

    @property
    def group(self) -> int:
        return self.prompt.group

    @property
    def needed(self) -> int:
        """Number of samples that are still to be generated."""
        return max(0, self.prompt.samples_per_prompt - len(self.published.keys() | self.sent.keys() | self.completed.keys()))

    @property
    def done(self) -> bool:
        """True if all samples of the group are acknowledged, whichever worker wrote them."""
        return len(self.published) >= self.prompt.samples_per_prompt

    def to_generate(self, *, oversample: int) -> list[int]:
        """Numbers of the samples to submit: those of K + r that are not in the log; none if the group has K."""
        started = range(self.prompt.samples_per_prompt + oversample)
        return [sample for sample in started if sample not in self.published] if self.needed else []

    def start(self, samples: list[int]) -> None:
        self.started, self.generating = True, set(samples)

    def take(self, completion: Completion) -> None:
        """Store a sample that the engine returned, if still needed; one with a broken environment only once no other is to come."""
        if completion.sample in self.generating:
            self.generating.discard(completion.sample)
            if self.needed and completion.sample not in self.published:
                (self.broken if cause_of(getattr(completion, "turns", None)) else self.completed)[completion.sample] = completion
        for sample in sorted(self.broken)[: self.needed if not self.generating else 0]:
            self.completed[sample] = self.broken.pop(sample)

    def send(self, samples: Iterable[int], pending: Pending) -> None:
        """Record that these completed samples are being sent in one record."""
        for sample in samples:
            del self.completed[sample]
            self.sent[sample] = pending

    def acknowledge(self) -> Iterator[tuple[int, int]]:
        """Yield (sample, offset) of each sent sample that was acknowledged since the last call. Raises `LogError` if sending one failed."""
        for sample, pending in list(self.sent.items()):
            if pending.done():
                del self.sent[sample]
                yield sample, pending.offset(0.0)

    def note(self, sample: int, offset: int) -> None:
        """Record that a sample is at this offset of `rollouts`, so that completed samples beyond K are dropped, the highest first."""
        self.published.setdefault(sample, offset)
        self.completed.pop(sample, None)
        surplus = len(self.published.keys() | self.sent.keys()) + len(self.completed) - self.prompt.samples_per_prompt
        for highest in sorted(self.completed, reverse=True)[: max(0, surplus)]:
            del self.completed[highest]


@dataclass(slots=True)
class OwnedPartition:
    """An owned partition of `prompts`, with the partition of `rollouts` of the same number."""

    position: int = 0
    """Offset after the last prompt that was delivered."""
    inherited_end: int = 0
    """End offset of `prompts` when the partition was assigned."""
    rollouts_end: int = 0
    """All samples before this offset in `rollouts` were read or sent."""
    gap: bool = False
    """True if another process has written to `rollouts` after `rollouts_end`."""
    early: dict[int, dict[int, int]] = field(default_factory=dict)
    """Group -> sample -> offset, of samples whose prompt is not delivered yet."""
    newest: int = -1
    """The highest group number delivered: the feeder's numbers rise, so samples of higher ones belong to prompts to come."""
    committed: tuple[int, str] | None = None


@dataclass(slots=True)
class GroupTasks:
    """The groups in all partitions that a worker owns.

    Started groups survive a rebalance: their generation continues, and `assign` drops those that are another worker's.
    """

    oversample: int = 0
    """r: samples started in addition to those a group needs."""
    partitions: dict[int, OwnedPartition] = field(default_factory=dict)
    tasks: dict[int, GroupTask] = field(default_factory=dict)
    """Group -> its task: those delivered and above the watermark, and those started."""
    _delivered: IdSet = field(default_factory=IdSet)
    """Groups whose prompt was delivered since the partitions were assigned."""

    def revoke(self) -> None:
        """Forget all partitions, and every group that has not started: if its partition stays with this worker, it is delivered again."""
        self.partitions.clear()
        self.tasks = {task.group: task for task in self.groups_in_flight()}
        self._delivered = IdSet()

    def assign(self, partition: int, *, offset: int, inherited_end: int, rollouts_end: int) -> None:
        self.partitions[partition] = OwnedPartition(position=offset, inherited_end=inherited_end, rollouts_end=rollouts_end)

    def add(self, record: Record, prompt: Prompt) -> bool:
        """Queue the prompt in a record, unless its partition is not owned; False if it repeats a group that was delivered before."""
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
            published = owned.early.pop(prompt.group, {})
            inherited = record.offset < owned.inherited_end
            self.tasks[prompt.group] = GroupTask(prompt, record.partition, record.offset, inherited=inherited, published=published)
        return True

    def skip(self, record: Record) -> None:
        """Skip a record that is not a usable prompt, so that the watermark can move past it."""
        owned = self.partitions.get(record.partition)
        if owned is not None:
            owned.position = max(owned.position, record.offset + 1)

    def waiting(self) -> list[GroupTask]:
        return [task for task in self.tasks.values() if not task.started and not task.done]

    def groups_in_flight(self) -> list[GroupTask]:
        return [task for task in self.tasks.values() if task.started and not task.finished]

    def note(self, partition: int, group: int, sample: int, offset: int) -> None:
        """Record that a sample is in the log, from any worker."""
        owned, task = self.partitions.get(partition), self.tasks.get(group)
        if task is not None and task.partition == partition:
            task.note(sample, offset)
        elif owned is not None and group > owned.newest:
            owned.early.setdefault(group, {}).setdefault(sample, offset)

    def acknowledge(self) -> int:
        """Record which sent samples the log has acknowledged; return the number of groups that are finished thereby.

        A gap in the acknowledged offsets of a partition means that another process has written there.
        """
        finished = 0
        for task in self.groups_in_flight():
            for sample, offset in task.acknowledge():
                task.note(sample, offset)
                owned = self.partitions.get(task.partition)
                if owned is not None and offset >= owned.rollouts_end:
                    owned.gap = owned.gap or offset > owned.rollouts_end
                    owned.rollouts_end += not owned.gap
            task.finished = task.done and not (task.generating or task.completed or task.sent)
            finished += task.finished
        return finished

    def caught_up(self, partition: int, end: int) -> None:
        """Record that all samples before `end` of a partition of `rollouts` were read."""
        owned = self.partitions[partition]
        owned.rollouts_end, owned.gap = max(owned.rollouts_end, end), False

    def watermarks(self) -> dict[int, tuple[int, str]]:
        """Partition of `prompts` -> (offset, metadata) to commit, for those where either has changed since the last call.

        The offset is that of the first prompt whose samples are not all acknowledged; done groups before it are forgotten.
        """
        moved = {}
        for number, owned in self.partitions.items():
            tasks = [task for task in self.tasks.values() if task.partition == number]
            offset = min((task.offset for task in tasks if task.offset < owned.position and not task.done), default=owned.position)
            for task in tasks:
                if task.done and task.offset < offset:
                    del self.tasks[task.group]
            owned.early = {group: samples for group, samples in owned.early.items() if group > owned.newest}
            offsets = [task.published for task in tasks if task.group in self.tasks] + list(owned.early.values())
            first = min((at for samples in offsets for at in samples.values()), default=owned.rollouts_end)
            commit = offset, offset_metadata.encode(RolloutOffsetMetadata(first))
            if commit != owned.committed:
                moved[number] = owned.committed = commit
        return moved
