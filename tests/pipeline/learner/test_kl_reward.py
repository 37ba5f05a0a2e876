"""The distance to the reference as a part of the reward: each sample's own, before advantages are taken, whatever the micro-batches."""

import numpy as np
import pytest

from penstock.pipeline.learner.micro_batches import lowered_rewards
from tests.support.trainer_alone import TOKENS, group_of


@pytest.mark.parametrize("budget", [1, 12, 1000])
def test_each_reward_is_lowered_by_its_own_samples_distance_in_micro_batches_of_any_size(budget: int) -> None:
    group = group_of(3, version=0)
    seen = []

    def reference(batch):
        seen.append(len(batch.samples))
        assert np.isfinite(batch.behaviour_logprobs).all()
        return batch.behaviour_logprobs - 0.25 * (1.0 + batch.samples[:, None])  # sample n is 0.25 (n + 1) nats a token away

    lowered, sums = lowered_rewards(group, coef=0.5, reference=reference, token_budget=budget)
    distances = [0.25 * (number + 1) * TOKENS for number in range(len(group.samples))]
    expected = [reward - 0.5 * distance for reward, distance in zip(group.rewards, distances, strict=True)]
    assert lowered.rewards == pytest.approx(expected, abs=1e-5)
    assert sums == {"kl_reference_k1_sum": pytest.approx(sum(distances), abs=1e-5)}
    assert sum(seen) == len(group.samples)
    assert group.rewards != lowered.rewards  # the group itself is as it was recorded
