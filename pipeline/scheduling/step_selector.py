"""Which groups form the next optimizer step.

The rule: the selector sees outcomes in any order of arrival; under `submission` order what it hands out depends on the group
numbers and outcomes alone, so two runs that score the same groups train the same steps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.pipeline.scheduling.rules import DROPPED, is_fresh
from penstock.pipeline.scheduling.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group's outcome, from its headers, and where its payload is."""

    group: int
    outcome: str
    policy_version_min: int
    """Oldest version of its samples; 0 where there are none."""
    partition: int
    offset: int
    """Offset of the first part."""
    parts: int
    sha256: str


@dataclass(slots=True)
class Selector:
    """Hands out trainable groups one by one, in the schedule's order.

    `take` gives the next group of the current step, or None while that group's outcome is not known. A group that is too old
    for `learner_version` goes to `newly_stale` instead; the caller records it in the ledger.
    """

    schedule: Schedule
    next_number: int = 0
    """Submission order: the lowest number that was neither handed out nor dropped."""
    below: int = 0
    """Every group with a lower number has ended and is forgotten, its outcome too."""
    drops: int = 0
    """Distinct groups that were dropped, stale ones included."""
    outcomes: dict[int, str] = field(default_factory=dict)
    """The first outcome of every group that was seen, from `below` on."""
    settled: set[int] = field(default_factory=set)
    """Groups handed out, or stale, from `below` on."""
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition and offset of the outcomes."""
    newly_stale: list[Candidate] = field(default_factory=list)
    _waiting: dict[int, Candidate] = field(default_factory=dict)
    _arrived: deque[int] = field(default_factory=deque)

    def add(self, candidate: Candidate) -> bool:
        """Add an outcome; False for a duplicate, which is ignored."""
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
        self._forget()
        return True

    def knows(self, group: int) -> bool:
        """Whether the outcome of a group was seen."""
        return group < self.below or group in self.outcomes

    def is_settled(self, group: int) -> bool:
        """Whether a group was handed out, or found stale; also true for one that was dropped and is forgotten."""
        return group < self.below or group in self.settled

    def resume(self, *, below: int, settled: Iterable[int], drops: int) -> None:
        """Go on where another selector stood: every group below `below` has ended, and these from there on are settled."""
        self.below = self.next_number = below
        self.settled.update(settled)
        self.drops = drops

    @property
    def drops_to_resume(self) -> int:
        """Dropped groups, without those from `below` on of which a selector that resumes here reads the outcome again."""
        return self.drops - sum(outcome in DROPPED and group not in self.settled for group, outcome in self.outcomes.items())

    def settle(self, groups: list[int]) -> None:
        """Mark groups that recorded steps have used already, or that were found stale."""
        for group in groups:
            self.settled.add(group)
            self._waiting.pop(group, None)
        self._forget()

    def refuse(self, candidate: Candidate) -> None:
        """Set a group aside whose payload nobody can read, like one that is too old."""
        if self.add(candidate) and not self.is_settled(candidate.group):
            self.settle([candidate.group])
            self.drops += 1
            self.newly_stale.append(candidate)

    @property
    def finished_groups(self) -> int:
        """Distinct groups that have ended: all below `below`, and those from there on whose outcome was seen."""
        return self.below + sum(group >= self.below for group in self.outcomes.keys() | self.settled)

    def take(self, *, learner_version: int) -> Candidate | None:
        """The next group to train, or None while it is not known; groups that are too old are set aside in `newly_stale`."""
        while (candidate := self._peek()) is not None:
            self.settle([candidate.group])
            if is_fresh(learner_version=learner_version, policy_version_min=candidate.policy_version_min, max_lag=self.schedule.max_lag):
                return candidate
            self.drops += 1
            self.newly_stale.append(candidate)
        return None

    def queued(self) -> list[int]:
        """The oldest version of each group that is scored and waits."""
        return [candidate.policy_version_min for candidate in self._waiting.values()]

    def ready(self, wanted: int) -> bool:
        """Whether `wanted` groups could be handed out now, one after the other; staleness is not looked at."""
        if self.schedule.order == "arrival":
            return len(self._waiting) >= wanted
        number, ready = self.next_number, 0
        while ready < wanted:
            if self._has_ended(number):
                number += 1
            elif number in self._waiting:
                number, ready = number + 1, ready + 1
            else:
                return False
        return True

    def _peek(self) -> Candidate | None:
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

    def _forget(self) -> None:
        """Raise `below` over the groups that have ended and whose outcome was seen: a run has millions of them."""
        while self.below in self.outcomes and self._has_ended(self.below):
            del self.outcomes[self.below], self.locations[self.below]
            self.settled.discard(self.below)
            self.below += 1
