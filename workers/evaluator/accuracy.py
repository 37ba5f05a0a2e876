"""Evaluation metrics: accuracy with its interval, pass@k, and early stopping. Pure functions of rewards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.pipeline.rewards.functions import Score

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


def pass_at(k: int, *, solved: int, samples: int) -> float:
    """Probability that at least one of k samples, taken without replacement, is among the solved ones (arXiv 2107.03374, section 2.1).

    Example:
        pass_at(2, solved=1, samples=4)  # -> 0.5
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def summary(
    *, greedy: Sequence[Score | None], sampled: Sequence[Score | None], samples: int, names: Sequence[str], threshold: float
) -> dict[str, float]:
    """Accuracies with 95 % intervals, pass@k and mean rewards of one version; a prompt whose reward broke is None.

    A prompt with a completion without a reward counts as one whose reward broke: its completions are counted in `n_failed` only. `greedy`
    has one completion a prompt, `sampled` has `samples`; `names` are the reward functions. A completion whose reward reaches the
    threshold is solved. avg@k's interval is over prompts, whose k samples are not independent.
    """
    greedy, sampled = ([score if score and None not in score.rewards else None for score in scores] for scores in (greedy, sampled))
    failed = sum(score is None for score in greedy) + samples * sum(score is None for score in sampled)
    values = {"n": float(len(greedy)), "samples": float(samples), "n_failed": float(failed)}
    ones, many = [score for score in greedy if score is not None], [score for score in sampled if score is not None]
    if ones:
        solved = sum(_solved(score, threshold)[0] for score in ones)
        low, high = wilson(solved, len(ones))
        values |= {"greedy_accuracy": solved / len(ones), "greedy_low": low, "greedy_high": high, **_rewards("greedy", ones, names)}
    if many:
        counts = [sum(_solved(score, threshold)) for score in many]
        mean = sum(counts) / (len(counts) * samples)
        spread = math.sqrt(sum((count / samples - mean) ** 2 for count in counts) / (len(counts) - 1)) if len(counts) > 1 else 0.0
        half = Z95 * spread / math.sqrt(len(counts))
        values |= {"sampled_accuracy": mean, "sampled_low": max(0.0, mean - half), "sampled_high": min(1.0, mean + half)}
        for k in sorted({samples, *(2**power for power in range(samples.bit_length()))} - {1}):
            values[f"pass_at_{k}"] = sum(pass_at(k, solved=count, samples=samples) for count in counts) / len(counts)
        values |= {"pass_at_k": values.get(f"pass_at_{samples}", mean), **_rewards("sampled", many, names)}
    return values


def _solved(score: Score, threshold: float) -> list[bool]:
    return [reward >= threshold - 1e-9 for reward in score.scored]


def _rewards(how: str, scores: Sequence[Score], names: Sequence[str]) -> dict[str, float]:
    """Mean reward, and the mean of each function over the completions that it applies to."""
    totals = [reward for score in scores for reward in score.scored]
    means = {f"{how}_reward": sum(totals) / len(totals)}
    for index, name in enumerate(names):
        values = [row[index] for score in scores for row in score.components]
        applying = [value for value in values if value is not None]
        if applying:
            means[f"{how}_reward/{name}"] = sum(applying) / len(applying)
    return means


def due(*, newest: int, last: int, every: int, done: set[int], closed: bool) -> int | None:
    """The next version to evaluate, or None: 0 first, then every n-th in order, and always the last one.

    Once the run is closed, intermediate versions that were not reached are skipped.
    """
    if 0 not in done and newest >= 0:
        return 0
    if closed:
        return newest if newest not in done and newest > 0 else None
    versions = [version for version in range(every, newest + 1, every) if version not in done]
    if last <= newest and last not in done:
        versions.append(last)
    return min(versions, default=None)


@dataclass(slots=True)
class EarlyStopping:
    """Requests the end of a run once a target is reached or accuracy no longer improves."""

    target: float | None
    patience: int | None
    best: float = -math.inf
    best_version: int | None = None
    since_best: int = 0

    def note(self, *, version: int, accuracy: float | None) -> str | None:
        """Apply an evaluation; returns the reason to stop, or None. An evaluation without an accuracy is ignored."""
        if accuracy is None:
            return None
        if accuracy > self.best:
            self.best, self.best_version, self.since_best = accuracy, version, 0
        else:
            self.since_best += 1
        if self.target is not None and accuracy >= self.target:
            return f"greedy accuracy {accuracy:.3f} of version {version} reached the target {self.target:g}"
        if self.patience is not None and self.since_best >= self.patience:
            return f"{self.since_best} evaluations since the best greedy accuracy, {self.best:.3f} of version {self.best_version}"
        return None
