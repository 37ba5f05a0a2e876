"""Rules of admission, start, freshness and publication, and summaries of lags: pure functions of integers and of a `Schedule`."""

from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from penstock.pipeline.scheduling.schedule import Schedule

DROPPED = frozenset({"filtered", "failed", "abandoned"})
"""Outcomes a scorer may give a group instead of `scored`; each of them, and `stale`, admits one new prompt."""


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
    """True if a version is published after the step with this 0-based number."""
    return (step + 1) % steps_per_version == 0 or step + 1 == steps


def too_far_off(ess: float | None, *, floor: float | None) -> bool:
    """True if the newest step's effective sample size is below `floor`, so that generation ahead has to pause."""
    return ess is not None and floor is not None and ess < floor


def admission_limit(schedule: Schedule, *, newest_version: int, dropped: int, steps: int, ahead: bool = True) -> int:
    """Number of groups that may be admitted: the backpressure.

    `admitted - dropped <= U·S·(newest_version + 1 + max_lag)`, and at most what the run's steps need. `dropped` counts distinct groups.
    Without `ahead` the limit is that of the newest version's round, as if `max_lag` were 0.

    Example:
        admission_limit(preset("pipelined", prompts_per_step=4, samples_per_prompt=8, steps_per_version=1),
                        newest_version=2, dropped=5, steps=100)  # -> 17
    """
    window = schedule.round_groups * (newest_version + 1 + (schedule.max_lag if ahead else 0))
    return min(window, steps * schedule.prompts_per_step) + dropped


def admitted_groups(numbers: Container[int], *, since: int = 0) -> range:
    """The admitted groups from `since` on, by the numbers in `prompts`: the feeder leaves no gap, so numbers after a gap do not count.

    Example:
        admitted_groups({0, 1, 2, 900})  # -> range(0, 3)
    """
    count = since
    while count in numbers:
        count += 1
    return range(since, count)


def slot_of(*, admitted: int, dropped: int) -> int:
    """Position of the next admitted group in the sequence of trained groups."""
    return admitted - dropped


def min_version(schedule: Schedule, *, slot: int) -> int:
    """Oldest policy version under which a group for this slot may be generated: max(0, round(slot) - max_lag)."""
    return max(0, slot // schedule.round_groups - schedule.max_lag)


def may_start(*, min_version: int, loaded_version: int) -> bool:
    """True if a rollout worker with these weights may start this prompt; otherwise it waits for newer ones."""
    return loaded_version >= min_version


def version_to_load(schedule: Schedule, *, min_version: int, newest_version: int, loaded_version: int) -> int | None:
    """Version to load before a group is started, or None to keep the loaded one.

    Under `loads_at = "round"` weights are loaded only if the group needs newer ones; otherwise the newest are loaded.
    """
    if newest_version <= loaded_version or (schedule.loads_at == "round" and loaded_version >= min_version):
        return None
    return newest_version


def lag(*, learner_version: int, policy_version_min: int) -> int:
    """Staleness of a sample, in versions."""
    return learner_version - policy_version_min


def lag_summary(lags: npt.ArrayLike) -> dict[str, float]:
    """`lag_min`, `lag_mean`, `lag_max` and `lag_p95` (the smallest lag that 95 % do not exceed), in versions; empty without lags.

    Example:
        lag_summary([0, 0, 1, 3])  # -> {"lag_min": 0.0, "lag_mean": 1.0, "lag_max": 3.0, "lag_p95": 3.0}
    """
    values = np.asarray(lags, np.float64)
    if not values.size:
        return {}
    return {
        "lag_min": float(values.min()),
        "lag_mean": float(values.mean()),
        "lag_max": float(values.max()),
        "lag_p95": float(np.quantile(values, 0.95, method="inverted_cdf")),
    }


def fractions_by_lag(lags: npt.ArrayLike) -> dict[int, float]:
    """Lag -> share, for the lags that occur, in ascending order.

    Example:
        fractions_by_lag([2, 0, 0, 0])  # -> {0: 0.75, 2: 0.25}
    """
    distinct, counts = np.unique(np.asarray(lags, np.int64), return_counts=True)
    return {int(lag): int(count) / int(counts.sum()) for lag, count in zip(distinct, counts, strict=True)}


def is_fresh(*, learner_version: int, policy_version_min: int, max_lag: int) -> bool:
    """True if the trainer may train a group, by the oldest of its policy versions.

    Example:
        is_fresh(learner_version=9, policy_version_min=7, max_lag=2)  # -> True
        is_fresh(learner_version=9, policy_version_min=6, max_lag=2)  # -> False
    """
    return learner_version - policy_version_min <= max_lag


def will_be_stale(*, newest_version: int, policy_version_min: int, max_lag: int) -> bool:
    """True if a group in flight cannot be fresh when it is trained, because the learner is at `newest_version` or later.

    Example:
        will_be_stale(newest_version=9, policy_version_min=6, max_lag=2)  # -> True
    """
    return not is_fresh(learner_version=newest_version, policy_version_min=policy_version_min, max_lag=max_lag)


def next_in_line(groups: Sequence[tuple[int, int]], *, loaded_version: int, newest_version: int) -> int | None:
    """Index of the (group number, min version) pair to start next, or None if all have to wait for weights.

    It is the lowest group number that an available version allows.
    """
    available = max(loaded_version, newest_version)
    ready = [(number, index) for index, (number, oldest) in enumerate(groups) if may_start(min_version=oldest, loaded_version=available)]
    return min(ready)[1] if ready else None


def choose_partition(*, unfinished: Sequence[int], slots: Sequence[int], owners: Sequence[str | None]) -> int | None:
    """Partition of the next group, or None if no owner has room.

    A partition has room if it has fewer unfinished groups than the slots its owner reports. Of those, the one whose owner has the smallest
    share of its slots in use is chosen, so that a new worker gets groups at once.

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
