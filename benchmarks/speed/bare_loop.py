"""A synchronous run against a bare loop: the same engine and trainer in one process, without workers, topics and Kafka.

    python -m benchmarks speed bare_loop examples/exact.toml --size 5m --repeats 3 --rounds 4

Both generate from the same prompts with the same seeds under the same weights, filter nothing, and train the same groups: their last
weights have the same digest. A round lasts from its first sample to its last optimizer step, loading of weights included; figures are
medians over the rounds after the first, of runs that alternate. The bare loop has no checkpoints, export, evaluation or log. `--size`
uses a random model with completions of at most 128 tokens, so that a round computes for seconds.
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

from benchmarks.learning_curves import Groups
from benchmarks.support.command import TRAINING_ONLY, command_of, report_of, run_parser, set_words, with_numbers
from benchmarks.support.random_model import SIZES, random_model
from penstock.infra.engines.base import Completion
from penstock.pipeline.config.load import Config, load
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.runtime.factories import make_engine
from penstock.pipeline.scheduling import rules
from penstock.topics.groups import Group

SAME = ("schedule.mode=synchronous", "algorithm.filter_zero_variance=false", "rollout.workers=1", *TRAINING_ONLY)
SIZED = (
    "schedule.prompts_per_step=4", "schedule.samples_per_prompt=8", "schedule.steps_per_version=2", "trainer.micro_batch_tokens=4096",
)  # fmt: skip
LIMIT = 0.9
"""Lowest speed of a run relative to the bare loop."""


def generate_round(source: Groups, count: int) -> list[Group]:
    """`count` groups in the order of their prompts, generated concurrently as far as the engine has room."""
    engine, completions = source.engine, dict[int, list[Completion]]()
    prompts = [source.next_prompt() for _ in range(count)]
    waiting = prompts[::-1]
    while waiting or not engine.idle:
        while waiting and engine.has_room:
            engine.submit(source.request(waiting.pop()))
        for completion in engine.step():
            completions.setdefault(completion.group, []).append(completion)
    return [source.group(prompt, completions[prompt.group]) for prompt in prompts]


def bare(config: Config, *, rounds: int) -> dict[str, Any]:
    """Seconds of each round of the bare loop and of its two phases, and the digest of its last weights."""
    schedule = config.rules
    engine, policy = make_engine(config), PolicyTrainer.open(config, steps=rounds * schedule.steps_per_version)
    source, times = Groups(config, engine), list[tuple[float, float]]()
    for version in range(rounds):
        started = time.monotonic()
        engine.load_weights(version, policy.weights().tensors)
        groups = generate_round(source, schedule.prompts_per_step * schedule.steps_per_version)
        generated = time.monotonic()
        for number in range(schedule.steps_per_version):
            step = policy.step()
            for group in groups[number * schedule.prompts_per_step :][: schedule.prompts_per_step]:
                step.add(group)
            step.finish(learner_version=rules.version_after(policy.steps_done, steps_per_version=schedule.steps_per_version))
            policy.steps_done += 1
        times.append((generated - started, time.monotonic() - generated))
    digest = policy.weights().digest
    engine.close()
    policy.backend.close()
    return {
        "rounds_s": list(map(sum, times)),
        "phases_s": [statistics.median(phase) for phase in zip(*times, strict=True)],
        "digest": digest,
    }


def as_run(config: str, settings: Sequence[str], *, run_id: str) -> dict[str, Any]:
    """The same of a run with workers and a broker, and the cost of its topics."""
    report = report_of(config, run_id, settings)
    rounds_s = [each["rollout_to_train_end_s"] for each in report["rounds"]]
    return {"rounds_s": rounds_s, "digest": report["weights"]["digest"], "overhead_ms": report["time"]["topics_overhead_ms_per_sample"]}


def main(arguments: Sequence[str]) -> None:
    """Alternate, compare, print."""
    parser = run_parser(__name__, __doc__)
    with_numbers(parser, repeats=3)
    parser.add_argument("--rounds", type=int, default=6, help="versions of each run; the first round is not counted")
    parser.add_argument("--size", choices=list(SIZES), help="use a random model of this size instead of the configuration's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bare-loop-") as directory:
        if chosen.size is not None:
            chosen.settings = [*SIZED, *random_model(Path(directory), size=chosen.size, tokens=128), *chosen.settings]
        settings = [*SAME, *chosen.settings]
        settings.append(f"run.steps={chosen.rounds * load(Path(chosen.config), settings).schedule.steps_per_version}")
        if chosen.bare:
            print(json.dumps(bare(load(Path(chosen.config), settings), rounds=chosen.rounds)))
        else:
            compare(chosen, settings)


def compare(chosen: argparse.Namespace, settings: Sequence[str]) -> None:
    """Run all repeats and print the comparison."""
    runs: dict[str, list[dict[str, Any]]] = {"bare": [], "run": []}
    for repeat in range(chosen.repeats):
        command = [*command_of(__name__), chosen.config, "--bare", "--rounds", str(chosen.rounds), *set_words(chosen.settings)]
        alone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        runs["bare"].append(json.loads(alone.stdout.splitlines()[-1]))
        runs["run"].append(as_run(chosen.config, settings, run_id=f"bare-loop-{os.getpid()}-{repeat}"))
        newest = {name: round(statistics.median(each[-1]["rounds_s"][1:]), 2) for name, each in runs.items()}
        print(f"{repeat}: {newest}", file=sys.stderr, flush=True)
    medians = {name: [statistics.median(run["rounds_s"][1:]) for run in each] for name, each in runs.items()}
    figures = {
        **{f"{name}_s": statistics.median(values) for name, values in medians.items()},
        "speed": statistics.median(alone / run for alone, run in zip(medians["bare"], medians["run"], strict=True)),
        "same_weights": len({run["digest"] for each in runs.values() for run in each}) == 1,
        "topics_ms_per_sample": statistics.median(run["overhead_ms"] for run in runs["run"]),
        "bare_phases_s": runs["bare"][0]["phases_s"],
        "load": os.getloadavg()[0],
    }
    if chosen.json:
        print(json.dumps(figures))
        return
    rollout, train = figures["bare_phases_s"]
    print(f"bare loop: {figures['bare_s']:.2f} s a round ({rollout:.2f} s rollout, {train:.2f} s training)")
    print(f"run: {figures['run_s']:.2f} s a round, {figures['speed']:.1%} of the bare loop's speed (limit {LIMIT:.0%})")
    print(f"same weights: {'yes' if figures['same_weights'] else 'NO'}; topics {figures['topics_ms_per_sample']:.3f} ms a sample")
