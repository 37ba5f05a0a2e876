"""A scorer's groups: which samples are there, which groups are complete, what may be committed.

The rule: a sample counts once per (group, sample), a group ends once, and offsets are committed below the oldest unfinished group, so
that a new owner needs nothing but the log.
"""

import time
from dataclasses import dataclass, field

from topics.prompts import Prompt
from topics.record import Record
from topics.samples import Rollout

ORPHAN_AFTER_S = 30.0
"""Working time after which a sample without a prompt is nobody's: a prompt is always in the log before its samples."""


@dataclass(slots=True)
class OpenGroup:
    """A group that has no outcome yet."""

    group: int
    prompt: Prompt | None = None
    prompt_record: Record | None = None
    samples: dict[int, Rollout] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    seen_s: float = 0.0
    """The owner's working time when the group was first seen."""
    submitted: bool = False

    @property
    def complete(self) -> bool:
        """Whether the prompt and all its samples are there."""
        return self.prompt is not None and len(self.samples) == self.prompt.samples_per_prompt

    def ordered(self) -> list[Rollout]:
        """Its samples by number."""
        return [self.samples[number] for number in sorted(self.samples)]


@dataclass(slots=True)
class PartitionGroups:
    """One owned partition: prompts p and rollouts p in, groups p out."""

    partition: int
    finished: set[int] = field(default_factory=set)
    """Groups whose outcome stands in `groups`."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    prompts_position: int = 0
    rollouts_position: int = 0

    def add_prompt(self, record: Record, prompt: Prompt, *, now_s: float) -> bool:
        """Take a prompt; False when it is a duplicate or its group has ended."""
        self.prompts_position = record.offset + 1
        if prompt.group in self.finished:
            return False
        group = self._group(prompt.group, now_s)
        if group.prompt is not None:
            return False
        group.prompt, group.prompt_record = prompt, record
        return True

    def has(self, group: int, sample: int) -> bool:
        """Whether this sample is there already, or too late to matter."""
        return group in self.finished or (group in self.open and sample in self.open[group].samples)

    def add_sample(self, record: Record, rollout: Rollout, *, now_s: float) -> None:
        """Take a sample that `has` does not know yet."""
        group = self._group(rollout.group, now_s)
        group.samples[rollout.sample] = rollout
        group.records[rollout.sample] = record

    def finish(self, group: int) -> None:
        """Note that a group's outcome stands in the log."""
        self.finished.add(group)
        self.open.pop(group, None)

    def offsets(self) -> tuple[int, int]:
        """Where a new owner has to begin in `prompts` and in `rollouts`."""
        prompts = min((group.prompt_record.offset for group in self.open.values() if group.prompt_record), default=self.prompts_position)
        rollouts = min((record.offset for group in self.open.values() for record in group.records.values()), default=self.rollouts_position)
        return prompts, rollouts

    def overdue(self, *, now_s: float, deadline_s: float) -> list[OpenGroup]:
        """Groups with a prompt that are still incomplete after the deadline, in the owner's working time."""
        return [group for group in self.open.values() if group.prompt and not group.submitted and now_s - group.seen_s > deadline_s]

    def orphans(self, *, now_s: float) -> list[OpenGroup]:
        """Samples whose prompt does not exist."""
        return [group for group in self.open.values() if group.prompt is None and now_s - group.seen_s > ORPHAN_AFTER_S]

    def _group(self, group: int, now_s: float) -> OpenGroup:
        if group not in self.open:
            self.open[group] = OpenGroup(group, seen_s=now_s)
        return self.open[group]


@dataclass(slots=True)
class WorkingTime:
    """A clock that runs only while its owner works: an outage or a stopped process does not count.

    Each turn of a loop adds the time since the last one, up to `longest_turn_s`.
    """

    longest_turn_s: float = 1.0
    now_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def tick(self, *, working: bool = True) -> float:
        """Advance the clock and return it."""
        now = time.monotonic()
        if working:
            self.now_s += min(now - self._last, self.longest_turn_s)
        self._last = now
        return self.now_s
