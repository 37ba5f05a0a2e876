"""Time of every role by use, and of every round of training, from the workers' own sums and the ledger's entries."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts
from penstock.pipeline.runtime.reporting.reporter import OUTSIDE, TRAINER_WAITS, USES
from penstock.pipeline.runtime.roles import ROLES

SHOWN = 0.005
"""Shares below this are left out of the text."""


def by_role(view: RunView) -> dict[str, dict[str, float]]:
    """Role -> seconds by use, over all its workers and their incarnations; `total_s` is their time, `workers` their number.

    The uses add up to the total.
    """
    spent: dict[str, dict[str, float]] = {}
    for worker in view.workers.values():
        uses = {use: worker.total(f"time_{use}_s") for use in USES}
        if any(uses.values()):
            role = spent.setdefault(worker.role, {"workers": 0.0, "total_s": 0.0})
            role["workers"] += 1
            role["total_s"] += worker.total("uptime_s")
            for use, seconds in uses.items():
                if seconds:
                    role[f"{use}_s"] = role.get(f"{use}_s", 0.0) + seconds
    return {role: spent[role] for role in ROLES if role in spent}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Use -> its share of a role's time between start and end of the work, the largest first.

    Example:
        shares({"total_s": 12.0, "start_s": 2.0, "busy_s": 4.0, "no_prompts_s": 6.0})  # -> {"no_prompts": 0.6, "busy": 0.4}
    """
    at_work = {use: seconds.get(f"{use}_s", 0.0) for use in USES if use not in OUTSIDE}
    total = sum(at_work.values())
    ordered = sorted(at_work.items(), key=lambda pair: -pair[1])
    return {use: spent / total for use, spent in ordered if spent} if total else {}


def trainer_time(view: RunView) -> tuple[float, float]:
    """Seconds in which the trainer could work, from start to end of the work, and those of them in which it waited."""
    seconds = by_role(view).get("trainer", {})
    lasted, waited = (sum(seconds.get(f"{use}_s", 0.0) for use in uses) for uses in (set(USES).difference(OUTSIDE), TRAINER_WAITS))
    return lasted, waited


def rounds(steps: Sequence[StepFacts], *, per_version: int) -> list[dict[str, float | None]]:
    """Of each round: its times in seconds by the definitions of arXiv 2606.26997, and the trainer's time by use.

    `first_dispatch_s`: first sample begun to first backward pass. `rollout_s`: first sample begun to last one ended.
    `rollout_to_train_end_s`: first sample begun to last step committed. `wait_s`, `compute_s` and `other_s` (decoding, digests, the
    ledger, publishing, checkpoints) add up to the time since the previous round, or since the start of the first step;
    `waiting_ratio` is the share of `wait_s` in it.
    """
    rows = []
    before: float | None = None
    for low in range(0, len(steps), per_version):
        members = steps[low : low + per_version]
        ended, begun = members[-1].time_s, before if before is not None else members[0].metrics.get("started_at")
        wait, compute = (sum(step.metrics.get(name, 0.0) for step in members) for name in ("wait_s", "compute_s"))
        first, last = _moments(members, "first_sample_at"), _moments(members, "last_sample_at")
        backward, lasted = _moments(members, "first_backward_at"), ended - begun if begun is not None else None
        rows.append(
            {
                "first_dispatch_s": min(backward) - min(first) if backward and first else None,
                "rollout_s": max(last) - min(first) if first and last else None,
                "rollout_to_train_end_s": ended - min(first) if first else None,
                "wait_s": wait,
                "compute_s": compute,
                "other_s": max(0.0, lasted - wait - compute) if lasted is not None else None,
                "waiting_ratio": wait / lasted if lasted else None,
            }
        )
        before = ended
    return rows


def length_order_correlation(view: RunView) -> float | None:
    """Rank correlation between the mean length of a trained group and its delay against submission order.

    Above 0 short completions are trained earlier than they were submitted; 0 under submission order. None for fewer than three groups.
    """
    trained = [group for number in sorted(view.steps) for group in view.steps[number].groups if view.samples.get(group)]
    if len(trained) < 3:
        return None
    submitted = {group: index for index, group in enumerate(sorted(trained))}
    later = np.array([index - submitted[group] for index, group in enumerate(trained)], float)
    lengths = np.array([np.mean(list(view.samples[group].values())) for group in trained])
    if not later.any() or np.ptp(lengths) == 0:
        return 0.0
    return float(np.corrcoef(_ranks(later), _ranks(lengths))[0, 1])


def as_json(view: RunView, steps: Sequence[StepFacts], *, per_version: int) -> dict[str, Any]:
    """`time_spent` by role, `rounds`, and the rank correlation, as the report has them."""
    return {
        "time_spent": {role: {**seconds, "shares": shares(seconds)} for role, seconds in by_role(view).items()},
        "rounds": rounds(steps, per_version=per_version),
        "length_order_correlation": length_order_correlation(view),
    }


def _moments(steps: Sequence[StepFacts], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]


def _ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Ranks from 0; equal values get the mean of theirs."""
    ordered, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    del ordered
    return ((np.cumsum(counts) - (counts + 1) / 2)[inverse]).astype(np.float64)
