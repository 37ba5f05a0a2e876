"""Tells deleted records from lost ones. A missing record that retention does not explain is lost.

Retention deletes a partition's records up to an offset: a record that must be newer than the first retained one was not deleted.
"""

import sys

from penstock.pipeline.inspect.audit.facts import Facts

ANY = sys.maxsize


class Retention:
    """Answers for each kind of missing record if retention may have deleted it."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.prompts_below = max((facts.first_retained.get(partition, ANY) for partition in facts.truncated("prompts")), default=0)
        """Prompts of a partition have ascending numbers: all from this group on are retained."""
        self._versions_below = min(facts.first_manifests(), default=ANY) if ("weights", 0) in facts.truncated("weights") else 0
        self._outcomes = bool(facts.truncated("groups"))
        self._slots = {partition: self._limit(partition) for topic in ("rollouts", "groups") for partition in facts.truncated(topic)}

    def prompt(self, group: int) -> bool:
        """True if the group's prompt may have been deleted."""
        return group < self.prompts_below

    def version(self, version: int) -> bool:
        """True if the version's manifest may have been deleted."""
        return version < self._versions_below

    def samples(self, partition: int, group: int) -> bool:
        """True if samples of the group may have been deleted."""
        prompt, limit = self._facts.prompts.first.get(group), self._slots.get(("rollouts", partition), 0)
        return limit > 0 if prompt is None else prompt.slot < limit

    def outcome(self, group: int) -> bool:
        """True if the group's outcome may have been deleted; a trained group's offset is in its plan."""
        if (planned := self._facts.planned.first.get(group)) is not None:
            return self._facts.deleted(planned.where)
        if (prompt := self._facts.prompts.first.get(group)) is None:
            return self._outcomes
        return prompt.slot < self._slots.get(("groups", prompt.where.partition), 0)

    def drop(self, group: int) -> bool:
        """True if the group was not trained and a deleted outcome may have dropped it."""
        facts = self._facts
        return self._outcomes and group not in facts.planned.first and group not in facts.outcomes.first and self.outcome(group)

    def groups(self) -> list[int]:
        """Numbers of the groups whose prompts were deleted."""
        facts = self._facts
        last = max(max(index, default=-1) for index in (facts.prompts.first, facts.outcomes.first, facts.planned.first))
        return [group for group in range(min(self.prompts_below, last + 1)) if group not in facts.prompts.first]

    def _limit(self, partition: tuple[str, int]) -> int:
        """The first slot of which nothing in a partition was deleted.

        Under `submission` order no group after the first retained one was trained when that was written, so no version had been published
        that admits more. By arrival many groups may have overtaken the first retained one: there is no limit.
        """
        terms, first = self._facts.terms, self._facts.prompts.first.get(self._facts.first_retained.get(partition, -1))
        if first is None or terms.order != "submission":
            return ANY
        return terms.round_groups * (first.slot // terms.round_groups + 1 + terms.max_lag)
