"""Plots of a run for a notebook; needs matplotlib, from the extra `notebook`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.infra.errors import PenstockError

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

MOST_ACROSS = 3
SIZE = (4.6, 2.9)
"""Inches of one curve."""


def figure(report: Mapping[str, Any], steps: "pa.Table", measures: Sequence[str]) -> "Figure":
    """Plot curves next to each other: of these columns of the steps, by default reward, evaluation and group statuses.

    Raises `ValueError` for a column that the steps do not have, `PenstockError` without matplotlib.
    """
    if unknown := [name for name in measures if name not in steps.column_names]:
        raise ValueError(f"there is no measure {unknown[0]!r}; the steps have {', '.join(sorted(steps.column_names))}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PenstockError("pictures need matplotlib: pip install '.[notebook]' in the checkout") from error
    across = min(MOST_ACROSS, len(measures) or MOST_ACROSS)
    down = -(-max(1, len(measures)) // across)
    made = Figure(figsize=(SIZE[0] * across, SIZE[1] * down), layout="constrained")
    axes = list(made.subplots(down, across, squeeze=False).flat)
    if measures:
        for one, name in zip(axes, measures, strict=False):
            _curve(one, name, steps["step"].to_pylist(), {name: steps[name].to_pylist()})
        for spare in axes[len(measures) :]:
            spare.remove()
    else:
        _overview(axes, report, steps)
    made.suptitle(f"run {report['run']}")
    return made


def _overview(axes: Sequence[Any], report: Mapping[str, Any], steps: "pa.Table") -> None:
    trained = steps["reward_trained"].to_pylist() if "reward_trained" in steps.column_names else []
    _curve(axes[0], "reward of the trained samples", steps["step"].to_pylist()[: len(trained)], {"reward": trained})
    evals = report["eval"]
    names = [name for name in ("greedy_accuracy", "sampled_accuracy", "greedy_reward") if any(name in one for one in evals)]
    _curve(axes[1], "held-out, by version", [one["version"] for one in evals], {name: [one.get(name) for one in evals] for name in names})
    fates = {name: count for name, count in report["groups"].items() if count and name != "admitted"}
    axes[2].barh(list(fates), list(fates.values()))
    axes[2].set_title("groups by fate")
    axes[2].invert_yaxis()


def _curve(axes: Any, title: str, positions: Sequence[float], curves: Mapping[str, Sequence[Any]]) -> None:
    marker = "." if len(positions) < 20 else ""
    for name, values in curves.items():
        axes.plot(positions, [float("nan") if value is None else value for value in values], label=name, marker=marker)
    axes.set_title(title)
    axes.set_xlabel("step" if "version" not in title else "version")
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1:
        axes.legend()
