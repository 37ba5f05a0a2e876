"""What `overlap.py` shows: each schedule's time beside what is attainable and what the simulator predicts.

The rule: pure functions of the runs' reports and of one `penstock plan --from-run`; figures are medians over the repeats.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SYNCHRONOUS = "synchronous"
PREDICTED_AS = {"pipelined": "pipelined"}
"""Variant -> the mode that the simulator gives for the synchronous run's times."""


def phases(reports: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(rollout, training) seconds of a synchronous round, medians over all rounds; training is what follows the last sample."""
    rounds = [one for report in reports for one in report["rounds"] if one["rollout_s"] is not None]
    rollout = statistics.median(one["rollout_s"] for one in rounds)
    return rollout, statistics.median(one["rollout_to_train_end_s"] - one["rollout_s"] for one in rounds)


def rows(reports: Mapping[str, Sequence[Mapping[str, Any]]], plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant: times, saving, and its share of what is attainable and of what was predicted."""
    rollout, train = phases(reports[SYNCHRONOUS])
    attainable = min(rollout, train) / (rollout + train)
    base = statistics.median(report["time"]["train_s"] for report in reports[SYNCHRONOUS])
    simulated = {one["mode"]: one["wall_s"] for one in plan["variants"] if one["workers"] == plan["workers"]}
    found = []
    for name, done in reports.items():
        wall = [report["time"]["train_s"] for report in done]
        saving = 1 - statistics.median(wall) / base
        mode = PREDICTED_AS.get(name)
        expected = 1 - simulated[mode] / simulated["synchronous"] if mode in simulated else None
        found.append(
            {
                "variant": name,
                "wall_s": statistics.median(wall),
                "spread_s": [min(wall), max(wall)],
                "saving": saving,
                "of_attainable": saving / attainable if mode else None,
                "of_predicted": saving / expected if expected else None,
                "trainer_waiting_ratio": statistics.median(report["time"]["trainer_waiting_ratio"] for report in done),
                "first_dispatch_s": statistics.median(
                    one["first_dispatch_s"] for report in done for one in report["rounds"] if one["first_dispatch_s"] is not None
                ),
                "lag_mean": statistics.fmean(report["lag"]["mean"] for report in done),
                "digests": sorted({str(report["weights"]["digest"])[:16] for report in done}),
            }
        )
    return found


def show(found: Sequence[Mapping[str, Any]], *, rollout: float, train: float) -> None:
    """The table, and the limit below it."""
    print(
        f"{'variant':<24}{'wall s':>8}{'lowest':>8}{'highest':>8}{'saving':>8}{'of limit':>9}{'of sim.':>9}{'waiting':>9}{'lag':>6}  digest"
    )
    for row in found:
        low, high = row["spread_s"]
        shares = "".join(f"{'-' if row[name] is None else format(row[name], '.0%'):>9}" for name in ("of_attainable", "of_predicted"))
        print(
            f"{row['variant']:<24}{row['wall_s']:>8.1f}{low:>8.1f}{high:>8.1f}{row['saving']:>8.0%}{shares}"
            f"{row['trainer_waiting_ratio']:>9.0%}{row['lag_mean']:>6.2f}  {' '.join(row['digests'])}"
        )
    limit = min(rollout, train) / (rollout + train)
    print(
        f"a synchronous round: {rollout:.2f} s rollout, {train:.2f} s training ({train / rollout:.2f}); attainable saving {limit:.1%}"
        + ("" if 1.0 <= train / rollout <= 1.2 else "; change --set sampling.max_new_tokens to bring their ratio to 1.0-1.2")
    )


def draw(found: Sequence[Mapping[str, Any]], path: Path, *, rollout: float, train: float) -> None:
    """Wall times as bars with their spread, and the attainable time as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(found) + 1.2), layout="constrained")
    canvas = (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    axes = figure.add_subplot()
    names, wall = [row["variant"] for row in found], [row["wall_s"] for row in found]
    spread = [[row["wall_s"] - row["spread_s"][0] for row in found], [row["spread_s"][1] - row["wall_s"] for row in found]]
    axes.barh(names, wall, xerr=spread, color="#0b7285", height=0.6, capsize=3)
    axes.axvline(wall[0] * max(rollout, train) / (rollout + train), color="#e8590c", ls="--", lw=1.5, label="attainable")
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the first sample to the last step")
    axes.legend(loc="lower right")
    canvas.print_figure(path, dpi=150)
