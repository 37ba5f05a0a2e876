"""How much drawing and training slow each other on this machine when both go on, with no broker and no other worker: what overlap can gain.

    python benchmarks/side_by_side.py examples/exact.toml --size 5m --set schedule.samples_per_prompt=48

One process draws groups with the run's engine, another trains on groups that it has drawn before, each on a core of its own, first alone
and then at the same time, `--repeats` times in turns. Two processes share the last cache and the memory's bandwidth, whatever starts them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bare_loop import draw_round
from command import NOTHING_BESIDE
from learning_curves import Draws
from random_model import SIZES, drawn_from

from penstock.pipeline.config.load import Config, load
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.runtime.factories import make_engine

PHASES = ("draw", "train")
GROUPS = 4
SAME = (*NOTHING_BESIDE, "trainer.threads=1")


def turns(phase: str, config: Config) -> Callable[[], None]:
    """What takes one turn of a phase: `GROUPS` groups are drawn, or trained in one step, always under the same weights."""
    policy, draws = PolicyTrainer.open(config, steps=1 << 20), Draws(config, make_engine(config))
    draws.engine.load_weights(0, policy.weights().tensors)
    groups = draw_round(draws, GROUPS)

    def train() -> None:
        step = policy.step()
        for group in groups:
            step.add(group)
        step.finish(learner_version=0)

    def draw() -> None:
        draw_round(draws, GROUPS)

    return train if phase == "train" else draw


def work(phase: str, core: int, config: Config) -> None:
    """Say that the phase may begin, take turns for so many seconds as each line of the input says, and print seconds a turn."""
    os.sched_setaffinity(0, {core})
    turn = turns(phase, config)
    turn()
    print("ready", flush=True)
    for line in sys.stdin:
        began, count = time.monotonic(), 0
        while time.monotonic() - began < float(line):
            turn()
            count += 1
        print((time.monotonic() - began) / count, flush=True)


def main() -> int:
    """Measure alone and together, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--size", choices=list(SIZES), help="of a random model in the place of the configuration's")
    parser.add_argument("--tokens", type=int, default=96, help="the most of a completion of the random model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.phase:
        work(chosen.phase, sorted(os.sched_getaffinity(0))[PHASES.index(chosen.phase)], load(Path(chosen.config), chosen.settings))
        return 0
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as directory:
        sized = drawn_from(Path(directory), size=chosen.size, tokens=chosen.tokens) if chosen.size else []
        settings = [*SAME, *sized, *chosen.settings, "trainer.lr=1e-12"]
        workers = {phase: start(phase, chosen.config, settings) for phase in PHASES}
        found: dict[str, list[float]] = {name: [] for name in ("draw", "train", "draw beside", "train beside")}
        for _ in range(chosen.repeats):
            for phase, worker in workers.items():
                found[phase] += measured([worker], chosen.seconds)
            for phase, seconds in zip(PHASES, measured(list(workers.values()), chosen.seconds), strict=True):
                found[f"{phase} beside"].append(seconds)
        for worker in workers.values():
            worker.communicate()
    slower = {phase: statistics.median(b / a for a, b in zip(found[phase], found[f"{phase} beside"], strict=True)) for phase in PHASES}
    print(json.dumps({"seconds": {name: statistics.median(values) for name, values in found.items()}, "slower": slower}, indent=2))
    return 0


def start(phase: str, config: str, settings: Sequence[str]) -> "subprocess.Popen[str]":
    """A process that is ready to work."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, __file__, config, "--phase", phase, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert worker.stdout is not None
    while (line := worker.stdout.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"the process that should {phase} has ended")
    return worker


def measured(workers: Sequence["subprocess.Popen[str]"], seconds: float) -> list[float]:
    """Seconds a turn of these processes, which work at the same time."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(f"{seconds}\n")
        worker.stdin.flush()
    return [float(worker.stdout.readline()) for worker in workers if worker.stdout is not None]


if __name__ == "__main__":
    sys.exit(main())
