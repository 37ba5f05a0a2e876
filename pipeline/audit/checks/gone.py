"""Which absent records may have been deleted; every other absent record is lost.

The rule: deletion takes a partition's records up to an offset. What cannot have been written before the first record that is kept is not
gone.
"""

import sys

from penstock.pipeline.audit.facts import Facts

ANY = sys.maxsize


class Gone:
    """What of a run may be among its deleted records; each question is about a record that is not there."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.prompts_below = max((facts.first_kept.get(place, ANY) for place in facts.cut("prompts")), default=0)
        """Prompts stand in a partition by rising number: from this group on all are kept."""
        self._versions_below = min(facts.first_manifests(), default=ANY) if ("weights", 0) in facts.cut("weights") else 0
        self._outcomes = bool(facts.cut("groups"))
        self._slots = {place: self._limit(place) for topic in ("rollouts", "groups") for place in facts.cut(topic)}

    def prompt(self, group: int) -> bool:
        """Whether the group may have been admitted by a prompt that is gone."""
        return group < self.prompts_below

    def version(self, version: int) -> bool:
        """Whether the version's manifest may be gone."""
        return version < self._versions_below

    def samples(self, partition: int, group: int) -> bool:
        """Whether samples of the group may be gone."""
        prompt, limit = self._facts.prompts.first.get(group), self._slots.get(("rollouts", partition), 0)
        return limit > 0 if prompt is None else prompt.slot < limit

    def outcome(self, group: int) -> bool:
        """Whether the group's outcome may be gone; of a trained group its plan says where it stood."""
        if (planned := self._facts.planned.first.get(group)) is not None:
            return self._facts.deleted(planned.where)
        if (prompt := self._facts.prompts.first.get(group)) is None:
            return self._outcomes
        return prompt.slot < self._slots.get(("groups", prompt.where.partition), 0)

    def drop(self, group: int) -> bool:
        """Whether a group that was not trained may have been dropped by an outcome that is gone."""
        facts = self._facts
        return self._outcomes and group not in facts.planned.first and group not in facts.outcomes.first and self.outcome(group)

    def groups(self) -> list[int]:
        """Numbers of the groups whose prompts are gone."""
        facts = self._facts
        last = max(max(known, default=-1) for known in (facts.prompts.first, facts.outcomes.first, facts.planned.first))
        return [group for group in range(min(self.prompts_below, last + 1)) if group not in facts.prompts.first]

    def _limit(self, place: tuple[str, int]) -> int:
        """The slot from which on nothing of a partition is gone.

        Under `submission` order no group after the first kept one had been trained when that was written, so that no version was out which
        makes room for more. By arrival the first kept record may be of a group that many have overtaken: it limits nothing.
        """
        terms, first = self._facts.terms, self._facts.prompts.first.get(self._facts.first_kept.get(place, -1))
        if first is None or terms.order != "submission":
            return ANY
        return terms.round_groups * (first.slot // terms.round_groups + 1 + terms.max_lag)
