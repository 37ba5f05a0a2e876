"""The range of a run's rewards, and the position of a reward within it: 0 is the lowest, 1 the full reward.

Built-in rewards have fixed ranges. For a user's reward function the range is that of the rewards seen in the run.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

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
    """Lowest and highest reward so far."""

    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, functions: Sequence[str], weights: Sequence[float] | None = None, *, by_source: Collection[str] = ()) -> Self:
        """The scale before any reward is seen; empty unless every function has a fixed range, and the same for all sources.

        Example:
            RewardScale.of(["exact_match", "soft_overlong"], [2.0, 1.0])  # -> RewardScale(low=-1.0, high=2.0)
        """
        scale = cls()
        if functions and not by_source and all(name in RANGES for name in functions):
            factors = weights or [1.0] * len(functions)
            ends = [sorted(factor * end for end in RANGES[name]) for name, factor in zip(functions, factors, strict=True)]
            scale.see([sum(low for low, _ in ends), sum(high for _, high in ends)])
        return scale

    def see(self, rewards: Iterable[float]) -> None:
        """Widen the scale to these rewards."""
        for reward in rewards:
            self.low, self.high = min(self.low, reward), max(self.high, reward)

    def position(self, reward: float) -> float | None:
        """Position of a reward, at most 1; None while the scale has no width.

        Example:
            RewardScale(-1.0, 1.0).position(0.8)  # -> 0.9
        """
        return (reward - self.low) / (self.high - self.low) if self.low < self.high else None

    def advice(self, reward: float) -> str:
        """Advice on prompts, if the samples of each have equal rewards, this one on average."""
        position = self.position(reward)
        if position is None or LOW <= position < HIGH:
            return "take prompts of another difficulty, more samples a group or a denser reward"
        if position >= HIGH:
            return "take harder prompts"
        return "the task is too hard: take easier prompts, more samples a group or a denser reward"
