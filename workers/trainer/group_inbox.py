"""The `groups` topic as the trainer reads it: headers decide, whole and checked payloads wait for their turn.

The rule: the first whole record of a group counts; a record that cannot be used is a dead letter, one that repeats is a duplicate.
"""

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from penstock.pipeline.learner.training_samples import untrainable
from penstock.pipeline.scheduling.reward_scale import RewardScale
from penstock.pipeline.scheduling.schedule import Schedule
from penstock.pipeline.scheduling.step_selector import Candidate, Selector
from penstock.topics import groups
from penstock.topics.groups import Group, GroupAssembler
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

NEWEST: Final = 8
"""Dropped groups whose records are kept, for their reasons."""


@dataclass(slots=True, kw_only=True)
class GroupInbox:
    """Outcomes in order of arrival, and the payloads of those that may be trained."""

    run: str
    schedule: Schedule
    dead_letter: Callable[[Record, Unusable], None]
    duplicate: Callable[[str], None]
    decoding: Callable[[Record], AbstractContextManager[object]] = nullcontext
    """The block in which a payload is decoded; raises `Unusable` of kind "killer" for one that must not be."""
    vocabulary: int | None = None
    """Tokens of the model; None if they are not known."""
    selector: Selector = field(init=False)
    drop_causes: Counter[str] = field(default_factory=Counter)
    """Since the last step: how many groups were dropped for which cause, for the error that stops a run which drops too many."""
    filtered_rewards: list[float] = field(default_factory=list)
    """Mean reward of each group filtered since the last step."""
    scale: RewardScale = field(default_factory=RewardScale)
    _dropped: deque[list[Record]] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """The records of the newest groups that a scorer dropped."""
    ended_before: int = 0
    """Groups with a lower number had ended when this trainer began, and are passed over."""
    _groups: dict[int, Group] = field(default_factory=dict)
    _assembler: GroupAssembler = field(default_factory=GroupAssembler)

    def __post_init__(self) -> None:
        self.selector = Selector(self.schedule)

    def receive(self, record: Record) -> None:
        """Take in a record of `groups`; a group counts once all its parts are here and its digest fits."""
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
            if error.kind == "killer":  # its headers were checked: the group is in the log, and nobody can train it
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
        """The next group of the plan, or None while it is not here."""
        candidate = self.selector.take(learner_version=learner_version)
        for stale in self.selector.newly_stale:
            self._groups.pop(stale.group, None)
        return None if candidate is None else (candidate, self._groups.pop(candidate.group))

    def newest_reasons(self) -> list[str]:
        """Why the newest groups that a scorer dropped were dropped, from their payloads; unreadable ones are left out."""
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

    def begins(self) -> dict[int, int]:
        """Partition -> offset of the first record that a trainer which starts where this one stands has to read; of those with any."""
        held = [*self.selector.locations.values(), *((part.partition, part.offset) for part in self._assembler.held())]
        return {partition: min(offset for at, offset in held if at == partition) for partition in {at for at, _ in held}}

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
