"""In-flight weight updates against synchronous training at equal samples, on two cores: wall time, accuracy, lag, effective sample size.

    python benchmarks/in_flight.py examples/demo.toml --seeds 1 2 3 4 5

Three runs a seed, one after the other: `synchronous` and `in_flight` with one core for rollouts and one for training, and `synchronous`
with both cores for either phase. Wall time is from the first sample's begin to the last step. The limit is printed beside it: what is
left of a synchronous round when the shorter of its two phases is hidden behind the longer one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from command import launched
from scipy.stats import t as student

from penstock.infra.paths import run_directory

ROLLOUT_CORE, TRAINER_CORE = 0, 1
SYNCHRONOUS, IN_FLIGHT, BOTH_CORES = "synchronous", "in_flight", "synchronous, both cores"
SETTINGS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: ("schedule.mode=synchronous", "schedule.max_lag=0", "rollout.workers=1"),
    IN_FLIGHT: ("schedule.mode=in_flight", "schedule.max_lag=4", "rollout.workers=1"),
    BOTH_CORES: ("schedule.mode=synchronous", "schedule.max_lag=0", "rollout.workers=2", "trainer.threads=2"),
}


def run(config: str, *, variant: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    """One run's report. Raises `SystemExit` with the run's own words when it fails."""
    run_id = f"bench-{os.getpid()}-{list(SETTINGS).index(variant)}-{seed}-{int(time.time())}"
    chosen = [*settings, *SETTINGS[variant], f"run.seed={seed}"]
    words = [word for setting in chosen for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "output"
        with launched(config, run_id, words, output) as process:
            while process.poll() is None:
                if variant != BOTH_CORES:
                    pin(run_id)
                with suppress(Exception):
                    process.wait(1.0)
        if process.returncode:
            raise SystemExit(output.read_text(errors="replace")[-2000:])
    report: dict[str, Any] = json.loads((run_directory(run_id) / "report.json").read_text())
    return report


def pin(run_id: str) -> None:
    """Keep every thread of the rollout worker on one core and of the trainer on the other; the rest go where there is room."""
    with suppress(OSError, ValueError, KeyError):
        workers = json.loads((run_directory(run_id) / "workers.json").read_text())["workers"]
        for name, core in (("rollout-0", ROLLOUT_CORE), ("trainer", TRAINER_CORE)):
            for thread in Path(f"/proc/{workers[name]}/task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), {core})


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
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, float("-inf"), float("inf")
    half = float(student.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--skip-both-cores", action="store_true", help="leave the third variant out")
    chosen = parser.parse_args()
    variants = [name for name in SETTINGS if name != BOTH_CORES or not chosen.skip_both_cores]
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in chosen.seeds:
        for name in variants:
            found = run(chosen.config, variant=name, seed=seed, settings=chosen.settings)
            reports[name].append(found)
            print(f"seed {seed} {name}: {found['time']['train_s']:.1f} s, accuracy {accuracy(found):.3f}", file=sys.stderr, flush=True)
    show(reports)


def show(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """The table, the limit beside it, and the paired difference of accuracies."""
    print(f"{'variant':<26}{'wall s':>8}{'samples':>9}{'ratio':>7}{'waiting':>9}{'lag':>6}{'most':>6}{'ESS':>7}{'accuracy':>10}")
    base = [report["time"]["train_s"] for report in reports[SYNCHRONOUS]]
    for name, found in reports.items():
        wall = [report["time"]["train_s"] for report in found]
        ratio = statistics.median(one / first for one, first in zip(wall, base, strict=True))
        waiting = statistics.median(report["time"]["trainer_waiting_ratio"] for report in found)
        lag, ess = statistics.fmean(report["lag"]["mean"] for report in found), statistics.fmean(report["ess"]["mean"] for report in found)
        most = max(report["lag"]["max"] for report in found)
        samples = statistics.median(
            report["steps"] * report["schedule"]["prompts_per_step"] * report["schedule"]["samples_per_prompt"] for report in found
        )
        mean = statistics.fmean(map(accuracy, found))
        print(
            f"{name:<26}{statistics.median(wall):>8.1f}{samples:>9.0f}{ratio:>7.2f}{waiting:>9.0%}{lag:>6.2f}{most:>6.0f}{ess:>7.3f}{mean:>10.3f}"
        )
    rollout, train = (statistics.median(times) for times in zip(*map(phases, reports[SYNCHRONOUS]), strict=True))
    ideal = max(rollout, train) / (rollout + train)
    print(f"limit: a synchronous round is {rollout:.3f} s of rollout and {train:.3f} s of training; one behind the other: {ideal:.2f}")
    if BOTH_CORES in reports:
        ratios = [
            one["time"]["train_s"] / other["time"]["train_s"] for one, other in zip(reports[IN_FLIGHT], reports[BOTH_CORES], strict=True)
        ]
        print(f"in_flight against synchronous with both cores for each phase: {statistics.median(ratios):.2f}")
    pairs = zip(reports[IN_FLIGHT], reports[SYNCHRONOUS], strict=True)
    mean, low, high = interval([accuracy(one) - accuracy(other) for one, other in pairs])
    count = len(reports[IN_FLIGHT])
    print(f"held-out accuracy, in_flight - synchronous: {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f} ({count} seeds)")


if __name__ == "__main__":
    main()
