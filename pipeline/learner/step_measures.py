"""What the groups of a step say of themselves: lengths, truncation, spread of rewards.

The rule: pure functions of recorded groups, the same for a live step and its repetition.
"""

import json
import re
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from penstock.topics.groups import Group
from penstock.topics.samples import generated


def group_measures(groups: Sequence[Group]) -> dict[str, float]:
    """Measures over all samples of these groups, trained or not; those of rewards over the samples that have one.

    `no_reward` counts the others, if there are any; `reward/NAME` is the mean of what reward functions logged as `NAME`.
    `truncated_share` ran out of tokens; `reward_std` is over all samples, `reward_group_std` the mean of the groups' own, which is what a
    group advantage has to work with.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(generated(sample.rollout)) for sample in samples], np.float64)
    rewards = [np.array(group.rewards, np.float64) for group in groups]
    without = len(samples) - sum(map(len, rewards))
    return {
        **_logged(groups),
        **({"no_reward": float(without)} if without else {}),
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


def _logged(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each metric over the groups that logged it, by a name that MLflow accepts."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, value in json.loads(group.metrics or "{}").items():
            parts = [re.sub(r"[^\w.\- :]", "_", part) for part in name.split("/") if part not in ("", ".", "..")]
            values.setdefault("/".join(["reward", *parts]), []).append(value)
    return {name: fmean(numbers) for name, numbers in values.items()}
