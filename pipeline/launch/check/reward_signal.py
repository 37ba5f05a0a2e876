"""Checks for rewards that cannot teach the task: a wrong answer earns more, or all samples earn the same low reward."""

from collections.abc import Sequence

from penstock.infra.errors import PenstockError
from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.load import Config
from penstock.pipeline.data import Row
from penstock.pipeline.scheduling.reward_scale import LOW, RewardScale

ENOUGH = 16
"""Samples from which equal rewards are no accident: a policy that is right in a fifth of them has no reward in 16 with 3 %."""


def swapped(rows: Sequence[Row], answers: Sequence[str]) -> list[tuple[int, int]]:
    """Two rows whose answers differ, each paired with the other; empty if there are none.

    A reward that ignores the row cannot give both rows less for their own answer than for the other one.
    """
    answered = [number for number, row in enumerate(rows) if row.columns.get("answer") is not None]
    pairs = [(answered[0], number) for number in answered[1:] if answers[number] != answers[answered[0]]] if answered else []
    return [pairs[0], pairs[0][::-1]] if pairs else []


def scale_of(config: Config, rewards: Sequence[float]) -> RewardScale:
    """The range of a configuration's rewards, widened to some that were seen."""
    scale = RewardScale.of(config.reward.functions, config.reward.weights, by_source=config.data.rewards)
    scale.see(rewards)
    return scale


def refuse_reversed(rows: Sequence[Row], right: Sequence[float | None], wrong: Sequence[float | None]) -> None:
    """Raise `PenstockError` if each of these rows' own answer earns less than another row's."""
    pairs = zip(right, wrong, strict=True)
    if rows and all(own is not None and other is not None and own < other for own, other in pairs):
        raise PenstockError(
            f"reward.functions: a wrong answer earns more than the right one: for {rows[0].origin} its own answer has the reward "
            f"{right[0]:g}, the answer of {rows[1].origin} has {wrong[0]:g}; correct the reward's sign, or the answers (data.answer_field)"
        )


def equal_and_low(rewards: Sequence[float], scale: RewardScale) -> str | None:
    """The problem if all sampled completions have the same reward, in the lower half of the scale; None otherwise.

    Raises `PenstockError` with it for `ENOUGH` samples.
    """
    position = scale.position(rewards[0]) if len(rewards) > 1 and zero_variance(rewards) else None
    if position is not None and position < LOW:
        span = f"in a range of {scale.low:g} to {scale.high:g}"
        problem = (
            f"all {len(rewards)} sampled completions have the reward {rewards[0]:g}, {span}: nothing is learnt from equal rewards; "
            f"{scale.advice(rewards[0])}, or a larger sampling.max_new_tokens if they are cut off"
        )
        if len(rewards) >= ENOUGH:
            raise PenstockError(problem)
        return problem
    return None
