from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.algorithms.advantages import (
    ADVANTAGES,
    dr_grpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    max_rl_advantages,
    pass_at_k_advantages,
    zero_variance,
)

BASELINED = sorted(ADVANTAGES.keys() - {"reward"})
REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=16)


def test_grpo_advantages_worked_out_by_hand():
    # mean 0.25, sample std 0.5
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4)
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0]), expected, rtol=1e-6)
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], eps=1e-6), np.array([1.5, -0.5, -0.5, -0.5]), rtol=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    np.testing.assert_array_equal(dr_grpo_advantages([1, 0, 0, 0]), np.float32([0.75, -0.25, -0.25, -0.25]))


def test_leave_one_out_subtracts_the_mean_of_the_others():
    rewards = np.array([0.5, 2.0, -1.0, 3.0])
    expected = [reward - np.delete(rewards, index).mean() for index, reward in enumerate(rewards)]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), expected, rtol=1e-6)


@given(REWARDS, st.sampled_from(BASELINED))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_its_rewards(rewards, name):
    advantages = pass_at_k_advantages(rewards, k=1) if name == "pass_at_k" else ADVANTAGES[name](rewards)
    assert advantages.dtype == np.float32
    assert advantages.shape == (len(rewards),)
    assert abs(advantages.sum(dtype=np.float64)) <= 1e-4 * max(1.0, np.abs(advantages).max()) * len(rewards)
    assert (np.diff(advantages[np.argsort(rewards, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0, 0, 0], [1, 0.5, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
def test_the_advantage_for_pass_at_k_is_that_of_all_choices_of_k_samples(rewards, k):
    choices = list(combinations(range(len(rewards)), k))
    passed = np.array([float(any(rewards[one] > 0 for one in choice)) for choice in choices])
    mean, spread = passed.mean(), passed.std()
    within = [np.mean([passed[at] for at, choice in enumerate(choices) if sample in choice]) for sample in range(len(rewards))]
    expected = (np.array(within) - mean) / spread if spread else np.zeros(len(rewards))
    np.testing.assert_allclose(pass_at_k_advantages(rewards, k=k), expected, atol=1e-6)


def test_pass_at_k_needs_more_samples_than_k():
    with pytest.raises(ValueError, match="k = 4 must be between 1 and 2, because a group has 3 samples"):
        pass_at_k_advantages([1, 0, 0])


def test_max_rl_weighs_a_prompt_by_the_inverse_of_its_success_rate():
    for successes in (1, 2, 4):
        found = max_rl_advantages([1.0] * successes + [0.0] * (8 - successes))
        np.testing.assert_allclose(found[[0, -1]], [8 / successes - 1, -1.0], rtol=1e-6)


@pytest.mark.parametrize("name", BASELINED)
@pytest.mark.parametrize("rewards", [[1.0], [0.1] * 5, [0.1 + 0.2] * 5])
def test_equal_rewards_teach_nothing(name, rewards):
    assert zero_variance(rewards)
    assert not ADVANTAGES[name](rewards).any()


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [[1.0, 2.0]], [float("inf")]])
def test_rewards_that_are_no_numbers_are_refused(rewards):
    with pytest.raises(ValueError, match="group's rewards"):
        group_advantages(rewards)
