"""The limit on groups dropped between two steps, and the words in which a run that passes it ends.

Drops that were there when the process began do not count: the operator who resumes a run has seen to what dropped them.
"""

from dataclasses import dataclass
from statistics import fmean

from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.envs.group_outcome import UNTRAINED
from penstock.pipeline.scheduling.reward_scale import HIGH
from penstock.workers.trainer.group_inbox import GroupInbox

SHOWN_CAUSES = 6
CONSTANT = (
    "every reward is {:.6g} before the first step: the reward function gives every completion the same, or the policy solves all prompts "
    "or none; compare two completions and their rewards with `penstock check CONFIG`"
)


@dataclass(frozen=True, slots=True)
class Passed:
    """The end of a run that has passed the limit."""

    reason: str
    solved: bool
    """True if the groups were dropped because all their samples have (nearly) the full reward."""


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
        self.inbox.forget_drops()

    def committed(self) -> None:
        """A step was committed: count from 0."""
        self.at_last_step = self.inbox.selector.drops
        self.inbox.forget_drops()

    def passed(self, *, steps_done: int) -> Passed | None:
        """The end of the run; None while no more than the limit were dropped."""
        limit = self.inbox.schedule.max_drops_per_step
        dropped = self.inbox.selector.drops - max(self.at_last_step, self.tolerated)
        if dropped <= limit:
            return None
        begun = f"since step {steps_done - 1}" if steps_done else "before step 0"
        when = "since the trainer was started" if self.tolerated > self.at_last_step else begun
        equal, scale = self._equal(), self.inbox.scale
        mostly_equal = 2 * len(equal) > dropped
        position = scale.position(fmean(equal)) if mostly_equal else None
        if steps_done and position is not None and position >= HIGH:
            counted = f"{len(equal)} of {dropped} groups dropped {when} have equal rewards, {fmean(equal):.3g} on average"
            text = f"solved: {counted}; the full reward is {scale.high:.3g}, so nothing is left to learn from these prompts"
            return Passed(text, solved=True)
        text = f"{dropped} groups were dropped {when} (schedule.max_drops_per_step = {limit})"
        return Passed(text + self._causes(dropped, steps_done=steps_done), solved=False)

    def without_a_step(self, *, asked: int) -> str:
        """The reason of a run that has used all its prompts without a step."""
        dropped = self.inbox.selector.drops
        text = (
            f"all {asked} prompts of the run's epochs were asked before the first step, which takes {self.inbox.schedule.prompts_per_step}"
        )
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
        return f"; nothing is learnt from groups of equal rewards ({span}): {scale.advice(mean)}"
