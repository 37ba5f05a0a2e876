"""The `groups` topic as the trainer reads it, and the limit on dropped groups between two steps.

Headers decide; complete, checked payloads wait for their turn. The first complete record of a group counts; an unusable one becomes a
dead letter, a repeated one is a duplicate.
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.learner.training_samples import untrainable
from penstock.pipeline.rewards.group_outcome import UNTRAINED
from penstock.pipeline.scheduling.reward_scale import HIGH, RewardScale
from penstock.pipeline.scheduling.schedule import Schedule
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics import groups
from penstock.topics.groups import Group, GroupAssembler
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

NEWEST: Final = 8
"""Dropped groups whose records are retained, for their reasons."""


@dataclass(slots=True, kw_only=True)
class GroupInbox:
    """Outcomes in order of arrival, and the payloads of those that may be trained."""

    run: str
    schedule: Schedule
    dead_letter: Callable[[Record, Unusable], None]
    duplicate: Callable[[str], None]
    decoding: Callable[[Record], AbstractContextManager[object]] = nullcontext
    """The block in which a payload is decoded; raises `Unusable` of kind "killer" for a poison record."""
    vocabulary: int | None = None
    """Size of the model's vocabulary; None if unknown."""
    selector: Selector = field(init=False)
    drop_causes: Counter[str] = field(default_factory=Counter)
    """Since the last step: number of dropped groups by cause, for the error that stops a run which drops too many."""
    filtered_rewards: list[float] = field(default_factory=list)
    """Mean reward of each group filtered since the last step."""
    scale: RewardScale = field(default_factory=RewardScale)
    _dropped: deque[list[Record]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """The records of the newest groups that a scorer dropped."""
    ended_before: int = 0
    """Groups with a lower number had ended when this trainer started, and are skipped."""
    _groups: dict[int, Group] = field(default_factory=dict)
    _assembler: GroupAssembler = field(default_factory=GroupAssembler)

    def __post_init__(self) -> None:
        self.selector = Selector(self.schedule)

    def receive(self, record: Record) -> None:
        """Apply a record of `groups`; a group counts once all its parts have arrived and its digest matches."""
        try:
            headers = groups.check(record, run=self.run)
            assert headers.group is not None and headers.outcome is not None
            if headers.group < self.ended_before:
                return
            if self.selector.knows(headers.group):
                self.duplicate(f"group {headers.group} at {record.topic}/{record.partition}/{record.offset}")
                return
            records = self._assembler.add(record, headers)
            if records is None:
                return
            group = self._decode(records, headers)
        except Unusable as error:
            self.dead_letter(record, error)
            if error.kind == "killer":  # its headers were checked: the group is in the log, and cannot be trained
                self.selector.refuse(_candidate(record, headers))
            return
        self.selector.add(_candidate(records[0], headers))
        mean = headers.reward_mean
        self.scale.see(() if mean is None else (mean,))
        if headers.outcome != "scored":
            lacking = groups.lacks_rewards(headers.samples, headers.no_reward)
            cause = " for lack of rewards" if lacking else "" if mean is None else f" at reward {mean:.3g}"
            self.drop_causes[headers.outcome + cause] += 1
            self.filtered_rewards += [mean] if headers.outcome == "filtered" and mean is not None and not lacking else []
            self._dropped.append(records)
        elif group is not None and not self.selector.is_settled(group.group):
            self.scale.see(group.rewards)
            self._groups[group.group] = group

    def take(self, *, learner_version: int) -> tuple[Candidate, Group] | None:
        """The next group of the plan, or None until it arrives."""
        candidate = self.selector.take(learner_version=learner_version)
        for stale in self.selector.newly_stale:
            self._groups.pop(stale.group, None)
        return None if candidate is None else (candidate, self._groups.pop(candidate.group))

    def newest_reasons(self) -> list[str]:
        """Reasons of the newest groups that a scorer dropped, from their payloads; unreadable ones are skipped."""
        return [reason for records in self._dropped if (reason := self._reason(records))]

    def _reason(self, records: list[Record]) -> str | None:
        try:
            with self.decoding(records[-1]):
                return groups.read(records, run=self.run)[1].reason
        except Unusable:
            return None

    def forget_drops(self) -> None:
        """Forget the causes of drops."""
        self.drop_causes.clear()
        self.filtered_rewards.clear()

    def start_over(self) -> None:
        """Forget everything: the groups are read from their beginning."""
        self.selector, self._assembler, self.ended_before = Selector(self.schedule), GroupAssembler(), 0
        self._groups.clear()
        self.forget_drops()

    def restart_offsets(self) -> dict[int, int]:
        """Partition -> first offset that a restarted trainer must read, of partitions with such records."""
        waiting = [*self.selector.locations.values(), *((part.partition, part.offset) for part in self._assembler.held())]
        return {partition: min(offset for p, offset in waiting if p == partition) for partition in {p for p, _ in waiting}}

    def _decode(self, records: list[Record], headers: Headers) -> Group | None:
        if headers.outcome != "scored" or self.selector.is_settled(headers.group or 0):
            return None  # not trained, or not again: its headers are enough
        with self.decoding(records[-1]):
            group = groups.read(records, run=self.run)[1]
        if problem := untrainable(group, vocabulary=self.vocabulary):
            raise Unusable(f"group {group.group} cannot be trained: {problem}", kind="killer")
        return group


def _candidate(first: Record, headers: Headers) -> Candidate:
    assert headers.group is not None and headers.outcome is not None
    return Candidate(
        group=headers.group,
        outcome=headers.outcome,
        policy_version_min=headers.policy_version_min or 0,
        partition=first.partition,
        offset=first.offset,
        parts=headers.parts or 1,
        sha256=headers.sha256 or "",
    )


SHOWN_CAUSES = 6
CONSTANT = (
    "every reward is {:.6g} before the first step: the reward function gives every completion the same, or the policy solves all prompts "
    "or none; compare two completions and their rewards with `penstock check CONFIG`"
)


@dataclass(frozen=True, slots=True)
class Passed:
    """The end of a run that has exceeded the limit."""

    reason: str
    solved: bool
    """True if the groups were dropped because all their samples have (nearly) the full reward."""


@dataclass(slots=True)
class DropLimit:
    """Counts the groups dropped since the last step.

    Drops from before this process do not count: the operator who resumed the run has dealt with their cause.
    """

    inbox: GroupInbox
    at_last_step: int = 0
    """Dropped groups when the last step was committed."""
    tolerated: int = 0
    """Dropped groups when this process had read the existing records."""

    @property
    def since_last_step(self) -> int:
        """Groups dropped since the last step was committed."""
        return self.inbox.selector.drops - self.at_last_step

    def tolerate(self) -> None:
        """Ignore all drops so far."""
        self.tolerated = self.inbox.selector.drops
        self.inbox.forget_drops()

    def committed(self) -> None:
        """A step was committed: restart the count."""
        self.at_last_step = self.inbox.selector.drops
        self.inbox.forget_drops()

    def passed(self, *, steps_done: int) -> Passed | None:
        """The end of the run; None while no more than the limit were dropped."""
        limit = self.inbox.schedule.max_drops_per_step
        dropped = self.inbox.selector.drops - max(self.at_last_step, self.tolerated)
        if dropped <= limit:
            return None
        since = f"since step {steps_done - 1}" if steps_done else "before step 0"
        when = "since the trainer was started" if self.tolerated > self.at_last_step else since
        equal, scale = self._equal(), self.inbox.scale
        mostly_equal = 2 * len(equal) > dropped
        position = scale.position(fmean(equal)) if mostly_equal else None
        if steps_done and position is not None and position >= HIGH:
            counted = f"{len(equal)} of {dropped} groups dropped {when} have equal rewards, {fmean(equal):.3g} on average"
            text = f"solved: {counted}; the full reward is {scale.high:.3g}, so nothing is left to learn from these prompts"
            return Passed(text, solved=True)
        text = f"{dropped} groups were dropped {when} (schedule.max_drops_per_step = {limit})"
        return Passed(text + self._causes(dropped, steps_done=steps_done), solved=False)

    def without_a_step(self, *, requested: int) -> str:
        """The reason of a run that has used all its prompts without a step."""
        dropped, size = self.inbox.selector.drops, self.inbox.schedule.prompts_per_step
        text = f"all {requested} prompts of the run's epochs were used before the first step, which takes {size}"
        return f"{text} groups with different rewards; {dropped} groups were dropped" + self._causes(dropped, steps_done=0)

    def _causes(self, dropped: int, *, steps_done: int) -> str:
        """The causes of the drops, and advice if most groups had equal rewards."""
        causes = ", ".join(f"{count} {cause}" for cause, count in self.inbox.drop_causes.most_common(SHOWN_CAUSES) if count)
        reasons, equal = self.inbox.newest_reasons(), self._equal()
        text = (f": {causes}" if causes else "") + (f"; the last one: {reasons[-1]}" if reasons else "")
        return text + (self._advice(equal, steps_done=steps_done) if 2 * len(equal) > dropped else "")

    def _equal(self) -> list[float]:
        """Mean rewards of the groups filtered for equal rewards; none if most of the newest were filtered for lack of trained tokens."""
        reasons = self.inbox.newest_reasons()
        return [] if 2 * reasons.count(UNTRAINED) > len(reasons) else self.inbox.filtered_rewards

    def _advice(self, equal: list[float], *, steps_done: int) -> str:
        scale, mean, selector = self.inbox.scale, fmean(equal), self.inbox.selector
        if not steps_done and selector.finished_groups == selector.drops and zero_variance(equal):
            return f"; {CONSTANT.format(mean)}"
        span = f"{mean:.3g} on average in a range of {scale.low:.3g} to {scale.high:.3g}"
        return f"; groups of equal rewards have no advantage ({span}): {scale.advice(mean)}"
