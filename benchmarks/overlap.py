"""Overlap of rollout and training under each schedule, against the attainable overlap and the simulator's prediction.

    python -m benchmarks overlap examples/exact.toml --size 5m --repeats 5 --plot overlap.png

The rollout worker has one core and the trainer another; `in turns` has both cores for either phase. Runs alternate (a b c a b c ...), so
that a machine whose speed drifts treats the schedules alike; figures are medians over the repeats with the lowest and the highest.
Attainable is the time of a synchronous round whose shorter phase is hidden behind the longer one: saving at most
min(T_r, T_t) / (T_r + T_t) (arXiv 2606.26997). Predicted is `penstock plan --from-run` of the first synchronous run. The last lines
compare the first run of each schedule with its simulation from its own times.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.command import TRAINING_ONLY, penstock_json, report_of, run_parser, with_numbers
from benchmarks.support.random_model import SIZES, random_model

SYNCHRONOUS, IN_TURNS = "synchronous", "in turns, both cores"
ONE_CORE_EACH = ("rollout.workers=1", "trainer.threads=1", "launch.pin=auto")
ROUND = ("schedule.prompts_per_step=2", "schedule.samples_per_prompt=8", "schedule.steps_per_version=48", "run.steps=144")
"""R = 96 groups a round, of which a step takes U = 2: R / U = 48."""
EVERY_STEP = ("schedule.prompts_per_step=8", "schedule.samples_per_prompt=8", "schedule.steps_per_version=1", "run.steps=36")
"""As many samples, with weights published after every step."""
SIZED = ("trainer.micro_batch_tokens=4096", *TRAINING_ONLY)
VARIANTS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: (*ROUND, "schedule.mode=synchronous", *ONE_CORE_EACH),
    "pipelined": (*ROUND, "schedule.mode=pipelined", *ONE_CORE_EACH),
    "pipelined, by arrival": (*ROUND, "schedule.mode=pipelined", "schedule.order=arrival", *ONE_CORE_EACH),
    IN_TURNS: (*ROUND, "schedule.mode=synchronous", "rollout.workers=2", "trainer.threads=2"),
    "synchronous, S = 1": (*EVERY_STEP, "schedule.mode=synchronous", *ONE_CORE_EACH),
    "pipelined, S = 1": (*EVERY_STEP, "schedule.mode=pipelined", *ONE_CORE_EACH),
    "one_step_off": (*EVERY_STEP, "schedule.mode=one_step_off", *ONE_CORE_EACH),
    "bounded": (*EVERY_STEP, "schedule.mode=bounded", "rollout.engine=vllm", *ONE_CORE_EACH),
    "in_flight": (*EVERY_STEP, "schedule.mode=in_flight", "rollout.engine=vllm", *ONE_CORE_EACH),
}
PREDICTED_AS = {"pipelined": "pipelined"}
"""Variant -> the mode that the simulator predicts from the times of the synchronous run."""


def main(arguments: Sequence[str]) -> None:
    """Run, compare, print."""
    parser = run_parser(__name__, __doc__)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--size", choices=list(SIZES), help="use a random model of this size instead of the configuration's")
    with_numbers(parser, repeats=5, tokens=192)
    parser.add_argument("--plot", type=Path, help="a .png or .svg file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="overlap-") as directory:
        if chosen.size is not None:
            chosen.settings = [*SIZED, *random_model(Path(directory), size=chosen.size, tokens=chosen.tokens), *chosen.settings]
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Run all repeats of all variants and print the comparison."""
    variants = [SYNCHRONOUS, *(name for name in chosen.variants if name != SYNCHRONOUS)]
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    first = f"overlap-{os.getpid()}-{int(time.time())}"
    for repeat in range(chosen.repeats):
        for number, name in enumerate(variants):
            reports[name].append(report_of(chosen.config, f"{first}-{repeat}-{number}", [*VARIANTS[name], *chosen.settings]))
            print(f"{repeat} {name}: {reports[name][-1]['time']['train_s']:.1f} s", file=sys.stderr, flush=True)
    rollout, train = phases(reports[SYNCHRONOUS])
    plans = {name: penstock_json("plan", "--from-run", f"{first}-0-{number}") for number, name in enumerate(variants)}
    table = rows(reports, plans[SYNCHRONOUS])
    if chosen.plot is not None:
        plot(table, chosen.plot, rollout=rollout, train=train)
    if chosen.json:
        deviations = {name: plan["deviation"] for name, plan in plans.items()}
        figures = {"variants": table, "rollout_s": rollout, "train_s": train, "plan": plans[SYNCHRONOUS], "deviations": deviations}
        print(json.dumps(figures, indent=2))
        return
    show(table, rollout=rollout, train=train)
    for name, plan in plans.items():
        measured, simulated = plan["measured_wall_s"], plan["simulated_wall_s"]
        print(f"{name} took {measured:.1f} s, simulated with its own times {simulated:.1f} s ({plan['deviation']:+.1%})")


def phases(reports: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(rollout, training) seconds of a synchronous round, medians over all rounds; training is what follows the last sample."""
    rounds = [each for report in reports for each in report["rounds"] if each["rollout_s"] is not None]
    rollout = statistics.median(each["rollout_s"] for each in rounds)
    return rollout, statistics.median(each["rollout_to_train_end_s"] - each["rollout_s"] for each in rounds)


def rows(reports: Mapping[str, Sequence[Mapping[str, Any]]], plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant: times, saving, and its share of the attainable and of the predicted saving."""
    rollout, train = phases(reports[SYNCHRONOUS])
    attainable = min(rollout, train) / (rollout + train)
    base = statistics.median(report["time"]["train_s"] for report in reports[SYNCHRONOUS])
    simulated = {each["mode"]: each["wall_s"] for each in plan["variants"] if each["workers"] == plan["workers"]}
    table = []
    for name, runs in reports.items():
        wall = [report["time"]["train_s"] for report in runs]
        saving = 1 - statistics.median(wall) / base
        mode = PREDICTED_AS.get(name)
        expected = 1 - simulated[mode] / simulated["synchronous"] if mode in simulated else None
        dispatches = [each["first_dispatch_s"] for report in runs for each in report["rounds"] if each["first_dispatch_s"] is not None]
        row = {
            "variant": name, "wall_s": statistics.median(wall), "spread_s": [min(wall), max(wall)], "saving": saving,
            "of_attainable": saving / attainable if mode else None, "of_predicted": saving / expected if expected else None,
            "trainer_waiting_ratio": statistics.median(report["time"]["trainer_waiting_ratio"] for report in runs),
            "first_dispatch_s": statistics.median(dispatches), "lag_mean": statistics.fmean(report["lag"]["mean"] for report in runs),
            "digests": sorted({str(report["weights"]["digest"])[:16] for report in runs}),
        }  # fmt: skip
        table.append(row)
    return table


def show(table: Sequence[Mapping[str, Any]], *, rollout: float, train: float) -> None:
    """Print the table, and the limit below it."""
    print(
        f"{'variant':<24}{'wall s':>8}{'lowest':>8}{'highest':>8}{'saving':>8}{'of limit':>9}{'of sim.':>9}{'waiting':>9}{'lag':>6}  digest"
    )
    for row in table:
        low, high = row["spread_s"]
        shares = "".join(f"{'-' if row[name] is None else format(row[name], '.0%'):>9}" for name in ("of_attainable", "of_predicted"))
        print(
            f"{row['variant']:<24}{row['wall_s']:>8.1f}{low:>8.1f}{high:>8.1f}{row['saving']:>8.0%}{shares}"
            f"{row['trainer_waiting_ratio']:>9.0%}{row['lag_mean']:>6.2f}  {' '.join(row['digests'])}"
        )
    limit = min(rollout, train) / (rollout + train)
    hint = "" if 1.0 <= train / rollout <= 1.2 else "; change --set sampling.max_new_tokens to bring their ratio to 1.0-1.2"
    phases_s = f"{rollout:.2f} s rollout, {train:.2f} s training ({train / rollout:.2f})"
    print(f"a synchronous round: {phases_s}; attainable saving {limit:.1%}{hint}")


def plot(table: Sequence[Mapping[str, Any]], path: Path, *, rollout: float, train: float) -> None:
    """Plot wall times as bars with their spread, and the attainable time as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(table) + 1.2), layout="constrained")
    canvas = (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    axes = figure.add_subplot()
    names, wall = [row["variant"] for row in table], [row["wall_s"] for row in table]
    spread = [[row["wall_s"] - row["spread_s"][0] for row in table], [row["spread_s"][1] - row["wall_s"] for row in table]]
    axes.barh(names, wall, xerr=spread, color="#0b7285", height=0.6, capsize=3)
    axes.axvline(wall[0] * max(rollout, train) / (rollout + train), color="#e8590c", ls="--", lw=1.5, label="attainable")
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the first sample to the last step")
    axes.legend(loc="lower right")
    canvas.print_figure(path, dpi=150)
