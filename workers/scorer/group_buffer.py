"""A scorer's groups: which samples are here, which groups are complete, what may be committed.

The rule: a sample counts once per (group, sample), a group ends once, and offsets are committed below the oldest unfinished group, so
that a new owner needs nothing but the log. A note beside the offset says where in `groups` it begins to read: a restart costs the same
however long the run has lasted.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.pipeline.runtime import offset_metadata
from penstock.pipeline.runtime.offset_metadata import ScorerOffsetMetadata
from penstock.pipeline.scheduling.id_set import IdSet
from penstock.topics.prompts import Prompt
from penstock.topics.samples import Rollout
from penstock.topics.wire.record import Record

ORPHAN_AFTER_S = 30.0
"""After this much working time without its prompt a sample is checked against the log, in which a prompt is always before its samples."""


@dataclass(slots=True)
class OpenGroup:
    """A group that has no outcome yet."""

    group: int
    prompt: Prompt | None = None
    prompt_record: Record | None = None
    samples: dict[int, Rollout] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    seen_s: float = 0.0
    """The owner's working time when the group was first seen, or last checked."""
    begun_s: float = 0.0
    """`PartitionGroups.drawing_s` when the group was first seen."""
    submitted: bool = False

    @property
    def complete(self) -> bool:
        """Whether the prompt and all its samples are here."""
        return self.prompt is not None and len(self.samples) == self.prompt.samples_per_prompt

    @property
    def aborted(self) -> int:
        """How many of its samples were ended early, because the group could no longer be fresh."""
        return sum(sample.finish == "abort" for sample in self.samples.values())

    def ordered(self) -> list[Rollout]:
        """Its samples by number."""
        return [self.samples[number] for number in sorted(self.samples)]


@dataclass(slots=True)
class PartitionGroups:
    """One owned partition: prompts p and rollouts p in, groups p out."""

    partition: int
    finished: IdSet = field(default_factory=IdSet)
    """Groups whose outcome is in `groups`, of those that this owner knows of."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    prompts_position: int = 0
    rollouts_position: int = 0
    groups_position: int = 0
    """Where `groups` ends as far as this owner knows."""
    below: int = 0
    """Groups below this number ended before the partition was assigned, if the numbers of its prompts rise, as the feeder writes them."""
    newest: int = -1
    """The highest number of a prompt so far."""
    rising: bool = True
    """False once a prompt came out of order: then only the whole of `groups` tells which groups have ended."""
    cut: bool = False
    """Whether its first prompts were deleted, and no note says which groups had ended."""
    drawing_s: float = 0.0
    """Seconds in which a rollout worker was there for the partition; a group's deadline counts only these."""
    outcomes: dict[int, int] = field(default_factory=dict)
    """Group -> offset of its outcome, of the finished groups above the oldest unfinished one."""

    def begin(self, *, prompts: int, metadata: str) -> None:
        """Start at the previous owner's committed offset in `prompts`, with its note; without one all of `groups` is read."""
        note = offset_metadata.decode(ScorerOffsetMetadata, metadata) or ScorerOffsetMetadata(below=0, groups=0)
        self.prompts_position = prompts
        self.below, self.groups_position = note.below, note.groups
        self.newest = self.below - 1

    def note(self, *, without: Collection[int] = ()) -> str:
        """What a new owner has to know beside the offset in `prompts`, once the groups in `without` have ended."""
        if not self.rising:
            return ""
        below = min((group.group for group in self._unfinished(without) if group.prompt), default=self.newest + 1)
        self.outcomes = {group: at for group, at in self.outcomes.items() if group >= below}
        return offset_metadata.encode(ScorerOffsetMetadata(below=below, groups=min(self.outcomes.values(), default=self.groups_position)))

    def out_of_order(self, group: int) -> bool:
        """Whether a prompt's number shows that `below` cannot be trusted; then all of `groups` has to be read."""
        return self.rising and group <= self.newest and group not in self.finished and not (group in self.open and self.open[group].prompt)

    def distrust(self) -> None:
        """Read `groups` from its beginning, now and after every later assignment."""
        self.rising, self.below, self.groups_position = False, 0, 0

    def add_prompt(self, record: Record, prompt: Prompt, *, now_s: float) -> bool:
        """Add a prompt; False when it is a duplicate or its group has ended."""
        if self.cut and self.newest < 0:
            self.below = prompt.group  # a prompt is deleted only once its group and all before it have ended
        self.prompts_position = record.offset + 1
        self.newest = max(self.newest, prompt.group)
        if prompt.group in self.finished:
            return False
        group = self._group(prompt.group, now_s)
        if group.prompt is not None:
            return False
        group.prompt, group.prompt_record = prompt, record
        return True

    def has(self, group: int, sample: int) -> bool:
        """Whether this sample is here already, or too late to matter."""
        return group in self.finished or (group in self.open and sample in self.open[group].samples)

    def missing(self, group: int, *, samples: int) -> int:
        """How many of so many samples are not here yet: under over-sampling the first in the log are the group's."""
        return max(0, samples - len(self.open[group].samples)) if group in self.open else samples

    def add_sample(self, record: Record, rollout: Rollout, *, now_s: float) -> None:
        """Add a sample for which `has` is False."""
        group = self._group(rollout.group, now_s)
        group.samples[rollout.sample] = rollout
        group.records[rollout.sample] = record

    def finish(self, group: int, *, offset: int) -> None:
        """Note that a group's outcome is in the log."""
        self.finished.add(group)
        self.open.pop(group, None)
        self.outcomes.setdefault(group, offset)
        self.groups_position = max(self.groups_position, offset + 1)

    def offsets(self, *, without: Collection[int] = ()) -> tuple[int, int]:
        """Where a new owner begins in `prompts` and in `rollouts`, once the groups in `without` have ended."""
        unfinished = self._unfinished(without)
        prompts = min((group.prompt_record.offset for group in unfinished if group.prompt_record), default=self.prompts_position)
        rollouts = min((record.offset for group in unfinished for record in group.records.values()), default=self.rollouts_position)
        return prompts, rollouts

    def overdue(self, *, deadline_s: float) -> list[OpenGroup]:
        """Groups with a prompt that are still incomplete after the deadline, in time that was there to draw them."""
        begun_by = self.drawing_s - deadline_s
        return [group for group in self.open.values() if group.prompt and not group.submitted and group.begun_s < begun_by]

    def orphans(self, *, now_s: float) -> list[OpenGroup]:
        """Groups with samples and no prompt for long: it is late, does not exist, or the group had ended before (`below`)."""
        return [group for group in self.open.values() if group.prompt is None and now_s - group.seen_s > ORPHAN_AFTER_S]

    def _unfinished(self, without: Collection[int]) -> list[OpenGroup]:
        return [group for number, group in self.open.items() if number not in without]

    def _group(self, group: int, now_s: float) -> OpenGroup:
        if group not in self.open:
            self.open[group] = OpenGroup(group, seen_s=now_s, begun_s=self.drawing_s)
        return self.open[group]
