"""How well each built-in loss and each advantage learns the task of `make demo`, over several seeds.

    python benchmarks/learning_curves.py --seeds 1 2 3 --into curves
    python benchmarks/learning_curves.py --into curves --only loss=gspo advantage=rloo --seeds 1
    python benchmarks/learning_curves.py --into curves --table

A finished run is a file in the folder and is not run again, so that the whole can be done in parts and in several processes; `--table`
prints what is there. Losses run with their own defaults, advantages under `grpo`; everything else is `examples/demo.toml`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from command import PENSTOCK  # noqa: E402

from penstock.pipeline.algorithms.registry import ADVANTAGES, LOSSES  # noqa: E402
from penstock.pipeline.observe.report.text import sparkline  # noqa: E402

DEMO = ROOT / "examples" / "demo.toml"
BASE = "loss=grpo"
WORSE = 0.05
"""A mean reward that is further below GRPO's is marked."""

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Variant -> its finished runs."""


def variants() -> dict[str, list[str]]:
    """Every built-in loss, and every built-in advantage under GRPO's loss, with its settings."""
    losses = {f"loss={name}": [f"algorithm.loss={name}"] for name in LOSSES}
    return losses | {f"advantage={name}": ["algorithm.loss=grpo", f"algorithm.advantage={name}"] for name in ADVANTAGES}


def configuration(directory: Path) -> Path:
    """The demo without its own choice of loss and correction."""
    lines = [line for line in DEMO.read_text(encoding="utf-8").splitlines() if not re.match(r"(loss|correction)\s*=", line)]
    file = directory / "demo.toml"
    file.write_text("\n".join(lines).replace('"../', f'"{ROOT}/'), encoding="utf-8")
    return file


def run(name: str, settings: Sequence[str], *, seed: int) -> dict[str, Any]:
    """One run's figures. Raises `SystemExit` with the run's own words when it fails."""
    with tempfile.TemporaryDirectory() as directory:
        command = [*PENSTOCK, "run", str(configuration(Path(directory))), "--json"]
        command += [word for setting in [*settings, f"run.seed={seed}"] for word in ("--set", setting)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    report = json.loads(done.stdout)
    evals = [found.get("greedy_accuracy") for found in report["eval"]]
    figures = {key: report[key] for key in ("run", "steps", "reward", "groups", "ess")}
    return {"variant": name, "seed": seed, "settings": list(settings), "eval": evals, **figures}


def table(found: Found) -> str:
    """Mean and range of the last reward over the seeds, against GRPO's, with a curve of the first seed."""
    lines = [f"{'':<22}{'seeds':>6}{'steps':>6}{'first':>8}{'last':>8}{'range':>15}{'eval':>8}{'to grpo':>9}  curve"]
    base = _last(found[BASE]) if found.get(BASE) else None
    for name in variants():
        runs = sorted(found.get(name, ()), key=lambda one: int(one["seed"]))
        if not runs:
            lines.append(f"{name:<22}{0:>6}")
            continue
        lasts = [one["reward"]["last"] for one in runs]
        evals = [one["eval"][-1] for one in runs if one["eval"] and one["eval"][-1] is not None]
        first = statistics.fmean(one["reward"]["first"] for one in runs)
        apart = None if base is None else _last(runs) - base
        lines.append(
            f"{name:<22}{len(runs):>6}{max(one['steps'] for one in runs):>6}{first:>8.3f}"
            f"{_last(runs):>8.3f}{f'{min(lasts):.3f}-{max(lasts):.3f}':>15}{statistics.fmean(evals) if evals else float('nan'):>8.3f}"
            f"{'' if apart is None else f'{apart:+.3f}':>9}{'*' if apart is not None and apart < -WORSE else ' '} "
            f"{sparkline(runs[0]['reward']['curve'], width=24)}"
        )
    return "\n".join([*lines, f"* more than {WORSE} below {BASE}; last: mean reward over the last tenth of the steps"])


def finished(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What earlier invocations have finished."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        one = json.loads(file.read_text(encoding="utf-8"))
        found.setdefault(one["variant"], []).append(one)
    return found


def _last(runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(one["reward"]["last"] for one in runs)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="folder with a file for each finished run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(variants()), default=list(variants()), metavar="loss=NAME|advantage=NAME")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    chosen.into.mkdir(parents=True, exist_ok=True)
    for seed in [] if chosen.table else chosen.seeds:
        for name in chosen.only:
            file = chosen.into / f"{name.replace('=', '-')}-{seed}.json"
            if file.exists():
                continue
            figures = run(name, [*variants()[name], *chosen.settings], seed=seed)
            unfinished = file.with_suffix(".tmp")
            unfinished.write_text(json.dumps(figures), encoding="utf-8")
            unfinished.replace(file)
            print(f"{name}, seed {seed}: reward {figures['reward']['first']:.3f} -> {figures['reward']['last']:.3f}", flush=True)
    print(table(finished(chosen.into)))


if __name__ == "__main__":
    main()
