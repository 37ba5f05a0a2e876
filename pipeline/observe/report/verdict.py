"""What a run came to, in a sentence or two: did it learn, what held it back, what to try.

The rule: a pure function of the report; a change within the noise of the curve is called none, and a few points are called too few.
"""

import itertools
import math
import statistics
from collections.abc import Mapping
from typing import Any

NOISE = 2.5
"""Standard errors that the change between the curve's ends must exceed: rewards that only fluctuate do so in less than 5 % of runs."""
LEAST_POINTS = 8
"""Points of the curve below which their scatter says too little about the noise."""
LEAST_CHANGE = 0.01
ADVICE_WITHOUT = {"advice": "more rollout workers would make it faster"}
"""The advice when it is not known which role the trainer waited for."""


def verdict(report: Mapping[str, Any]) -> list[str]:
    """The sentences, the first about learning."""
    lines = [_learned(report)]
    if changed := report.get("changed"):
        what = ", ".join(dict.fromkeys(str(change["what"]) for change in changed))
        lines.append(f"Changed while the run was stopped: {what}. Rewards before and after may not be comparable.")
    lines += [f"{waste['why']}: {waste['advice']}." for waste in report.get("waste", ())[:2]]
    failed = report["groups"].get("failed", 0)
    if failed and not any(waste["fate"] == "failed" for waste in report.get("waste", ())):
        lines.append(f"{failed:,} groups failed, as their reward could not be computed; the dead letters hold the error.")
    waited = (report.get("time") or {}).get("trainer_waiting_ratio")
    if report["steps"] and waited is not None and waited > 0.6 and not report.get("waste"):
        found = report.get("bottleneck") or ADVICE_WITHOUT
        lines.append(f"The trainer waited {waited:.0%} of its time for samples: {found['advice']}.")
    return lines


def _learned(report: Mapping[str, Any]) -> str:
    reward, evals = report["reward"], report.get("eval") or []
    if not report["steps"]:
        return "No optimizer step was taken."
    held = _held_out(evals)
    first, last = reward["first"], reward["last"]
    if first is None or last is None:
        return f"{report['steps']:,} steps; no sample has a reward."
    change = last - first
    span, advice = f" in {report['steps']:,} steps{held}", ""
    known = [value for value in reward.get("curve") or () if value is not None]
    if len(known) < LEAST_POINTS:
        said = f"Too short to tell: the reward was {first:.3f} at first and {last:.3f} at last"
    elif abs(change) <= max(LEAST_CHANGE, NOISE * standard_error(known)):
        said = f"No clear change: the reward was {first:.3f} at first and {last:.3f} at last"
    elif change > 0:
        said = f"It learned: the reward rose from {first:.3f} to {last:.3f}"
    else:
        said = f"It got worse: the reward fell from {first:.3f} to {last:.3f}"
        advice = "; try a smaller trainer.lr"
    return f"{said}{span}{advice}."


def standard_error(curve: list[float]) -> float:
    """That of the difference between the means of the curve's first and last tenth, under noise alone."""
    return noise(curve) * math.sqrt(2 / math.ceil(len(curve) / 10))


def noise(curve: list[float]) -> float:
    """Standard deviation of the noise around a smooth curve, by the differences of neighbouring points.

    Example:
        noise([0.0, 1.0, 2.0, 3.0])  # -> 0.0
    """
    steps = [later - earlier for earlier, later in itertools.pairwise(curve)]
    return statistics.pstdev(steps) / 2**0.5 if len(steps) > 1 else 0.0


def _held_out(evals: list[Mapping[str, Any]]) -> str:
    solved = [found["greedy_accuracy"] for found in evals if found.get("greedy_accuracy") is not None]
    rewards = [found["greedy_reward"] for found in evals if found.get("greedy_reward") is not None]
    if len(solved) > 1 and any(solved):
        return f", held-out prompts solved from {solved[0]:.0%} to {solved[-1]:.0%}"
    return f", held-out reward from {rewards[0]:.3f} to {rewards[-1]:.3f}" if len(rewards) > 1 else ""
