"""Overlap of rollout and training under each schedule, against the attainable overlap and the simulator's prediction.

    python -m benchmarks overlap examples/exact.toml
    python -m benchmarks overlap examples/exact.toml --variants pipelined --repeats 5 --plot overlap.png

First both phases compute alone and side by side without Penstock, each on a core of its own, as `speed contention` does: they share
caches and memory, and the slowdown is what this machine takes. The rollout worker then has one core and the trainer another; `in turns`
has both cores for either phase. Runs alternate (a b c a b c ...), so that a machine whose speed drifts treats the schedules alike;
figures are medians over the repeats with the lowest and the highest. The limit is the time of a synchronous round whose shorter phase is
hidden behind the longer one, at the slowdown that was measured; without slowdown it is min(T_r, T_t) / (T_r + T_t) (arXiv 2606.26997). The
phases of the default model and group size are about equally long. Predicted is `penstock plan --from-run` of the first synchronous
run. The last lines compare the first run of each schedule with its simulation from its own times.
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

from benchmarks.speed.contention import Times, side_by_side
from benchmarks.support.command import TRAINING_ONLY, penstock_json, report_of, run_parser, with_numbers
from benchmarks.support.random_model import SIZES, random_model

SYNCHRONOUS, IN_TURNS = "synchronous", "in turns, both cores"
ONE_CORE_EACH = ("rollout.workers=1", "trainer.threads=1", "launch.pin=auto")
SAMPLES = "schedule.samples_per_prompt=48"
"""A group is decoded in one batch: with this many samples of the default model training it takes about as long."""
ROUND = ("schedule.prompts_per_step=1", SAMPLES, "schedule.steps_per_version=48", "run.steps=48")
"""R / U = 48 optimizer steps in a round."""
EVERY_STEP = ("schedule.prompts_per_step=4", SAMPLES, "schedule.steps_per_version=1", "run.steps=12")
"""As many samples, with weights published after every step."""
SIZED = ("trainer.micro_batch_tokens=768", *TRAINING_ONLY)
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
    parser.add_argument("--size", choices=[*SIZES, "own"], default="5m", help="a random model of this size; own: the configuration's")
    with_numbers(parser, repeats=3, tokens=96, seconds=10.0)
    parser.add_argument("--plot", type=Path, help="a .png or .svg file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="overlap-") as directory:
        if chosen.size != "own":
            chosen.settings = [*SIZED, *random_model(Path(directory), size=chosen.size, tokens=chosen.tokens), *chosen.settings]
        settings = ["trainer.threads=1", SAMPLES, *chosen.settings, "trainer.lr=1e-12"]
        compare(chosen, slowdown=slowdowns(side_by_side(chosen.config, settings, repeats=chosen.repeats, seconds=chosen.seconds)))


def slowdowns(times: Mapping[str, Times]) -> tuple[float, float]:
    """(rollout, training): how many times as long each phase takes beside the other one; prints it."""
    for phase, each in times.items():
        print(f"without Penstock, {phase}: {each.alone:.2f} s alone, {each.slowdown:.2f} times as long beside the other phase")
    return times["generate"].slowdown, times["train"].slowdown


def attainable(rollout: float, train: float, slowdown: tuple[float, float]) -> float:
    """Largest share of a synchronous round that overlap can save: both phases until the shorter one ends, the rest of the other alone.

    Example:
        attainable(10.0, 10.0, (1.0, 1.0))    # -> 0.5
        attainable(10.0, 10.0, (1.25, 1.25))  # -> 0.375
    """
    beside = min(rollout * slowdown[0], train * slowdown[1])
    rest = rollout - beside / slowdown[0] + train - beside / slowdown[1]
    return 1 - (beside + rest) / (rollout + train)


def compare(chosen: argparse.Namespace, *, slowdown: tuple[float, float]) -> None:
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
    table = rows(reports, plans[SYNCHRONOUS], slowdown=slowdown)
    limit = attainable(rollout, train, slowdown)
    if chosen.plot is not None:
        plot(table, chosen.plot, limit=limit)
    if chosen.json:
        deviations = {name: plan["deviation"] for name, plan in plans.items()}
        figures = {
            "variants": table,
            "rollout_s": rollout,
            "train_s": train,
            "slowdown": slowdown,
            "attainable": limit,
            "plan": plans[SYNCHRONOUS],
            "deviations": deviations,
        }
        print(json.dumps(figures, indent=2))
        return
    show(table, rollout=rollout, train=train, slowdown=slowdown)
    for name, plan in plans.items():
        measured, simulated = plan["measured_wall_s"], plan["simulated_wall_s"]
        print(f"{name} took {measured:.1f} s, simulated with its own times {simulated:.1f} s ({plan['deviation']:+.1%})")


def phases(reports: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(rollout, training) seconds of a synchronous round, medians over all rounds; training is what follows the last sample."""
    rounds = [each for report in reports for each in report["rounds"] if each["rollout_s"] is not None]
    rollout = statistics.median(each["rollout_s"] for each in rounds)
    return rollout, statistics.median(each["rollout_to_train_end_s"] - each["rollout_s"] for each in rounds)


def rows(
    reports: Mapping[str, Sequence[Mapping[str, Any]]], plan: Mapping[str, Any], *, slowdown: tuple[float, float]
) -> list[dict[str, Any]]:
    """A row for each variant: times, saving, and its share of the attainable and of the predicted saving."""
    rollout, train = phases(reports[SYNCHRONOUS])
    limit = attainable(rollout, train, slowdown)
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
            "of_attainable": saving / limit if mode else None, "of_predicted": saving / expected if expected else None,
            "trainer_waiting_ratio": statistics.median(report["time"]["trainer_waiting_ratio"] for report in runs),
            "first_dispatch_s": statistics.median(dispatches), "lag_mean": statistics.fmean(report["lag"]["mean"] for report in runs),
            "digests": sorted({str(report["weights"]["digest"])[:16] for report in runs}),
        }  # fmt: skip
        table.append(row)
    return table


def show(table: Sequence[Mapping[str, Any]], *, rollout: float, train: float, slowdown: tuple[float, float]) -> None:
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
    ideal, limit = attainable(rollout, train, (1.0, 1.0)), attainable(rollout, train, slowdown)
    hint = "" if 1.0 <= train / rollout <= 1.2 else "; change --set schedule.samples_per_prompt to bring their ratio to 1.0-1.2"
    phases_s = f"{rollout:.2f} s rollout, {train:.2f} s training ({train / rollout:.2f})"
    print(f"a synchronous round: {phases_s}; attainable saving {limit:.1%} here, {ideal:.1%} without slowdown{hint}")


def plot(table: Sequence[Mapping[str, Any]], path: Path, *, limit: float) -> None:
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
    axes.axvline(wall[0] * (1 - limit), color="#e8590c", ls="--", lw=1.5, label="attainable")
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the first sample to the last step")
    axes.legend(loc="lower right")
    canvas.print_figure(path, dpi=150)
