"""The range of a run's rewards, and what it says about a task."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.algorithms.advantages import HIGH, LOW, RANGES, RewardScale
from penstock.pipeline.rewards.builtin import BUILTINS

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20)


@pytest.mark.parametrize(
    ("functions", "weights", "span"),
    [
        (["exact_match"], None, (0.0, 1.0)),
        (["exact_match", "math_verify"], [2.0, 0.5], (0.0, 2.5)),
        (["exact_match", "soft_overlong"], None, (-1.0, 1.0)),
        (["exact_match", "soft_overlong"], [1.0, -1.0], (0.0, 2.0)),
        (["reasoning_gym"], [10.0], (0.0, 10.0)),
    ],
)
def test_the_built_in_rewards_have_a_range_before_any_is_seen(functions: list[str], weights: list[float] | None, span: object) -> None:
    scale = RewardScale.of(functions, weights)
    assert (scale.low, scale.high) == span


@pytest.mark.parametrize(
    ("functions", "by_source"), [(["rew.py:f"], ()), (["exact_match", "rew.py:f"], ()), ([], ()), (["exact_match", "math_verify"], ("a",))]
)
def test_with_a_function_of_ones_own_or_other_functions_by_source_the_range_is_that_of_the_rewards_seen(
    functions: list[str], by_source: tuple[str, ...]
) -> None:
    scale = RewardScale.of(functions, by_source=by_source)
    assert scale.position(1.0) is None
    scale.see([-2.0, 8.0])
    assert (scale.position(8.0), scale.position(-2.0), scale.position(7.0)) == (1.0, 0.0, 0.9)


def test_every_function_with_a_known_range_exists() -> None:
    assert RANGES.keys() <= BUILTINS.keys()


@given(REWARDS, st.floats(0.01, 100), st.floats(-100, 100))
def test_a_position_lies_between_0_and_1_and_depends_on_no_unit_or_offset(rewards: list[float], unit: float, offset: float) -> None:
    scale, other = RewardScale(), RewardScale()
    scale.see(rewards)
    other.see(reward * unit + offset for reward in rewards)
    for reward in rewards:
        position, same = scale.position(reward), other.position(reward * unit + offset)
        if position is None or same is None or scale.high - scale.low < 1e-3:
            continue
        assert 0.0 <= position <= 1.0
        assert math.isclose(position, same, abs_tol=1e-3)


@given(REWARDS)
def test_the_order_in_which_rewards_are_seen_does_not_matter(rewards: list[float]) -> None:
    scale, other = RewardScale(), RewardScale()
    scale.see(rewards)
    for reward in reversed(rewards):
        other.see([reward])
    assert scale == other


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (1.0, "use harder prompts"), (0.9, "use harder prompts"), (0.89, "use easier or harder prompts"),
        (0.5, "use easier or harder prompts"), (0.49, "the task is too hard: use easier prompts"),
        (0.0, "the task is too hard: use easier prompts"),
    ],
)  # fmt: skip
def test_harder_prompts_are_advised_only_near_the_full_reward(reward: float, advice: str) -> None:
    assert RewardScale(0.0, 1.0).advice(reward).startswith(advice)
    assert RewardScale(-1.0, 1.0).advice(2 * reward - 1).startswith(advice)
    assert LOW < HIGH


def test_without_a_range_no_direction_is_advised() -> None:
    assert RewardScale().advice(1.0).startswith("use easier or harder prompts")
    assert RewardScale(1.0, 1.0).advice(1.0).startswith("use easier or harder prompts")
