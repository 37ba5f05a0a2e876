"""A rollout worker's prompts: what is waiting, what is in hand, what may be committed.

The rule: a partition's committed offset is the contiguous low watermark of prompts whose samples are all acknowledged; the commit's
metadata says where in `rollouts` the samples of the prompts above it begin.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from topics.prompts import Prompt
from topics.record import Record


@dataclass(slots=True)
class Work:
    """One prompt and the samples of it that are acknowledged."""

    partition: int
    group: int
    min_version: int
    prompt: Prompt
    started: bool = False
    done: bool = False


@dataclass(slots=True)
class PartitionQueue:
    """One owned partition of `prompts`."""

    partition: int
    known: dict[int, dict[int, int]] = field(default_factory=dict)
    """Group -> sample -> its offset in `rollouts`, acknowledged by whichever worker."""
    rollouts_end: int = 0
    """Where `rollouts` ended as far as this worker knows."""
    work: dict[int, Work] = field(default_factory=dict)
    """Offset in `prompts` -> work, in order."""
    position: int = 0
    """Offset after the last prompt that was delivered."""
    committed: tuple[int, str] | None = None

    def watermark(self) -> tuple[int, str] | None:
        """What to commit: (offset, metadata), or None when nothing moved since the last commit."""
        for offset in [offset for offset, work in self.work.items() if work.done]:
            if all(other.done for before, other in self.work.items() if before < offset):
                self.known.pop(self.work[offset].group, None)
                del self.work[offset]
            else:
                break
        offset = min(self.work, default=self.position)
        open_groups = {work.group for work in self.work.values()}
        first = min(
            (at for group, samples in self.known.items() if group in open_groups for at in samples.values()), default=self.rollouts_end
        )
        found = (offset, json.dumps({"rollouts": first}))
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

    partitions: dict[int, PartitionQueue] = field(default_factory=dict)
    _where: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Group -> (partition, offset) of the first prompt record seen for it."""

    def assign(self, partitions: Mapping[int, int], samples: Iterable[tuple[int, int, int, int]], ends: Mapping[int, int]) -> None:
        """Begin with partitions (-> committed offset); `samples` are (partition, group, sample, offset) found in `rollouts`."""
        for partition, offset in partitions.items():
            self.partitions[partition] = PartitionQueue(partition, position=offset, rollouts_end=ends.get(partition, 0))
        for partition, group, sample, offset in samples:
            self.partitions[partition].known.setdefault(group, {}).setdefault(sample, offset)

    def revoke(self, partitions: Iterable[int]) -> None:
        """Forget partitions that another worker may own from now on."""
        for partition in partitions:
            gone = self.partitions.pop(partition, None)
            for work in gone.work.values() if gone else ():
                self._where.pop(work.group, None)

    def add(self, record: Record, prompt: Prompt) -> bool:
        """Queue a prompt; False when its group is queued already (a duplicate)."""
        queue = self.partitions.get(record.partition)
        if queue is None:
            return True
        queue.position = max(queue.position, record.offset + 1)
        duplicate = prompt.group in self._where
        queue.work[record.offset] = Work(record.partition, prompt.group, prompt.min_version, prompt, done=duplicate)
        if not duplicate:
            self._where[prompt.group] = (record.partition, record.offset)
        return not duplicate

    def skip(self, record: Record) -> None:
        """Note a record nobody can use, so that the watermark passes it."""
        queue = self.partitions.get(record.partition)
        if queue is not None:
            queue.position = max(queue.position, record.offset + 1)

    def waiting(self) -> list[Work]:
        """Prompts that were not started, in no particular order."""
        return [work for queue in self.partitions.values() for work in queue.work.values() if not work.started and not work.done]

    def missing(self, work: Work) -> list[int]:
        """Samples of a prompt that nobody has published yet."""
        queue = self.partitions.get(work.partition)
        known = queue.known.get(work.group, {}) if queue else {}
        return [sample for sample in range(work.prompt.samples_per_prompt) if sample not in known]

    def acknowledged(self, *, partition: int, group: int, sample: int, offset: int) -> None:
        """Note a sample that stands in the log."""
        queue = self.partitions.get(partition)
        if queue is None:
            return
        queue.rollouts_end = max(queue.rollouts_end, offset + 1)
        where = self._where.get(group)
        if where is None or where[0] != partition:
            return
        queue.known.setdefault(group, {}).setdefault(sample, offset)
        work = queue.work.get(where[1])
        if work is not None and not self.missing(work):
            work.done = True
