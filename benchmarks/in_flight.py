"""In-flight weight updates against synchronous training at equal samples on two cores: wall time, accuracy, lag, effective sample size.

    python -m benchmarks in_flight examples/demo.toml --seeds 1 2 3 4 5

Three runs a seed, one after the other: `synchronous` and `in_flight` with one core for rollouts and one for training, and `synchronous`
with both cores for either phase. Wall time is from the start of the first sample to the last step. The limit is the share of a synchronous
round that is left if the shorter of its two phases is hidden behind the longer one.
"""

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.overlap import IN_TURNS, ONE_CORE_EACH, SYNCHRONOUS
from benchmarks.support.command import report_of, run_parser

IN_FLIGHT = "in_flight"
SETTINGS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: ("schedule.mode=synchronous", "schedule.max_lag=0", *ONE_CORE_EACH),
    IN_FLIGHT: ("schedule.mode=in_flight", "schedule.max_lag=4", *ONE_CORE_EACH),
    IN_TURNS: ("schedule.mode=synchronous", "schedule.max_lag=0", "rollout.workers=2", "trainer.threads=2"),
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
    chosen = parser.parse_args(arguments)
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS if name != IN_TURNS or not chosen.skip_both_cores}
    for seed in chosen.seeds:
        for number, (name, finished) in enumerate(reports.items()):
            run = f"in-flight-{os.getpid()}-{number}-{seed}-{int(time.time())}"
            finished.append(report_of(chosen.config, run, [*chosen.settings, *SETTINGS[name], f"run.seed={seed}"]))
            wall_s = finished[-1]["time"]["train_s"]
            print(f"seed {seed} {name}: {wall_s:.1f} s, accuracy {accuracy(finished[-1]):.3f}", file=sys.stderr, flush=True)
    show(reports)


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
