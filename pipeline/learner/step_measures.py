"""What the groups of a step say of themselves: lengths, truncation, spread of rewards.

The rule: pure functions of recorded groups, the same for a live step and its repetition.
"""

from collections.abc import Sequence

import numpy as np

from penstock.topics.groups import Group
from penstock.topics.samples import generated


def group_measures(groups: Sequence[Group]) -> dict[str, float]:
    """Measures over all samples of these groups, trained or not.

    `truncated_share` ran out of tokens; `reward_std` is over all samples, `reward_group_std` the mean of the groups' own, which is what
    a group advantage has to work with.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(generated(sample.rollout)) for sample in samples], np.float64)
    rewards = [np.array([sample.reward for sample in group.samples], np.float64) for group in groups]
    return {
        "groups": float(len(groups)),
        "samples": float(len(samples)),
        "reward_trained": float(np.concatenate(rewards).mean()),
        "reward_std": float(np.concatenate(rewards).std()),
        "reward_group_std": float(np.mean([one.std() for one in rewards])),
        "truncated_share": float(np.mean([sample.rollout.finish == "length" for sample in samples])),
        "completion_tokens_mean": float(lengths.mean()),
        "completion_tokens_p95": float(np.quantile(lengths, 0.95, method="inverted_cdf")),
        "completion_tokens_max": float(lengths.max()),
    }
