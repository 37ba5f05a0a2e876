"""Penstock and TRL's `GRPOTrainer` on one task: SmolLM2, sums asked in words, the same reward, U, K, lengths, sampling, loss and rate.

    uv venv trl && uv pip install --python trl/bin/python trl torch datasets
    python benchmarks/against_trl.py .penstock/smollm2 --trl trl/bin/python [--search-steps 6] [--steps 60] [--seeds 0]

TRL first takes `--search-steps` under each of its settings (threads; float32, autocast, bfloat16 weights; micro-batches of 8 or all
samples) and goes on with the fastest, by the median step after the first two. Then each side trains `--steps` steps for each seed, one
side at a time and in alternating order. Printed are trained samples a second over all steps but the first two, by wall clock, the
held-out greedy accuracy before and after, seconds of training, peak memory of the largest process, and the load of the machine.
Penstock's seconds count from its first sample to its last step; its broker and all its workers share the same cores.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from command import PENSTOCK  # noqa: E402

SAMPLES = 4 * 8
FORMATS = {"float32": ["--dtype", "float32"], "autocast": ["--autocast"], "bfloat16": ["--dtype", "bfloat16"]}


def trl(python: str, model: Path, *words: str) -> dict[str, Any]:
    """One run of TRL: its steps and its closing line; `error` where it failed."""
    command = [python, str(ROOT / "benchmarks" / "trl_grpo.py"), str(model), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return {"steps": lines[:-1], **lines[-1]}


def rate(steps: list[dict[str, float]]) -> float:
    """Trained samples a second, without the first two steps."""
    return SAMPLES * len(steps[2:]) / sum(step["wall"] for step in steps[2:])


def search(python: str, model: Path, *, steps: int) -> list[str]:
    """TRL's fastest settings."""
    found: dict[tuple[str, ...], float] = {}
    for threads, name, rows in itertools.product((1, 2), FORMATS, (8, SAMPLES)):
        words = ("--threads", str(threads), *FORMATS[name], "--rows", str(rows))
        result = trl(python, model, *words, "--steps", str(steps), "--held-out", "0")
        if "error" in result:
            print(f"  TRL {' '.join(words)}: {result['error']}", flush=True)
            continue
        found[words] = SAMPLES / statistics.median(step["wall"] for step in result["steps"][2:])
        print(f"  TRL {' '.join(words)}: {found[words]:.2f} samples/s, peak {result['peak_gib']:.2f} GiB", flush=True)
    return list(max(found, key=lambda words: found[words]))


def penstock(model: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """One run's report. Raises `SystemExit` with the run's own words when it fails."""
    settings = [f'model.path="{model}"', f"run.steps={steps}", f"run.seed={seed}", "trainer.checkpoint_every=0"]
    command = [*PENSTOCK, "run", str(ROOT / "examples" / "smollm2.toml"), "--json"]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def told(name: str, *, speed: float, before: float, after: float, seconds: float, peak_gib: float) -> str:
    """A side's line."""
    learned = f"held-out {before:.3f} -> {after:.3f}"
    return f"{name:<9}{speed:6.2f} samples/s, {learned} in {seconds:.0f} s, peak {peak_gib:.2f} GiB, load {os.getloadavg()[0]:.1f}"


def of_trl(python: str, model: Path, settings: list[str], *, steps: int, seed: int) -> str:
    """TRL's line for a seed."""
    found = trl(python, model, *settings, "--steps", str(steps), "--seed", str(seed))
    if "error" in found:
        raise SystemExit(found["error"])
    seconds = sum(step["wall"] for step in found["steps"])
    return told(
        "TRL", speed=rate(found["steps"]), before=found["before"], after=found["after"], seconds=seconds, peak_gib=found["peak_gib"]
    )


def of_penstock(model: Path, *, steps: int, seed: int) -> str:
    """Penstock's line for a seed."""
    report = penstock(model, steps=steps, seed=seed)
    evals, seconds = report["eval"], report["time"]["train_s"]
    return told(
        "Penstock", speed=SAMPLES * report["steps"] / seconds, before=evals[0]["greedy_accuracy"], after=evals[-1]["greedy_accuracy"],
        seconds=seconds, peak_gib=report["practice"]["peak_rss_bytes"] / 2**30,
    )  # fmt: skip


def main() -> None:
    """Search, alternate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL")
    parser.add_argument("--search-steps", type=int, default=6)
    parser.add_argument("--settings", help="TRL's settings instead of the search, as the search prints them")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse_args()
    model = chosen.model.resolve()
    settings = chosen.settings.split() if chosen.settings else search(chosen.trl, model, steps=chosen.search_steps)
    print(f"TRL goes on with {' '.join(settings)}", flush=True)
    for place, seed in enumerate(chosen.seeds):
        sides = [
            lambda seed=seed: of_trl(chosen.trl, model, settings, steps=chosen.steps, seed=seed),
            lambda seed=seed: of_penstock(model, steps=chosen.steps, seed=seed),
        ]
        for side in sides[:: 1 if place % 2 == 0 else -1]:
            print(f"seed {seed}: {side()}", flush=True)


if __name__ == "__main__":
    main()
