"""Selects the groups of the next optimizer step.

Outcomes arrive in any order. Under `submission` order the selection depends only on group numbers and outcomes, so that two runs with the
same outcomes train the same steps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from penstock.pipeline.scheduling.rules import DROPPED, Schedule, is_fresh
from penstock.topics.ledger import Planned
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group's outcome, from its headers, and the location of its payload."""

    group: int
    outcome: str
    policy_version_min: int
    """Oldest version of its samples; 0 without samples."""
    partition: int
    offset: int
    """Offset of the first part."""
    sha256: str

    @classmethod
    def of(cls, first: Record, headers: Headers) -> Self:
        """Return a group from the record of its first part and the checked headers of any part."""
        assert headers.group is not None and headers.outcome is not None
        return cls(
            group=headers.group, outcome=headers.outcome, policy_version_min=headers.policy_version_min or 0, partition=first.partition,
            offset=first.offset, sha256=headers.sha256 or "",
        )  # fmt: skip

    @property
    def planned(self) -> Planned:
        """The group in the plan of a step."""
        return Planned(group=self.group, sha256=self.sha256, partition=self.partition, offset=self.offset)


@dataclass(slots=True)
class Selector:
    """Selects trainable groups one by one, in the schedule's order.

    `take` returns the next group of the current step, or None until its outcome has arrived. A group that is stale under `learner_version`
    is appended to `newly_stale`; the caller records it in the ledger.
    """

    schedule: Schedule
    next_number: int = 0
    """Submission order: the lowest number that was neither selected nor dropped."""
    below: int = 0
    """Every group with a lower number has ended, and its outcome is discarded."""
    drops: int = 0
    """Number of distinct dropped groups, stale ones included."""
    outcomes: dict[int, str] = field(default_factory=dict)
    """Group -> first outcome, from `below` on."""
    settled: set[int] = field(default_factory=set)
    """Selected or stale groups, from `below` on."""
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Group -> partition and offset of its outcome."""
    newly_stale: list[Candidate] = field(default_factory=list)
    _waiting: dict[int, Candidate] = field(default_factory=dict)
    _arrived: deque[int] = field(default_factory=deque)

    def add(self, candidate: Candidate) -> bool:
        """Record a group's outcome: a scored group becomes selectable, any other counts as dropped. False if the group was added before."""
        if self.knows(candidate.group):
            return False
        self.outcomes[candidate.group] = candidate.outcome
        self.locations[candidate.group] = candidate.partition, candidate.offset
        if candidate.group not in self.settled:
            if candidate.outcome in DROPPED:
                self.drops += 1
            else:
                self._waiting[candidate.group] = candidate
                self._arrived.append(candidate.group)
        self._advance()
        return True

    def knows(self, group: int) -> bool:
        return group < self.below or group in self.outcomes

    def is_settled(self, group: int) -> bool:
        """True if a group was selected or stale, or is below `below`."""
        return group < self.below or group in self.settled

    def resume(self, *, below: int, settled: Iterable[int], drops: int) -> None:
        """Continue from another selector's state: every group below number `below` has ended, and from there on those in `settled`."""
        self.below = self.next_number = below
        self.settled.update(settled)
        self.drops = drops

    @property
    def drops_to_resume(self) -> int:
        """Number of dropped groups, without those from `below` on whose outcome a resumed selector reads again."""
        return self.drops - sum(outcome in DROPPED and group not in self.settled for group, outcome in self.outcomes.items())

    def settle(self, groups: list[int]) -> None:
        """Mark groups as trained by recorded steps, or as stale."""
        for group in groups:
            self.settled.add(group)
            self._waiting.pop(group, None)
        self._advance()

    def refuse(self, candidate: Candidate) -> None:
        """Treat a group with an unreadable payload like a stale one."""
        if self.add(candidate) and not self.is_settled(candidate.group):
            self.settle([candidate.group])
            self.drops += 1
            self.newly_stale.append(candidate)

    @property
    def finished_groups(self) -> int:
        """Number of ended groups: all below `below`, and those from there on with an outcome."""
        return self.below + sum(group >= self.below for group in self.outcomes.keys() | self.settled)

    def take(self, *, learner_version: int) -> Candidate | None:
        """The next group to train, or None until its outcome has arrived; stale groups are appended to `newly_stale`."""
        while (candidate := self._peek()) is not None:
            self.settle([candidate.group])
            if is_fresh(learner_version=learner_version, policy_version_min=candidate.policy_version_min, max_lag=self.schedule.max_lag):
                return candidate
            self.drops += 1
            self.newly_stale.append(candidate)
        return None

    def queued(self) -> list[int]:
        """Oldest policy version of each group that could be selected."""
        return [candidate.policy_version_min for candidate in self._waiting.values()]

    def ready(self, count: int) -> bool:
        """True if `count` groups can be selected now, without regard to staleness."""
        if self.schedule.order == "arrival":
            return len(self._waiting) >= count
        number, ready = self.next_number, 0
        while ready < count:
            if self._has_ended(number):
                number += 1
            elif number in self._waiting:
                number, ready = number + 1, ready + 1
            else:
                return False
        return True

    def _peek(self) -> Candidate | None:
        """The next group in the schedule's order, fresh or not; None until its outcome has arrived."""
        if self.schedule.order == "arrival":
            while self._arrived and self._arrived[0] not in self._waiting:
                self._arrived.popleft()
            return self._waiting[self._arrived[0]] if self._arrived else None
        self.next_number = max(self.next_number, self.below)
        while self._has_ended(self.next_number):
            self.next_number += 1
        return self._waiting.get(self.next_number)

    def _has_ended(self, group: int) -> bool:
        return self.is_settled(group) or self.outcomes.get(group) in DROPPED

    def _advance(self) -> None:
        """Raise `below` over ended groups with an outcome and discard their state, because a run has millions of groups."""
        while self.below in self.outcomes and self._has_ended(self.below):
            del self.outcomes[self.below], self.locations[self.below]
            self.settled.discard(self.below)
            self.below += 1
