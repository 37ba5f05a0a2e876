"""Slowdown of rollout and training when both compute at the same time on this machine, without a broker or other workers.

    python -m benchmarks speed contention examples/exact.toml --size 5m --set schedule.samples_per_prompt=48

One process generates groups with the run's engine, another trains on groups that it has generated before, each on a core of its own,
first alone and then at the same time, alternating. The two processes share the last cache and the memory bandwidth.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.learning_curves import Groups
from benchmarks.speed.bare_loop import generate_round
from benchmarks.support.command import TRAINING_ONLY, command_of, run_parser, set_words, with_numbers
from benchmarks.support.random_model import SIZES, random_model
from penstock.pipeline.config.load import Config, load
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.runtime.factories import make_engine

PHASES = ("generate", "train")
GROUPS = 4


def turns(phase: str, config: Config) -> Callable[[], None]:
    """A turn of a phase: `GROUPS` groups are generated, or trained in one step, always under the same weights."""
    policy, source = PolicyTrainer.open(config, steps=1 << 20), Groups(config, make_engine(config))
    source.engine.load_weights(0, policy.weights().tensors)
    groups = generate_round(source, GROUPS)

    def train() -> None:
        step = policy.step()
        for group in groups:
            step.add(group)
        step.finish(learner_version=0)

    def generate() -> None:
        generate_round(source, GROUPS)

    return train if phase == "train" else generate


def work(phase: str, config: Config) -> None:
    """Print "ready"; for each line of the input take turns for that many seconds and print the seconds a turn."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[PHASES.index(phase)]})
    turn = turns(phase, config)
    turn()
    print("ready", flush=True)
    for line in sys.stdin:
        started, count = time.monotonic(), 0
        while time.monotonic() - started < float(line):
            turn()
            count += 1
        print((time.monotonic() - started) / count, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure alone and together, and print both."""
    parser = run_parser(__name__, __doc__)
    parser.add_argument("--size", choices=list(SIZES), help="use a random model of this size instead of the configuration's")
    with_numbers(parser, tokens=96, repeats=3, seconds=10.0)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.phase:
        work(chosen.phase, load(Path(chosen.config), chosen.settings))
        return
    with tempfile.TemporaryDirectory(prefix="contention-") as directory:
        sized = random_model(Path(directory), size=chosen.size, tokens=chosen.tokens) if chosen.size else []
        settings = [*TRAINING_ONLY, "trainer.threads=1", *sized, *chosen.settings, "trainer.lr=1e-12"]
        for phase, times in side_by_side(chosen.config, settings, repeats=chosen.repeats, seconds=chosen.seconds).items():
            print(f"{phase}: {times.alone:.3f} s alone, {times.together:.3f} s together, {times.slowdown:.2f} times as long")


class Times(NamedTuple):
    """Medians of a phase: seconds of a turn alone and together with the other phase, and the second as a multiple of the first."""

    alone: float
    together: float
    slowdown: float


def side_by_side(config: str, settings: Sequence[str], *, repeats: int, seconds: float) -> dict[str, Times]:
    """Each phase alone and at the same time as the other, alternating."""
    workers = {phase: start(phase, config, settings) for phase in PHASES}
    alone: dict[str, list[float]] = {phase: [] for phase in PHASES}
    together: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(repeats):
        for phase, worker in workers.items():
            alone[phase] += measured([worker], seconds)
        for phase, time_s in zip(PHASES, measured(list(workers.values()), seconds), strict=True):
            together[phase].append(time_s)
    for worker in workers.values():
        worker.communicate()
    return {
        phase: Times(
            statistics.median(alone[phase]), statistics.median(together[phase]),
            statistics.median(both / single for single, both in zip(alone[phase], together[phase], strict=True)),
        )
        for phase in PHASES
    }  # fmt: skip


def start(phase: str, config: str, settings: Sequence[str]) -> "subprocess.Popen[str]":
    """A process that is ready to work."""
    command = [*command_of(__name__), config, "--phase", phase, *set_words(settings)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    while (line := worker.stdout.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"the process of phase {phase} exited before it was ready")
    return worker


def measured(workers: Sequence["subprocess.Popen[str]"], seconds: float) -> list[float]:
    """Seconds a turn of these processes, which work at the same time."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{seconds}\n")
        worker.stdin.flush()
    return [float(worker.stdout.readline()) for worker in workers if worker.stdout is not None]
