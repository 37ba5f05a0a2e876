"""Advantage functions, from the K rewards of one group to K advantages; and the range of a run's rewards."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.topics.rollouts import Rollout

Rewards = npt.ArrayLike
Advantages = npt.NDArray[np.float32]
AdvantageFunction = Callable[[Rewards], Advantages]

EQUAL_WITHIN = 1e-6
"""Largest difference between equal rewards, as a share of the largest reward: above the rounding of float32."""


def group_advantages(rewards: Rewards, *, normalise_std: bool = True, eps: float = 1e-4) -> Advantages:
    """GRPO: (r - mean) / (std + eps) over one group (arXiv 2402.03300); without the std Dr. GRPO (arXiv 2503.20783).

    The std has the divisor K - 1, as in other libraries. A group of one or of equal rewards has advantages of 0.

    Example:
        group_advantages([1, 0, 0, 0], normalise_std=False)  # -> [0.75, -0.25, -0.25, -0.25]
    """
    values = _checked(rewards)
    centred = values - values.mean()
    if zero_variance(values):
        return np.zeros(len(values), np.float32)
    if normalise_std:
        centred = centred / (values.std(ddof=1) + eps)
    return centred.astype(np.float32)


def leave_one_out_advantages(rewards: Rewards) -> Advantages:
    """RLOO: each reward minus the mean of the others (arXiv 2402.14740); 0 for a group of one.

    Example:
        leave_one_out_advantages([1, 0, 0])  # -> [1, -0.5, -0.5]
    """
    values = _checked(rewards)
    if zero_variance(values):
        return np.zeros(len(values), np.float32)
    return ((values - values.mean()) * (len(values) / (len(values) - 1))).astype(np.float32)


def dr_grpo_advantages(rewards: Rewards) -> Advantages:
    """Dr. GRPO: r - mean, without the division, which favours groups of nearly equal rewards (arXiv 2503.20783)."""
    return group_advantages(rewards, normalise_std=False)


def max_rl_advantages(rewards: Rewards) -> Advantages:
    """MaxRL (arXiv 2602.02710): (r - mean) / mean of |r|, so that prompts weigh more the rarer a success is.

    The paper divides by the mean, which is the same for rewards of at least 0; the absolute value defines it for others.

    Example:
        max_rl_advantages([1, 0, 0, 0])  # -> [3, -1, -1, -1]
    """
    values = _checked(rewards)
    if zero_variance(values):
        return np.zeros(len(values), np.float32)
    return ((values - values.mean()) / np.abs(values).mean()).astype(np.float32)


def pass_at_k_advantages(rewards: Rewards, *, k: int = 4) -> Advantages:
    """Pass@k advantage of a success and of a failure over all choices of k samples of the group (arXiv 2508.10751).

    A reward above 0 is a success. All advantages are 0 if every choice of k samples has a success, or none has.

    Example:
        pass_at_k_advantages([1, 0, 0, 0], k=2)  # -> [1, -0.333, -0.333, -0.333]
    """
    values = _checked(rewards)
    count, failures = len(values), int((values <= 0).sum())
    if count == 1:
        return np.zeros(1, np.float32)
    if not 1 <= k < count:
        raise ValueError(f"pass_at_k: k = {k} must be between 1 and {count - 1}, because a group has {count} samples")
    failed = comb(failures, k) / comb(count, k)
    std = (failed * (1.0 - failed)) ** 0.5
    if not std:
        return np.zeros(count, np.float32)
    failed_with_a_failure = comb(failures - 1, k - 1) / comb(count - 1, k - 1)
    return np.where(values > 0, failed / std, (failed - failed_with_a_failure) / std).astype(np.float32)


def plain_rewards(rewards: Rewards) -> Advantages:
    """REINFORCE: the reward itself, for a value head that subtracts a baseline: R - v (PipelineRL, arXiv 2509.19128)."""
    return _checked(rewards).astype(np.float32)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": group_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": leave_one_out_advantages,
    "max_rl": max_rl_advantages,
    "pass_at_k": pass_at_k_advantages,
    "reward": plain_rewards,
}


def zero_variance(rewards: Rewards) -> bool:
    """True if all rewards of a group are equal, so that its gradient is zero (DAPO, arXiv 2503.14476, section 3.2).

    Rewards within `EQUAL_WITHIN` of the largest count as equal, because dividing by their std would amplify rounding errors.

    Example:
        zero_variance([0.3, 0.1 + 0.2])  # -> True
    """
    values = np.asarray(rewards, np.float64)
    return bool(values.max() - values.min() <= EQUAL_WITHIN * np.abs(values).max())


def _checked(rewards: Rewards) -> npt.NDArray[np.float64]:
    """The rewards of one group as an array [K]. Raises `ValueError` for another shape, an empty group or a reward that is not finite."""
    values: npt.NDArray[Any] = np.asarray(rewards, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"a group's rewards must be a one-dimensional array, not of shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"a group's rewards must be finite numbers, not {values.tolist()}")
    return values


HIGH = 0.9
"""Position from which on a reward is (nearly) the full one."""
LOW = 0.5
"""Position below which prompts whose samples all have the same reward are too hard."""
RANGES: Mapping[str, tuple[float, float]] = {
    "exact_match": (0.0, 1.0),
    "math_verify": (0.0, 1.0),
    "reasoning_gym": (0.0, 1.0),
    "soft_overlong": (-1.0, 0.0),
}
"""Lowest and highest reward of the built-in functions whose rewards are bounded."""


@dataclass(slots=True)
class RewardScale:
    """Lowest and highest reward so far; built-in rewards have fixed ranges. Position 0 is the lowest reward, 1 the highest."""

    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, functions: Sequence[str], weights: Sequence[float] | None = None, *, by_source: Collection[str] = ()) -> Self:
        """The range of the weighted sum of built-in reward functions, before any reward is seen.

        Empty if a function has no fixed range, or if data sources have functions of their own (`by_source`).
        """
        scale = cls()
        if functions and not by_source and all(name in RANGES for name in functions):
            factors = weights or [1.0] * len(functions)
            ends = [sorted(factor * end for end in RANGES[name]) for name, factor in zip(functions, factors, strict=True)]
            scale.see([sum(low for low, _ in ends), sum(high for _, high in ends)])
        return scale

    def see(self, rewards: Iterable[float]) -> None:
        for reward in rewards:
            self.low, self.high = min(self.low, reward), max(self.high, reward)

    def position(self, reward: float) -> float | None:
        """Position of a reward between lowest (0) and highest (1), at most 1; None while they are equal."""
        return (reward - self.low) / (self.high - self.low) if self.low < self.high else None

    def advice(self, reward: float) -> str:
        """Advice on the choice of prompts, if every group has equal rewards whose mean is `reward`."""
        position = self.position(reward)
        if position is None or LOW <= position < HIGH:
            return "use easier or harder prompts, more samples per group, or a denser reward"
        if position >= HIGH:
            return "use harder prompts"
        return "the task is too hard: use easier prompts, more samples per group, or a denser reward"


def is_trained(sample: Rollout, *, truncated: str) -> bool:
    """True if the loss uses any token of a sample; `truncated` is `algorithm.truncated`."""
    cut = truncated == "mask" and sample.finish == "length"
    return not cut and sample.finish != "abort" and bool(sample.loss_mask.any())
