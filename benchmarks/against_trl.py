"""Penstock against TRL's `GRPOTrainer` on sums in words with SmolLM2: the same reward, U, K, lengths, sampling, loss and learning rate.

    uv venv trl && uv pip install --python trl/bin/python trl torch datasets
    python -m benchmarks against_trl .penstock/smollm2 --trl trl/bin/python [--search-steps 5] [--steps 60] [--every 20] [--bare 60]

TRL first takes `--search-steps` under each of its settings (threads; float32, autocast, bfloat16 weights; micro-batches of 8 or all
samples); the fastest by the median step after the first two is used. Then each side trains `--steps` steps for each seed, one side at a
time and in alternating order. Prints trained samples a second, the held-out greedy accuracy by seconds of training, peak memory of the
largest process, and the load of the machine. TRL's seconds leave out its evaluations; Penstock's count from its first sample to its last
step, evaluations included, and its broker and all its workers share the same cores. `--every 0` evaluates on neither side.

`--bare S`: after Penstock's run its trainer's backend and vLLM work next to each other on the run's groups for S seconds, with nothing
between them. Prints how many trained samples a second they attain, as the slower of both, and Penstock's share of it.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.command import ROOT, TRAINING_ONLY, parser_of, penstock_json, report_of
from penstock.infra.broker import embedded

SAMPLES = 4 * 8
FORMATS = {"float32": ["--dtype", "float32"], "autocast": ["--autocast"], "bfloat16": ["--dtype", "bfloat16"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Figures of one side with one seed; seconds are of training."""

    seconds: float
    speed: float
    """Trained samples a second."""
    curve: Sequence[tuple[float, float]]
    """Seconds and held-out greedy accuracy then, in order."""
    peak_gib: float
    run: str = ""
    """Penstock's run."""
    tokens_per_sample: float = 0.0
    """Tokens that Penstock generated for each trained sample."""

    def until(self, accuracy: float) -> float | None:
        """Seconds to the first evaluation with that accuracy."""
        return next((seconds for seconds, reached in self.curve if reached >= accuracy), None)


def trl(python: str, model: Path, *words: str) -> dict[str, Any]:
    """One run of TRL: its steps and its last line; `error` if it failed."""
    command = [python, str(ROOT / "benchmarks" / "support" / "trl_grpo.py"), str(model), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return {"steps": lines[:-1], **lines[-1]}


def search(python: str, model: Path, *, steps: int, threads: Sequence[int]) -> list[str]:
    """TRL's fastest settings."""
    speeds: dict[tuple[str, ...], float] = {}
    for count, name, rows in itertools.product(threads, FORMATS, (8, SAMPLES)):
        words = ("--threads", str(count), *FORMATS[name], "--rows", str(rows))
        result = trl(python, model, *words, "--steps", str(steps), "--held-out", "0")
        if "error" in result:
            print(f"  TRL {' '.join(words)}: {result['error']}", flush=True)
            continue
        speeds[words] = SAMPLES / statistics.median(step["wall"] for step in result["steps"][2:])
        print(f"  TRL {' '.join(words)}: {speeds[words]:.2f} samples/s, peak {result['peak_gib']:.2f} GiB", flush=True)
    return list(max(speeds, key=lambda words: speeds[words]))


def of_trl(python: str, model: Path, settings: Sequence[str], *, steps: int, every: int, seed: int) -> Side:
    """TRL's side for a seed. Raises `SystemExit` with its last line if it fails."""
    evaluated = ["--every", str(every)] if every else ["--held-out", "0"]
    result = trl(python, model, *settings, "--steps", str(steps), *evaluated, "--seed", str(seed))
    if "error" in result:
        raise SystemExit(result["error"])
    walls = [step["wall"] for step in result["steps"]]
    curve = [(each["seconds"], each["accuracy"]) for each in result["evaluations"]]
    return Side(seconds=sum(walls), speed=SAMPLES * len(walls) / sum(walls), curve=curve, peak_gib=result["peak_gib"])


def of_penstock(model: Path, *, steps: int, every: int, seed: int) -> Side:
    """Penstock's side for a seed."""
    run = f"against-trl-{os.getpid()}-{seed}-{int(time.time())}"
    settings = [f'model.path="{model}"', f"run.steps={steps}", f"run.seed={seed}"]
    settings += [f"eval.every={every}", "trainer.checkpoint_every=0"] if every else TRAINING_ONLY
    report = report_of(str(ROOT / "examples" / "smollm2.toml"), run, settings)
    query = "select epoch(cast(committed as timestamptz)) as at, first_sample_at as first from steps order by step"
    committed = penstock_json("sql", run, query)
    started = committed[0]["first"]
    curve = [
        (committed[int(each["version"]) - 1]["at"] - started if each["version"] else 0.0, each["greedy_accuracy"])
        for each in report["eval"]
    ]
    seconds = report["time"]["train_s"]
    peak_gib = report["practice"]["peak_rss_bytes"] / 2**30
    return Side(
        seconds=seconds, speed=SAMPLES * steps / seconds, curve=curve if every else (), peak_gib=peak_gib, run=run,
        tokens_per_sample=report["tokens"] / (SAMPLES * steps),
    )  # fmt: skip


def bare(side: Side, *, seconds: float) -> None:
    """Print how many trained samples a second backend and vLLM attain next to each other, with the tokens per sample of Penstock's run."""
    words = [embedded.start().bootstrap, side.run]
    stages = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.bare", name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name in ("trainer", "engine")
    }

    def answer(stage: "subprocess.Popen[str]") -> str:
        assert stage.stdout is not None
        for line in stage.stdout:
            if line.startswith(("ready", '{"done"')):
                return line
        raise SystemExit(f"{stage.args} ended with status {stage.wait()}")

    for stage in stages.values():
        answer(stage)
    for stage in stages.values():
        print(seconds, file=stage.stdin, flush=True)
    rates = {}
    for name, stage in stages.items():
        done = json.loads(answer(stage))
        rates[name] = done["done"] / done["seconds"]
    for stage in stages.values():
        stage.communicate()
    trained, generated = rates["trainer"], rates["engine"] / side.tokens_per_sample
    attained = min(trained, generated)
    print(f"bare trainer {trained:.2f} samples/s, bare vLLM {generated:.2f} ({rates['engine']:.0f} tokens/s)", flush=True)
    print(f"Penstock has {side.speed / attained:.0%} of the slower one, {attained:.2f} samples/s (goal 85 %)", flush=True)


def show(name: str, seed: int, side: Side, *, goal: float) -> None:
    """A side's line."""
    reached = side.until(goal)
    learned = ", ".join(f"{accuracy:.3f} at {seconds:.0f} s" for seconds, accuracy in side.curve)
    to_goal = f"; {goal:g} after {reached:.0f} s" if reached is not None else f"; {goal:g} not reached"
    speed = f"{side.speed:.2f} samples/s, {side.seconds:.0f} s"
    evaluated = f"; held out {learned}{to_goal}" if side.curve else ""
    print(f"seed {seed}: {name}: {speed}{evaluated}; peak {side.peak_gib:.2f} GiB, load {os.getloadavg()[0]:.1f}", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Search, alternate, print."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--search-steps", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of TRL, searched over")
    parser.add_argument("--settings", help="TRL's settings instead of the search, as the search prints them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations; 0 evaluates on neither side")
    parser.add_argument("--bare", type=float, default=0.0, metavar="S", help="seconds for which bare trainer and bare vLLM are measured")
    parser.add_argument("--goal", type=float, default=0.75, help="the held-out accuracy whose time is compared")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse_args(arguments)
    model = chosen.model.resolve()
    settings = chosen.settings.split() if chosen.settings else search(chosen.trl, model, steps=chosen.search_steps, threads=chosen.threads)
    print(f"TRL runs with {' '.join(settings)}", flush=True)
    ratios = []
    for number, seed in enumerate(chosen.seeds):
        sides: dict[str, Side] = {}
        for name in ("TRL", "Penstock")[:: 1 if number % 2 == 0 else -1]:
            common = {"steps": chosen.steps, "every": chosen.every, "seed": seed}
            sides[name] = of_trl(chosen.trl, model, settings, **common) if name == "TRL" else of_penstock(model, **common)
            show(name, seed, sides[name], goal=chosen.goal)
        if chosen.bare:
            bare(sides["Penstock"], seconds=chosen.bare)
        ratios.append(sides["Penstock"].speed / sides["TRL"].speed)
    print(f"Penstock's samples/s are {statistics.median(ratios):.2f} times TRL's (median of {len(ratios)}; goal 3)")
