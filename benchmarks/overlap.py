"""How much of rollout and training overlaps under each schedule, beside what is attainable and what the simulator predicts.

    python benchmarks/overlap.py examples/exact.toml --repeats 5 --plot overlap.png

The rollout worker has one core and the trainer another; `in turns` has both cores for either phase. Runs alternate (a b c a b c ...), so
that a machine whose speed drifts treats the schedules alike; figures are medians over the repeats with the lowest and the highest.
Attainable is the time of a synchronous round whose shorter phase is hidden behind the longer one: saving at most
min(T_r, T_t) / (T_r + T_t) (arXiv 2606.26997). Predicted is what `penstock plan --from-run` says from the first synchronous run. The
last lines have what it says of the first run of each schedule from that run's own times.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command import NOTHING_BESIDE, PENSTOCK, report_of
from overlap_table import SYNCHRONOUS, draw, phases, rows, show
from random_model import SIZES, drawn_from

IN_TURNS = "in turns, both cores"
ONE_CORE_EACH = ("rollout.workers=1", "trainer.threads=1", "launch.pin=auto")
ROUND = ("schedule.prompts_per_step=2", "schedule.samples_per_prompt=8", "schedule.steps_per_version=48", "run.steps=144")
"""R = 96 groups a round, of which a step takes U = 2: R / U = 48."""
EVERY_STEP = ("schedule.prompts_per_step=8", "schedule.samples_per_prompt=8", "schedule.steps_per_version=1", "run.steps=36")
"""As many samples, with weights published after every step."""
SIZED = ("trainer.micro_batch_tokens=4096", *NOTHING_BESIDE)
VARIANTS: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: (*ROUND, "schedule.mode=synchronous", *ONE_CORE_EACH),
    "pipelined": (*ROUND, "schedule.mode=pipelined", *ONE_CORE_EACH),
    "pipelined, by arrival": (*ROUND, "schedule.mode=pipelined", "schedule.order=arrival", *ONE_CORE_EACH),
    IN_TURNS: (*ROUND, "schedule.mode=synchronous", "rollout.workers=2", "trainer.threads=2"),
    "synchronous, S = 1": (*EVERY_STEP, "schedule.mode=synchronous", *ONE_CORE_EACH),
    "pipelined, S = 1": (*EVERY_STEP, "schedule.mode=pipelined", *ONE_CORE_EACH),
    "one_step_off": (*EVERY_STEP, "schedule.mode=one_step_off", *ONE_CORE_EACH),
    "bounded": (*EVERY_STEP, "schedule.mode=bounded", "rollout.engine=vllm", *ONE_CORE_EACH),
    "in_flight": (*EVERY_STEP, "schedule.mode=in_flight", "rollout.engine=vllm", *ONE_CORE_EACH),
}


def predicted(run_id: str) -> dict[str, Any]:
    """What the simulator makes of a run. Raises `SystemExit` with the command's own words when it fails."""
    found = subprocess.run([*PENSTOCK, "plan", "--from-run", run_id, "--json"], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(found.stderr[-2000:])
    plan: dict[str, Any] = json.loads(found.stdout)
    return plan


def main() -> None:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", choices=list(SIZES), help="of a random model in the place of the configuration's")
    parser.add_argument("--tokens", type=int, default=192, help="the most of a completion of the random model")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--plot", type=Path, help="a .png or .svg file")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-") as directory:
        if chosen.size is not None:
            chosen.settings = [*SIZED, *drawn_from(Path(directory), size=chosen.size, tokens=chosen.tokens), *chosen.settings]
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """All repeats of all variants, and what they show."""
    variants = [SYNCHRONOUS, *(name for name in chosen.variants if name != SYNCHRONOUS)]
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    first = f"overlap-{os.getpid()}-{int(time.time())}"
    for repeat in range(chosen.repeats):
        for number, name in enumerate(variants):
            run_id = f"{first}-{repeat}-{number}"
            reports[name].append(report_of(chosen.config, run_id, [*VARIANTS[name], *chosen.settings]))
            print(f"{repeat} {name}: {reports[name][-1]['time']['train_s']:.1f} s", file=sys.stderr, flush=True)
    rollout, train = phases(reports[SYNCHRONOUS])
    plans = {name: predicted(f"{first}-0-{number}") for number, name in enumerate(variants)}
    plan = plans[SYNCHRONOUS]
    found = rows(reports, plan)
    if chosen.plot is not None:
        draw(found, chosen.plot, rollout=rollout, train=train)
    if chosen.json:
        deviations = {name: own["deviation"] for name, own in plans.items()}
        print(json.dumps({"variants": found, "rollout_s": rollout, "train_s": train, "plan": plan, "deviations": deviations}, indent=2))
    else:
        show(found, rollout=rollout, train=train)
        for name, own in plans.items():
            measured, simulated = own["measured_wall_s"], own["simulated_wall_s"]
            print(f"{name} took {measured:.1f} s, simulated with its own times {simulated:.1f} s ({own['deviation']:+.1%})")


if __name__ == "__main__":
    main()
