"""Changes of a run's data and code while it was stopped."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.pipeline.observe.run_view_types import StepFacts


def changes(info: Mapping[str, Any], steps: Sequence[StepFacts]) -> list[dict[str, Any]]:
    """The changes in a run's record, each with the number of steps that were done before it."""
    return [{**change, "steps": sum(step.time_s <= change["time_ns"] / 1e9 for step in steps)} for change in info.get("changes", ())]


def change_line(change: Mapping[str, Any]) -> str:
    """A change in words.

    Example:
        change_line({"what": "reward a.py:f", "steps": 3, "before": "1f…", "after": "9c…"})  # -> "reward a.py:f after 3 steps: 1f… -> 9c…"
    """
    return f"{change['what']} after {change['steps']:,} steps: {change['before'][:12]} -> {change['after'][:12]}"
