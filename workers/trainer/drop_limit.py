"""The limit on groups dropped between two steps, and the words in which a run that passes it ends.

The rule: drops that were there when the process began do not count: a person who resumes a run has seen to what dropped them.
"""

from dataclasses import dataclass

from penstock.workers.trainer.group_inbox import GroupInbox

WITHOUT_DIFFERENCES = "nothing is learnt from equal rewards: take prompts of another difficulty, more samples a group or a denser reward"
SHOWN_CAUSES = 6


@dataclass(slots=True)
class DropLimit:
    """Counts what the inbox drops since the last step."""

    inbox: GroupInbox
    at_last_step: int = 0
    """Dropped groups when the last step was committed."""
    tolerated: int = 0
    """Dropped groups when this process had read what was there."""

    @property
    def since_last_step(self) -> int:
        """Groups dropped since the last step was committed."""
        return self.inbox.selector.drops - self.at_last_step

    def tolerate(self) -> None:
        """Count no drop that is known by now."""
        self.tolerated = self.inbox.selector.drops
        self.inbox.drop_causes.clear()

    def committed(self) -> None:
        """A step was committed: count anew."""
        self.at_last_step = self.inbox.selector.drops
        self.inbox.drop_causes.clear()

    def passed(self, *, steps_done: int) -> str | None:
        """Why the run cannot go on; None while no more than the limit were dropped."""
        limit = self.inbox.schedule.max_drops_per_step
        dropped = self.inbox.selector.drops - max(self.at_last_step, self.tolerated)
        if dropped <= limit:
            return None
        causes = ", ".join(f"{count} {cause}" for cause, count in self.inbox.drop_causes.most_common(SHOWN_CAUSES) if count)
        begun = f"since step {steps_done - 1}" if steps_done else "before step 0"
        when = "since the trainer was started" if self.tolerated > self.at_last_step else begun
        reason = self.inbox.last_reason()
        last = f"; the last one: {reason}" if reason else ""
        alike = sum(count for cause, count in self.inbox.drop_causes.items() if cause.startswith("filtered"))
        advice = f"; {WITHOUT_DIFFERENCES}" if 2 * alike > dropped else ""
        return f"{dropped} groups were dropped {when} (schedule.max_drops_per_step = {limit}): {causes}{last}{advice}"
