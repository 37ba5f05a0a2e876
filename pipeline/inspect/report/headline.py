"""Summary sentences of a report: whether the run learned, what went wrong, and what to change."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.pipeline.inspect.report.formats import percent

NOISE = 2.5
"""Standard errors that the change between the curve's ends must exceed: rewards that only fluctuate do so in less than 5 % of runs."""
LEAST_POINTS = 8
"""Smallest number of points for an estimate of the curve's noise."""
LEAST_CHANGE = 0.01
STAGES = {
    "trainer": "training is the bottleneck",
    "scorer": "scoring is the bottleneck",
    "rollout": "generation is the bottleneck",
    "feeder": "the feeder is the bottleneck",
    "turns": "the stages alternate",
}
"""Meaning of each bottleneck of `penstock.pipeline.inspect.status`."""


def headline(report: Mapping[str, Any]) -> list[str]:
    """Summary sentences of a report; the first is about whether the run learned."""
    return [learned(report), *warnings(report), *(f"{step[0].upper()}{step[1:]}." for step in next_steps(report))]


def learned(report: Mapping[str, Any]) -> str:
    """A sentence on the change of the reward against the noise of its curve; inconclusive with few points."""
    first, last = report["reward"]["first"], report["reward"]["last"]
    if not report["steps"]:
        return "No optimizer step was taken."
    if first is None or last is None:
        return f"{report['steps']:,} steps; no sample has a reward."
    curve = [value for value in report["reward"].get("curve") or () if value is not None]
    advice = ""
    if len(curve) < LEAST_POINTS:
        result = "Too short to tell"
    elif abs(last - first) <= max(LEAST_CHANGE, NOISE * standard_error(curve)):
        result = "No clear change"
    elif last > first:
        result = "It learned"
    else:
        result, advice = "It got worse", "; try a smaller trainer.lr"
    return f"{result}: reward {first:.2f} -> {last:.2f}{_held_out(report.get('eval') or ())}{advice}."


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Sentences about what makes a run's figures doubtful."""
    lines = []
    if changed := report.get("changed"):
        names = ", ".join(dict.fromkeys(str(change["what"]) for change in changed))
        lines.append(f"Changed while the run was stopped: {names}. Rewards before and after may not be comparable.")
    failed = report["groups"].get("failed", 0)
    if failed and not any(waste["fate"] == "failed" for waste in report.get("waste", ())):
        lines.append(f"{failed:,} groups failed because their reward could not be computed; the dead letters have the errors.")
    return lines


def next_steps(report: Mapping[str, Any]) -> list[str]:
    """The change to make next: for the causes of dropped groups if they are many, otherwise the bottleneck."""
    if wastes := report.get("waste", ())[:2]:
        return [f"{waste['why']}: {waste['advice']}" for waste in wastes]
    bottleneck = report.get("bottleneck")
    return [f"{STAGES[bottleneck['who']]}: {bottleneck['advice']}"] if bottleneck and report["steps"] else []


def standard_error(curve: list[float]) -> float:
    """That of the difference between the means of the curve's first and last tenth, under noise alone."""
    return noise(curve) * math.sqrt(2 / math.ceil(len(curve) / 10))


def noise(curve: list[float]) -> float:
    """Standard deviation of the noise around a smooth curve, from the differences of neighbouring points.

    Example:
        noise([0.0, 1.0, 2.0, 3.0])  # -> 0.0
    """
    steps = [later - earlier for earlier, later in itertools.pairwise(curve)]
    return statistics.pstdev(steps) / 2**0.5 if len(steps) > 1 else 0.0


def _held_out(evals: Sequence[Mapping[str, Any]]) -> str:
    solved = [entry["greedy_accuracy"] for entry in evals if entry.get("greedy_accuracy") is not None]
    rewards = [entry["greedy_reward"] for entry in evals if entry.get("greedy_reward") is not None]
    if len(solved) > 1 and any(solved):
        return f", held-out accuracy {percent(solved[0])} -> {percent(solved[-1])}"
    return f", held-out reward {rewards[0]:.2f} -> {rewards[-1]:.2f}" if len(rewards) > 1 else ""
