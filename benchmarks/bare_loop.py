"""A run under `synchronous` against a bare loop: the same engine and trainer in one process, without workers, topics and Kafka.

    python benchmarks/bare_loop.py examples/exact.toml --size 5m --repeats 3 --rounds 4

Both draw the same prompts with the same seeds under the same weights, filter nothing, and train the same groups: their last weights
have the same digest. A round is from its first sample to its last optimizer step, weights in the engine included; figures are medians
over the rounds after the first, of runs that alternate. The bare loop leaves out checkpoints, export, evaluation and everything that
is written down. `--size` puts a random model in the place of the configuration's, with completions of 128 tokens that nothing ends, so
that a round computes for seconds; `--set` changes both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command import NOTHING_BESIDE, report_of
from learning_curves import Draws
from random_model import SIZES, drawn_from

from penstock.infra.engines.base import Completion
from penstock.pipeline.config.load import Config, load
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group

SAME = ("schedule.mode=synchronous", "algorithm.filter_zero_variance=false", "rollout.workers=1", *NOTHING_BESIDE)
SIZED = (
    "schedule.prompts_per_step=4", "schedule.samples_per_prompt=8", "schedule.steps_per_version=2", "trainer.micro_batch_tokens=4096",
)  # fmt: skip
KEPT = 0.9
"""The least share of the bare loop's speed that a run has to keep."""


def draw_round(draws: Draws, groups: int) -> list[Group]:
    """So many groups in the order of their prompts, drawn side by side as far as the engine has room."""
    engine, drawn = draws.engine, dict[int, list[Completion]]()
    prompts = [draws.next_prompt() for _ in range(groups)]
    waiting = prompts[::-1]
    while waiting or not engine.idle:
        while waiting and engine.has_room:
            engine.submit(draws.request(waiting.pop()))
        for completion in engine.step():
            drawn.setdefault(completion.group, []).append(completion)
    return [draws.group(prompt, drawn[prompt.group]) for prompt in prompts]


def bare(config: Config, *, rounds: int) -> dict[str, Any]:
    """Seconds of each round of the bare loop, seconds of its two phases, and the digest of its last weights."""
    schedule = config.rules
    engine, policy = make_engine(config), PolicyTrainer.open(config, steps=rounds * schedule.steps_per_version)
    draws, took = Draws(config, engine), list[tuple[float, float]]()
    for version in range(rounds):
        began = time.monotonic()
        engine.load_weights(version, policy.weights().tensors)
        groups = draw_round(draws, schedule.prompts_per_step * schedule.steps_per_version)
        drew = time.monotonic()
        for number in range(schedule.steps_per_version):
            step = policy.step()
            for group in groups[number * schedule.prompts_per_step :][: schedule.prompts_per_step]:
                step.add(group)
            step.finish(learner_version=rules.version_after(policy.steps_done, steps_per_version=schedule.steps_per_version))
            policy.steps_done += 1
        took.append((drew - began, time.monotonic() - drew))
    digest = policy.weights().digest
    engine.close()
    policy.backend.close()
    phases = [statistics.median(one) for one in zip(*took, strict=True)]
    return {"rounds_s": [sum(one) for one in took], "phases_s": phases, "digest": digest}


def as_run(config: str, settings: Sequence[str], *, run_id: str) -> dict[str, Any]:
    """The same of a run with its workers and a broker, and what its topics cost. Raises `SystemExit` with the run's own words."""
    report = report_of(config, run_id, settings)
    took = [one["rollout_to_train_end_s"] for one in report["rounds"]]
    return {"rounds_s": took, "digest": report["weights"]["digest"], "overhead_ms": report["time"]["topics_overhead_ms_per_sample"]}


def main() -> int:
    """Alternate, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="versions of each run; the first round is not counted")
    parser.add_argument("--size", choices=list(SIZES), help="of a random model in the place of the configuration's")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bare-loop-") as directory:
        if chosen.size is not None:
            chosen.settings = [*SIZED, *drawn_from(Path(directory), size=chosen.size, tokens=128), *chosen.settings]
        return compare(chosen)


def compare(chosen: argparse.Namespace) -> int:
    """All repeats, and what they show."""
    settings = [*SAME, *chosen.settings]
    per_version = load(Path(chosen.config), settings).schedule.steps_per_version
    settings.append(f"run.steps={chosen.rounds * per_version}")
    if chosen.bare:
        print(json.dumps(bare(load(Path(chosen.config), settings), rounds=chosen.rounds)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {"bare": [], "run": []}
    for repeat in range(chosen.repeats):
        words = [word for setting in chosen.settings for word in ("--set", setting)]
        command = [sys.executable, __file__, chosen.config, "--bare", "--rounds", str(chosen.rounds), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        alone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found["bare"].append(json.loads(alone.stdout.splitlines()[-1]))
        found["run"].append(as_run(chosen.config, settings, run_id=f"bare-loop-{os.getpid()}-{repeat}"))
        newest = {name: round(statistics.median(runs[-1]["rounds_s"][1:]), 2) for name, runs in found.items()}
        print(f"{repeat}: {newest}", file=sys.stderr, flush=True)
    medians = {name: [statistics.median(one["rounds_s"][1:]) for one in runs] for name, runs in found.items()}
    figures = {
        **{f"{name}_s": statistics.median(values) for name, values in medians.items()},
        "kept": statistics.median(alone / run for alone, run in zip(medians["bare"], medians["run"], strict=True)),
        "same_weights": len({one["digest"] for runs in found.values() for one in runs}) == 1,
        "topics_ms_per_sample": statistics.median(one["overhead_ms"] for one in found["run"]),
        "bare_phases_s": found["bare"][0]["phases_s"],
        "load": os.getloadavg()[0],
    }
    if chosen.json:
        print(json.dumps(figures))
        return 0
    rollout, train = figures["bare_phases_s"]
    print(f"bare loop: {figures['bare_s']:.2f} s a round ({rollout:.2f} s rollout, {train:.2f} s training)")
    print(f"run: {figures['run_s']:.2f} s a round, {figures['kept']:.1%} of the bare loop's speed (at least {KEPT:.0%} wanted)")
    print(f"same weights: {'yes' if figures['same_weights'] else 'NO'}; topics {figures['topics_ms_per_sample']:.3f} ms a sample")
    return 0


if __name__ == "__main__":
    sys.exit(main())
