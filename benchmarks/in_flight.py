"""In-flight weight updates against synchronous training at equal samples on two cores: wall time, accuracy, lag, effective sample size.

    python -m benchmarks in_flight examples/demo.toml --seeds 1 2 3 4 5

Three runs a seed, one after the other: `synchronous` and `in_flight` with one core for rollouts and one for training, and `synchronous`
with both cores for either phase. Wall time is from the start of the first sample to the last step. The limit is the share of a synchronous
round that is left if the shorter of its two phases is hidden behind the longer one.
`--name NAME` calls the runs NAME-VARIANT-SEED; those that have a report already are read instead of repeated.
`--conventional 1 2 4 8 16` adds PipelineRL's baseline (arXiv 2509.19128): G optimizer steps on G batches of one version, which both cores
generate before. It prints the time to the reward that all variants reach; `--plot` shows reward and effective sample size.
"""

import itertools
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from benchmarks.overlap import IN_TURNS, ONE_CORE_EACH, SYNCHRONOUS
from benchmarks.support.command import kept_report, report_of, run_parser

IN_FLIGHT = "in_flight"
SETTINGS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: ("schedule.mode=synchronous", "schedule.max_lag=0", *ONE_CORE_EACH),
    IN_FLIGHT: ("schedule.mode=in_flight", "schedule.max_lag=4", *ONE_CORE_EACH),
    IN_TURNS: ("schedule.mode=synchronous", "schedule.max_lag=0", "rollout.workers=2", "trainer.threads=2"),
}
SMOOTHED = 10
"""Steps over which a curve is averaged."""
REACHED = 0.95
"""Share of the lowest final reward that counts as the same reward."""


class Point(NamedTuple):
    """One step of a run: samples trained so far, seconds since the start of the first step, mean reward, effective sample size."""

    samples: float
    seconds: float
    reward: float
    ess: float


def conventional(versions: Sequence[int]) -> dict[str, Sequence[str]]:
    """Variants with G steps to a version, which have both cores for either phase."""
    return {f"conventional, G = {count}": (*SETTINGS[IN_TURNS], f"schedule.steps_per_version={count}") for count in versions}


def curve_of(steps: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Points of a run from its table of steps; reward and effective sample size are means over the last `SMOOTHED` steps."""
    samples = list(itertools.accumulate(step["samples"] for step in steps))

    def smoothed(column: str, index: int) -> float:
        return statistics.fmean(step[column] for step in steps[max(0, index - SMOOTHED + 1) : index + 1])

    return [
        Point(
            samples=samples[index],
            seconds=step["committed"].timestamp() - steps[0]["first_sample_at"],
            reward=smoothed("reward_trained", index),
            ess=smoothed("ess", index),
        )
        for index, step in enumerate(steps)
    ]


def curve(run: str) -> list[Point]:
    """Points of a finished run."""
    with penstock.open(run) as recorded:
        return curve_of(recorded.steps().to_pylist())


def times_to(curves: Mapping[str, Sequence[Sequence[Point]]]) -> tuple[float, dict[str, tuple[float, float]]]:
    """(the reward that every run reaches, variant -> (median seconds, median samples) until then)."""
    target = REACHED * min(max(point.reward for point in points) for runs in curves.values() for points in runs)
    first = {name: [next(point for point in points if point.reward >= target) for points in runs] for name, runs in curves.items()}
    return target, {
        name: (statistics.median(point.seconds for point in points), statistics.median(point.samples for point in points))
        for name, points in first.items()
    }


def phases(report: Mapping[str, Any]) -> tuple[float, float]:
    """(seconds of rollout, seconds of training) of a synchronous round, medians: training is what follows the engine's work."""
    rounds = statistics.median(report["time"]["rollout_to_train_end_s"])
    train = report["time"]["trainer_compute_s"] / report["steps"]
    return rounds - train, train


def accuracy(report: Mapping[str, Any]) -> float:
    """Held-out accuracy of sampled completions under the last weights."""
    return float(report["eval"][-1]["sampled_accuracy"])


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the paired difference with its 95 % interval by Student's t."""
    from scipy.stats import t as student

    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, float("-inf"), float("inf")
    half = float(student.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def main(arguments: Sequence[str]) -> None:
    """Run, compare, print."""
    parser = run_parser(__name__, __doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--skip-both-cores", action="store_true", help="leave out the third variant")
    parser.add_argument("--conventional", type=int, nargs="+", default=[], metavar="G")
    parser.add_argument("--plot", type=Path, help="an .svg file")
    parser.add_argument("--name", default=f"in-flight-{os.getpid()}-{int(time.time())}", help="start of the names of the runs")
    chosen = parser.parse_args(arguments)
    settings = {name: each for name, each in SETTINGS.items() if name != IN_TURNS or not chosen.skip_both_cores}
    settings |= conventional(chosen.conventional)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    curves: dict[str, list[list[Point]]] = {name: [] for name in settings}
    for seed in chosen.seeds:
        for number, (name, finished) in enumerate(reports.items()):
            run = f"{chosen.name}-{number}-{seed}"
            finished.append(kept_report(run) or report_of(chosen.config, run, [*chosen.settings, *settings[name], f"run.seed={seed}"]))
            curves[name].append(curve(run))
            wall_s = finished[-1]["time"]["train_s"]
            print(f"seed {seed} {name}: {wall_s:.1f} s, accuracy {accuracy(finished[-1]):.3f}", file=sys.stderr, flush=True)
    show(reports)
    target, times = times_to(curves)
    for name, (seconds, samples) in times.items():
        ratio = seconds / times[IN_FLIGHT][0]
        print(f"{name}: reward {target:.3f} after {seconds:.1f} s ({ratio:.2f} of in_flight's) and {samples:.0f} samples")
    if chosen.plot is not None:
        plot(curves, chosen.plot)


def plot(curves: Mapping[str, Sequence[Sequence[Point]]], path: Path) -> None:
    """Reward by samples and by seconds, and effective sample size by samples; a line for each variant, the mean over its seeds."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = (("samples", "reward"), ("seconds", "reward"), ("samples", "ess"))
    for axes, (across, up) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, runs in curves.items():
            steps = list(zip(*runs, strict=False))
            axes.plot(
                [statistics.fmean(getattr(point, across) for point in step) for step in steps],
                [statistics.fmean(getattr(point, up) for point in step) for step in steps],
                label=name, lw=1,
            )  # fmt: skip
        axes.set_xlabel(across)
        axes.set_ylabel({"ess": "effective sample size"}.get(up, up))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncol=4, fontsize=7)
    FigureCanvasSVG(figure).print_figure(path, metadata={"Date": None})


def show(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the table, the limit, and the paired difference of accuracies."""
    print(f"{'variant':<26}{'wall s':>8}{'samples':>9}{'ratio':>7}{'waiting':>9}{'lag':>6}{'max':>6}{'ESS':>7}{'accuracy':>10}")
    base = [report["time"]["train_s"] for report in reports[SYNCHRONOUS]]
    for name, runs in reports.items():
        wall = [report["time"]["train_s"] for report in runs]
        ratio = statistics.median(each / first for each, first in zip(wall, base, strict=True))
        waiting = statistics.median(report["time"]["trainer_waiting_ratio"] for report in runs)
        lag, ess = (statistics.fmean(report[figure]["mean"] for report in runs) for figure in ("lag", "ess"))
        max_lag, mean = max(report["lag"]["max"] for report in runs), statistics.fmean(map(accuracy, runs))
        schedules = [(report["steps"], report["schedule"]) for report in runs]
        samples = statistics.median(steps * plan["prompts_per_step"] * plan["samples_per_prompt"] for steps, plan in schedules)
        times = f"{statistics.median(wall):>8.1f}{samples:>9.0f}{ratio:>7.2f}{waiting:>9.0%}"
        print(f"{name:<26}{times}{lag:>6.2f}{max_lag:>6.0f}{ess:>7.3f}{mean:>10.3f}")
    rollout, train = (statistics.median(times) for times in zip(*map(phases, reports[SYNCHRONOUS]), strict=True))
    limit = max(rollout, train) / (rollout + train)
    print(f"limit: a synchronous round is {rollout:.3f} s of rollout and {train:.3f} s of training; full overlap leaves {limit:.2f}")
    if IN_TURNS in reports:
        pairs = zip(reports[IN_FLIGHT], reports[IN_TURNS], strict=True)
        ratios = [ours["time"]["train_s"] / theirs["time"]["train_s"] for ours, theirs in pairs]
        print(f"in_flight against synchronous with both cores for each phase: {statistics.median(ratios):.2f}")
    pairs = zip(reports[IN_FLIGHT], reports[SYNCHRONOUS], strict=True)
    mean, low, high = interval([accuracy(ours) - accuracy(theirs) for ours, theirs in pairs])
    seeds = len(reports[IN_FLIGHT])
    print(f"held-out accuracy, in_flight - synchronous: {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} ({seeds} seeds)")
