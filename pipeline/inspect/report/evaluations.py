"""Evaluations of a run, and completions of the same held-out prompts under the first and the newest evaluated version."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.pipeline.inspect.run_view import RunView
from penstock.topics.metrics import Measurement

SAME = 0.0005
"""A mean reward this close to the share of solved prompts is the same number: every reward was 0 or 1."""


def evaluations(view: RunView) -> list[dict[str, Any]]:
    """The measures of every evaluated version, in order."""
    return [{"version": version, **measured.values, **_source(measured.labels)} for version, measured in sorted(view.evals.items())]


def examples(view: RunView) -> list[dict[str, Any]]:
    """A few held-out prompts with the greedy completions and rewards of the first and the newest evaluated version."""
    versions = sorted(view.evals)
    if len(versions) < 2:
        return []
    before, after = (_completions(view.evals[version]) for version in (versions[0], versions[-1]))
    return [
        {
            "prompt": prompt,
            "before": {"version": versions[0], **before[prompt]},
            "after": {"version": versions[-1], **after[prompt]},
        }
        for prompt in before
        if prompt in after
    ]


def held_out(values: Mapping[str, float], how: str) -> str | None:
    """The mean reward of an evaluation's greedy or sampled completions, and how many were solved where that is another number.

    Example:
        held_out({"greedy_reward": 0.38, "greedy_accuracy": 0.03}, "greedy")  # -> "greedy 0.380 (3% solved)"
    """
    reward, solved = values.get(f"{how}_reward"), values.get(f"{how}_accuracy")
    if reward is None or solved is None:  # an evaluator of an earlier release measured no reward
        return None if solved is None else f"{how} {solved:.3f}"
    return f"{how} {reward:.3f}" + (f" ({solved:.0%} solved)" if abs(reward - solved) >= SAME else "")


def one_line(text: str, limit: int) -> str:
    """A text on one line; of a long one start and end, since the question is at the end of a prompt.

    Example:
        one_line("abcdefghij", 6)  # -> "ab … ij"
    """
    line = " ".join(text.split())
    half = (limit - 1) // 2
    return line if len(line) <= limit else f"{line[:half]} … {line[-half:]}"


def _completions(measured: Measurement) -> dict[str, dict[str, Any]]:
    """Prompt -> completion and reward; empty if the evaluator recorded none or in another format."""
    try:
        recorded = json.loads(measured.labels.get("examples", "[]"))
        return {str(example["prompt"]): {"completion": str(example["completion"]), "reward": example["reward"]} for example in recorded}
    except (ValueError, TypeError, KeyError):
        return {}


def _source(labels: Mapping[str, str]) -> dict[str, str]:
    return {"source": labels["source"]} if "source" in labels else {}
