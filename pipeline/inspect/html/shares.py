"""Curves from groups: final status, and mean of each reward function; a point covers at least a minimum number of groups."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.pipeline.inspect.html.groups import Row
from penstock.pipeline.inspect.run_status import fates, steps_per_version
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.scheduling.fates import OPEN

LEAST_GROUPS = 16
"""Smallest number of groups in a point."""
MOST_POINTS = 60


def fate_shares(view: RunView) -> list[tuple[int, dict[str, float]]]:
    """(optimizer step, fate -> share) over the run, for all fates in it; a group without samples counts with the previous group."""
    ended = [(group, fate) for group, fate in sorted(fates(view).items()) if fate != OPEN]
    names, per_version = sorted({fate for _, fate in ended}), steps_per_version(view)
    size = max(LEAST_GROUPS, -(-len(ended) // MOST_POINTS))
    points: list[tuple[int, dict[str, float]]] = []
    counted, version = Counter[str](), 0
    for group, fate in ended:
        now = view.groups[group].version_min if group in view.groups else None
        if now is not None and now > version:
            if counted.total() >= size:
                points.append(_point(counted, version * per_version, names))
                counted.clear()
            version = now
        counted[fate] += 1
    if counted.total() >= size // 2 or not points:
        points.append(_point(counted, version * per_version, names))
    return points if ended else []


def _point(counted: Counter[str], step: int, names: Sequence[str]) -> tuple[int, dict[str, float]]:
    return step, {name: counted[name] / counted.total() for name in names}


def component_means(rows: Sequence[Row], *, step_of: Mapping[int, int], count: int) -> list[list[list[Any]]]:
    """For each reward function [step, mean] over the samples of each step's listed groups; None if it applies to none of them."""
    by_step: dict[int, list[tuple[float | None, ...]]] = {}
    for row in rows:
        if row.group in step_of:
            by_step.setdefault(step_of[row.group], []).extend(row.components)
    curves: list[list[list[Any]]] = [[] for _ in range(count)]
    for step, components in sorted(by_step.items()):
        for number, curve in enumerate(curves):
            values = [scores[number] for scores in components if number < len(scores)]
            applicable = [value for value in values if value is not None]
            curve.append([step, float(np.mean(applicable)) if applicable else None])
    return curves
