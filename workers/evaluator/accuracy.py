"""The arithmetic of evaluations: accuracy with its interval, and early stopping.

The rule: pure functions of rewards; `best` means the best evaluation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson, Journal of the American Statistical Association 22, 1927).

    Example:
        wilson(8, 10)  # -> (0.490, 0.943)
    """
    if trials == 0:
        return (0.0, 1.0)
    p, z2 = successes / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return (max(0.0, centre - half), min(1.0, centre + half))


def summary(*, greedy: Sequence[bool], sampled: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Greedy accuracy, avg@k and pass@k of one version, with 95 % intervals.

    `greedy` has one entry per prompt, `sampled` k per prompt. avg@k's interval is over prompts, whose k samples are not independent.
    """
    prompts, k = len(greedy), len(sampled[0]) if sampled else 0
    low, high = wilson(sum(greedy), prompts)
    means = [sum(row) / len(row) for row in sampled]
    mean = sum(means) / len(means) if means else 0.0
    spread = math.sqrt(sum((value - mean) ** 2 for value in means) / (len(means) - 1)) if len(means) > 1 else 0.0
    half = Z95 * spread / math.sqrt(len(means)) if means else 0.0
    return {
        "n": float(prompts),
        "samples": float(k),
        "greedy_accuracy": sum(greedy) / prompts,
        "greedy_low": low,
        "greedy_high": high,
        "sampled_accuracy": mean,
        "sampled_low": max(0.0, mean - half),
        "sampled_high": min(1.0, mean + half),
        "pass_at_k": sum(any(row) for row in sampled) / len(sampled) if sampled else 0.0,
    }


def due(*, newest: int, last: int, every: int, done: set[int], closed: bool) -> int | None:
    """The next version to evaluate, or None: 0 first, then every n-th in order, and always the last one.

    Once the run is closed, versions between that were not reached are left out.
    """
    if 0 not in done and newest >= 0:
        return 0
    if closed:
        return newest if newest not in done and newest > 0 else None
    wanted = [version for version in range(every, newest + 1, every) if version not in done]
    if last <= newest and last not in done:
        wanted.append(last)
    return min(wanted, default=None)


@dataclass(slots=True)
class EarlyStopping:
    """Asks for the end of a run once a target is reached or accuracy no longer improves."""

    target: float | None
    patience: int | None
    best: float = -math.inf
    best_version: int | None = None
    since_best: int = 0

    def note(self, *, version: int, accuracy: float) -> str | None:
        """Apply an evaluation; returns the reason to stop, or None."""
        if accuracy > self.best:
            self.best, self.best_version, self.since_best = accuracy, version, 0
        else:
            self.since_best += 1
        if self.target is not None and accuracy >= self.target:
            return f"greedy accuracy {accuracy:.3f} of version {version} reached the target {self.target:g}"
        if self.patience is not None and self.since_best >= self.patience:
            return f"{self.since_best} evaluations since the best greedy accuracy, {self.best:.3f} of version {self.best_version}"
        return None
