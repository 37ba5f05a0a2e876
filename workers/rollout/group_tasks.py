"""A rollout worker's prompts: what is waiting, what is in hand, what may be committed.

The rule: a partition's committed offset is the contiguous low watermark of prompts whose samples are all acknowledged; the commit's
metadata says where in `rollouts` the samples of the prompts above it begin.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.pipeline.scheduling.id_set import Numbers
from penstock.topics.prompts import Prompt
from penstock.topics.wire.record import Record


@dataclass(slots=True)
class Work:
    """One prompt, and how far this worker is with it."""

    partition: int
    offset: int
    group: int
    min_version: int
    prompt: Prompt
    inherited: bool = False
    """Whether it stood in the log when its partition was assigned: an earlier owner may have it in hand still."""
    started: bool = False
    done: bool = False


@dataclass(slots=True)
class PartitionQueue:
    """One owned partition of `prompts`."""

    partition: int
    position: int = 0
    """Offset after the last prompt that was delivered."""
    inherited_end: int = 0
    """Where `prompts` ended when the partition was assigned."""
    rollouts_end: int = 0
    """Where `rollouts` ends as far as this worker knows every record of it."""
    gap: bool = False
    """Whether somebody else wrote there since."""
    known: dict[int, dict[int, int]] = field(default_factory=dict)
    """Group -> sample -> its offset in `rollouts`, acknowledged by whichever worker."""
    work: dict[int, Work] = field(default_factory=dict)
    """Offset in `prompts` -> work that is above the watermark, in order."""
    by_group: dict[int, Work] = field(default_factory=dict)
    """The same work by group."""
    newest: int = -1
    """The highest group number that was delivered: the feeder's numbers rise, so samples of higher ones belong to prompts to come."""
    committed: tuple[int, str] | None = None

    def watermark(self) -> tuple[int, str] | None:
        """What to commit: (offset, metadata), or None when nothing moved since the last commit."""
        for offset, work in list(self.work.items()):
            if not work.done:
                break
            del self.work[offset], self.by_group[work.group]
        self.known = {group: samples for group, samples in self.known.items() if group in self.by_group or group > self.newest}
        first = min((at for samples in self.known.values() for at in samples.values()), default=self.rollouts_end)
        found = (next(iter(self.work), self.position), json.dumps({"rollouts": first}))
        if found == self.committed:
            return None
        self.committed = found
        return found


def rollouts_start(metadata: str) -> int:
    """Where to start reading `rollouts`, from a commit's metadata; 0 where it says nothing."""
    try:
        start = json.loads(metadata).get("rollouts", 0) if metadata else 0
    except (ValueError, AttributeError):
        return 0
    return start if isinstance(start, int) and start >= 0 else 0


@dataclass(slots=True)
class PromptQueue:
    """All partitions a worker owns now."""

    oversample: int = 0
    """r: samples begun beyond those a group needs."""
    partitions: dict[int, PartitionQueue] = field(default_factory=dict)
    _seen: Numbers = field(default_factory=Numbers)
    """Groups whose prompt was delivered since the partitions were assigned."""

    def assign(self, partition: int, *, offset: int, inherited_end: int, rollouts_end: int) -> None:
        """Begin with a partition at its committed offset."""
        self.partitions[partition] = PartitionQueue(partition, offset, inherited_end, rollouts_end)

    def revoke(self) -> None:
        """Forget everything: whatever stays comes again with the next assignment."""
        self.partitions.clear()
        self._seen = Numbers()

    def add(self, record: Record, prompt: Prompt) -> bool:
        """Queue a prompt; False when its group is known already (a duplicate)."""
        queue = self.partitions.get(record.partition)
        if queue is None:
            return True
        queue.position = max(queue.position, record.offset + 1)
        queue.newest = max(queue.newest, prompt.group)
        if prompt.group in self._seen:
            return False
        self._seen.add(prompt.group)
        inherited = record.offset < queue.inherited_end
        work = Work(record.partition, record.offset, prompt.group, prompt.min_version, prompt, inherited)
        queue.work[record.offset] = queue.by_group[work.group] = work
        return True

    def skip(self, record: Record) -> None:
        """Note a record nobody can use, so that the watermark passes it."""
        queue = self.partitions.get(record.partition)
        if queue is not None:
            queue.position = max(queue.position, record.offset + 1)

    def waiting(self) -> list[Work]:
        """Prompts that were not started, in no particular order."""
        return [work for queue in self.partitions.values() for work in queue.work.values() if not work.started and not work.done]

    def wanted(self, work: Work) -> int:
        """How many samples a prompt still needs."""
        return max(0, work.prompt.samples_per_prompt - len(self.known(work.partition, work.group)))

    def missing(self, work: Work) -> list[int]:
        """Samples of a prompt that may be drawn: those that nobody has published, while it needs any."""
        known = self.known(work.partition, work.group)
        begun = range(work.prompt.samples_per_prompt + self.oversample)
        return [sample for sample in begun if sample not in known] if self.wanted(work) else []

    def known(self, partition: int, group: int) -> Collection[int]:
        """Samples of a group that stand in the log, as far as is known here."""
        queue = self.partitions.get(partition)
        return queue.known.get(group, {}) if queue else ()

    def exists(self, partition: int, group: int, sample: int, offset: int) -> None:
        """Note a sample that stands in the log."""
        queue = self.partitions.get(partition)
        if queue is None:
            return
        queue.known.setdefault(group, {}).setdefault(sample, offset)
        work = queue.by_group.get(group)
        if work is not None and not self.missing(work):
            work.done = True

    def acknowledged(self, partition: int, group: int, sample: int, offset: int) -> None:
        """Note a sample of this worker that stands in the log now; `gap` tells when it does not follow what is known of `rollouts`."""
        self.exists(partition, group, sample, offset)
        queue = self.partitions.get(partition)
        if queue is not None and offset >= queue.rollouts_end:
            queue.gap = queue.gap or offset > queue.rollouts_end
            queue.rollouts_end += not queue.gap

    def looked(self, partition: int, end: int) -> None:
        """Note that all samples before `end` are known."""
        queue = self.partitions[partition]
        queue.rollouts_end, queue.gap = max(queue.rollouts_end, end), False
