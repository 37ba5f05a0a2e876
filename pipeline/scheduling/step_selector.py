"""Which groups form the next optimizer step.

The rule: the selector sees outcomes in any order of arrival; under `submission` order what it hands out depends on the group
numbers and outcomes alone, so two runs that score the same groups train the same steps.
"""

from collections import deque
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
    drops: int = 0
    """Distinct groups that were dropped, stale ones included."""
    outcomes: dict[int, str] = field(default_factory=dict)
    """The first outcome of every group that was seen."""
    settled: set[int] = field(default_factory=set)
    """Groups handed out, or stale."""
    newly_stale: list[Candidate] = field(default_factory=list)
    _waiting: dict[int, Candidate] = field(default_factory=dict)
    _arrived: deque[int] = field(default_factory=deque)

    def add(self, candidate: Candidate) -> bool:
        """Add an outcome; False for a duplicate, which is ignored."""
        if candidate.group in self.outcomes:
            return False
        self.outcomes[candidate.group] = candidate.outcome
        if candidate.group in self.settled:
            return True
        if candidate.outcome in DROPPED:
            self.drops += 1
        else:
            self._waiting[candidate.group] = candidate
            self._arrived.append(candidate.group)
        return True

    def settle(self, groups: list[int]) -> None:
        """Mark groups that recorded steps have used already, or that were found stale."""
        for group in groups:
            self.settled.add(group)
            self._waiting.pop(group, None)

    def refuse(self, candidate: Candidate) -> None:
        """Set a group aside whose payload nobody can read, like one that is too old."""
        if self.add(candidate) and candidate.group not in self.settled:
            self.settle([candidate.group])
            self.drops += 1
            self.newly_stale.append(candidate)

    @property
    def known(self) -> int:
        """Distinct groups whose outcome was seen."""
        return len(self.outcomes.keys() | self.settled)

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
            if number in self.settled or self.outcomes.get(number) in DROPPED:
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
        while self.next_number in self.settled or self.outcomes.get(self.next_number) in DROPPED:
            self.next_number += 1
        return self._waiting.get(self.next_number)
