"""The schedule as data, and its rules as integers: one module for the live workers, for checks afterwards and for tests.

The rule: what differs between the modes is a field of `Schedule`, and every decision below is a pure function of integers.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["submission", "arrival"]
StaleInHand = Literal["finish", "abort", "continue"]

DROPPED = frozenset({"filtered", "failed", "abandoned"})
"""Outcomes a scorer may give a group instead of `scored`; each of them, and `stale`, admits one new prompt."""

FATES = ("trained", "filtered", "stale", "failed", "abandoned", "unused")
"""How a group can end; exactly one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When steps start, when weights are loaded and how old a sample may be."""

    mode: str
    starts_on: Literal["round", "groups"]
    """round: a step waits until its whole round is scored; groups: until its own groups are (complete groups, arXiv 2606.26997)."""
    loads_at: Literal["round", "group", "step"]
    """round: every group of a round is drawn under that round's version; group: under the newest version when the group starts; step: the
    newest weights are taken between two decode steps, and samples in flight go on under them (PipelineRL, arXiv 2509.19128)."""
    max_lag: int
    prompts_per_step: int = 8
    """U"""
    samples_per_prompt: int = 8
    """K"""
    steps_per_version: int = 1
    """S"""
    order: Order = "submission"
    stale_in_hand: StaleInHand = "finish"
    """finish: a group in hand that can no longer be fresh is drawn to its end all the same; abort: it is ended early and replaced
    (RollArt); continue: it goes on, and its tokens of versions that are too old are not trained."""
    oversample: int = 0
    """r: a group is begun as K + r samples and closed when K of them have ended."""
    max_drops_per_step: int = 128

    @property
    def samples_begun(self) -> int:
        """Samples that are begun for a group: K + r."""
        return self.samples_per_prompt + self.oversample

    @property
    def round_groups(self) -> int:
        """Groups trained between two published versions: U·S."""
        return self.prompts_per_step * self.steps_per_version


MODES: Mapping[str, Schedule] = {
    "synchronous": Schedule(mode="synchronous", starts_on="round", loads_at="round", max_lag=0),
    "pipelined": Schedule(mode="pipelined", starts_on="groups", loads_at="round", max_lag=0),
    "one_step_off": Schedule(mode="one_step_off", starts_on="groups", loads_at="group", max_lag=1),
    "in_flight": Schedule(mode="in_flight", starts_on="groups", loads_at="step", max_lag=4, order="arrival"),
    "bounded": Schedule(mode="bounded", starts_on="groups", loads_at="step", max_lag=1, order="arrival", stale_in_hand="abort"),
}


def preset(
    mode: str,
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    steps_per_version: int,
    max_lag: int | None = None,
    order: Order | None = None,
    stale_in_hand: StaleInHand | None = None,
    oversample: int = 0,
    max_drops_per_step: int | None = None,
) -> Schedule:
    """A named mode with this run's sizes; None stands for the mode's own, for `max_drops_per_step` it is max(16 U·S, 64)."""
    base = MODES[mode]
    return replace(
        base,
        prompts_per_step=prompts_per_step,
        samples_per_prompt=samples_per_prompt,
        steps_per_version=steps_per_version,
        max_lag=base.max_lag if max_lag is None else max_lag,
        order=order or base.order,
        stale_in_hand=stale_in_hand or base.stale_in_hand,
        oversample=oversample,
        max_drops_per_step=max_drops_per_step or max(16 * prompts_per_step * steps_per_version, 64),
    )


def version_after(steps: int, *, steps_per_version: int) -> int:
    """Policy version once `steps` optimizer steps are done: floor(steps / S); 0 is the initial model.

    Example:
        version_after(7, steps_per_version=2)  # -> 3
    """
    return steps // steps_per_version


def versions_of(steps: int, *, steps_per_version: int) -> int:
    """The newest version of a whole run; the last one is published after the last step even when S does not divide the steps.

    Example:
        versions_of(7, steps_per_version=2)  # -> 4
    """
    return -(-steps // steps_per_version)


def publishes(step: int, *, steps: int, steps_per_version: int) -> bool:
    """Whether the step with this 0-based number is followed by a published version."""
    return (step + 1) % steps_per_version == 0 or step + 1 == steps


def admission_limit(schedule: Schedule, *, newest_version: int, dropped: int, steps: int) -> int:
    """How many groups may have been admitted by now: the backpressure.

    `admitted - dropped <= U·S·(newest_version + 1 + max_lag)`, and never more than the run's steps need. `dropped` counts distinct groups.

    Example:
        admission_limit(preset("pipelined", prompts_per_step=4, samples_per_prompt=8, steps_per_version=1),
                        newest_version=2, dropped=5, steps=100)  # -> 17
    """
    window = schedule.round_groups * (newest_version + 1 + schedule.max_lag)
    return min(window, steps * schedule.prompts_per_step) + dropped


def admitted_groups(numbers: Container[int]) -> range:
    """The groups that were admitted, from the numbers that `prompts` names: the feeder leaves no gap, so what lies beyond one is not ours.

    Example:
        admitted_groups({0, 1, 2, 900})  # -> range(0, 3)
    """
    count = 0
    while count in numbers:
        count += 1
    return range(count)


def slot_of(*, admitted: int, dropped: int) -> int:
    """The place among the groups that will be trained which the next admitted group is meant to fill."""
    return admitted - dropped


def min_version(schedule: Schedule, *, slot: int) -> int:
    """The oldest policy version under which a group for this slot may be drawn: max(0, round(slot) - max_lag)."""
    return max(0, slot // schedule.round_groups - schedule.max_lag)


def may_start(*, min_version: int, loaded_version: int) -> bool:
    """Whether a rollout worker with these weights may start this prompt; otherwise it waits for newer ones."""
    return loaded_version >= min_version


def version_to_load(schedule: Schedule, *, min_version: int, newest_version: int, loaded_version: int) -> int | None:
    """Which version to load before a group is started, or None when the loaded one serves.

    Under `loads_at = "round"` the weights change only when the group needs it; otherwise the newest are taken.
    """
    if newest_version <= loaded_version or (schedule.loads_at == "round" and loaded_version >= min_version):
        return None
    return newest_version


def lag(*, learner_version: int, policy_version_min: int) -> int:
    """Staleness of a sample in versions."""
    return learner_version - policy_version_min


def is_fresh(*, learner_version: int, policy_version_min: int, max_lag: int) -> bool:
    """Whether the trainer may learn from a group: the guarantee. The oldest of a group's versions decides.

    Example:
        is_fresh(learner_version=9, policy_version_min=7, max_lag=2)  # -> True
        is_fresh(learner_version=9, policy_version_min=6, max_lag=2)  # -> False
    """
    return learner_version - policy_version_min <= max_lag


def is_hopeless(*, newest_version: int, policy_version_min: int, max_lag: int) -> bool:
    """Whether a group that is still in hand will be stale whatever happens: the learner is at the newest version at least.

    Example:
        is_hopeless(newest_version=9, policy_version_min=6, max_lag=2)  # -> True
    """
    return not is_fresh(learner_version=newest_version, policy_version_min=policy_version_min, max_lag=max_lag)


def next_in_line(groups: Sequence[tuple[int, int]], *, loaded_version: int, newest_version: int) -> int | None:
    """Index of the (group number, min version) pair to start next, or None when all must wait for weights.

    Frontier first: the lowest group number that some available version allows; a priority, never a gate.
    """
    available = max(loaded_version, newest_version)
    ready = [(number, index) for index, (number, oldest) in enumerate(groups) if may_start(min_version=oldest, loaded_version=available)]
    return min(ready)[1] if ready else None


def choose_partition(*, unfinished: Sequence[int], slots: Sequence[int], owners: Sequence[str | None]) -> int | None:
    """The partition that gets the next group, or None while no owner has room.

    A partition has room while its unfinished groups are fewer than the slots its owner advertises. Of those with room the one
    whose owner has the smallest share of its slots in use wins, so that a worker that joins is served at once.

    Example:
        choose_partition(unfinished=[1, 0, 2], slots=[2, 2, 2], owners=["a", "b", "a"])  # -> 1
    """
    used: dict[str, int] = {}
    room: dict[str, int] = {}
    for count, slot, owner in zip(unfinished, slots, owners, strict=True):
        if owner is not None:
            used[owner] = used.get(owner, 0) + count
            room[owner] = room.get(owner, 0) + slot
    candidates = [
        (used[owner] / room[owner], unfinished[partition], partition)
        for partition, owner in enumerate(owners)
        if owner is not None and unfinished[partition] < slots[partition]
    ]
    return min(candidates)[2] if candidates else None
