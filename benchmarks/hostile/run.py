"""A run of a tiny model whose reward functions, or agents, attack in turn: it must train its honest samples to the last step.

    python -m benchmarks hostile run --isolate landlock             # none, landlock or bwrap
    python -m benchmarks hostile run --isolate landlock --agents    # agents attack after they have reported their reward

Each prompt names an attack of benchmarks/support/attacks.py, which scores about a third of its completions; the others are scored
honestly. "reached" lists what attacks read or signalled of the launcher, the workers, their other children and a bystander.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hostile.children import LIMITS, SECRET, left_over
from benchmarks.support.attacks import FUNCTIONS, NOT_COVERED, write_module
from benchmarks.support.command import PENSTOCK, ROOT, parser_of, report_of

MODEL = ROOT / ".penstock" / "tiny"
PROMPTS, SAMPLES = 4, 4
"""Prompts of a step, and samples of a prompt."""


def settings_of(folder: Path, isolate: str, *, agents: bool) -> list[str]:
    """The settings of the run, as KEY=VALUE."""
    steps = -(-len(FUNCTIONS) // PROMPTS)
    section = "environment" if agents else "reward"
    children: dict[str, Any] = {**LIMITS, "memory_gb": 0.6, "isolate": isolate, "pass_env": ["PYTHONPATH"]}
    values = {
        "run.steps": steps, "model.path": str(MODEL), "data.source": str(folder / "prompts.jsonl"), "data.prompt_field": "prompt",
        "data.shuffle": False, "rollout.engine": "toy", "schedule.mode": "synchronous", "schedule.prompts_per_step": PROMPTS,
        "schedule.samples_per_prompt": SAMPLES, "algorithm.filter_zero_variance": False, "trainer.checkpoint_every": 0,
        "trainer.export": False, "mlflow.enabled": False, "reward.on_error": "drop",
        "reward.functions": ["environment" if agents else f"{folder / 'hostile_functions.py'}:judge"],
        **{f"{section}.{key}": value for key, value in children.items()},
    }  # fmt: skip
    if agents:
        values |= {
            "environment.source": f"agent:{sys.executable} {folder / 'agent.py'}",
            "environment.retries": 0,
            "environment.step_timeout_s": 4,
            "environment.reset_timeout_s": 60,
        }
    else:
        values |= {"reward.timeout_s": 1.5, "scorer.processes": 2}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def prepare(folder: Path, isolate: str, bystander: int) -> None:
    """Write the module of the attacks, the agent, the prompts, the model, and the ids of launcher and bystander."""
    write_module(folder)
    (folder / "agent.py").write_text("import hostile_functions\nhostile_functions.agent()\n")
    rows = [{"prompt": f"{'abcdefgh'[number % 8]}d=", "answer": "x", "attack_name": name} for number, name in enumerate(FUNCTIONS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pids").write_text(f"{os.getpid()} {bystander}")
    if isolate != "none":
        (folder / "safe").touch()
    (folder / "run.toml").write_text(f'[run]\nsteps = 1\n[model]\npath = "{MODEL}"\n[data]\nsource = "prompts.jsonl"\n')
    if not MODEL.exists():
        subprocess.run([*PENSTOCK, "model", "tiny", str(MODEL)], check=True, stdout=subprocess.DEVNULL)


def lines_of(file: Path) -> list[str]:
    """The lines of a file that may be absent."""
    return file.read_text().splitlines() if file.exists() else []


def main(arguments: Sequence[str]) -> int:
    """Run and print the table; 0 if nothing was left or reached and the run has finished."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--isolate", choices=["none", "landlock", "bwrap"], default="landlock")
    parser.add_argument("--agents", action="store_true")
    chosen = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="hostile-run-") as directory,
        subprocess.Popen(["sleep", "3600"], env={"S": SECRET}) as bystander,
    ):
        folder, started = Path(directory), time.monotonic()
        try:
            os.environ |= {"PENSTOCK_HOME": str(folder / "home"), "PYTHONPATH": str(folder), "HF_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
            prepare(folder, chosen.isolate, bystander.pid)
            report = report_of(str(folder / "run.toml"), "hostile-run", settings_of(folder, chosen.isolate, agents=chosen.agents))
            alive = bystander.poll() is None
            return print_table(folder, report, chosen.isolate, alive=alive, seconds=time.monotonic() - started)
        finally:
            subprocess.run([*PENSTOCK, "broker", "stop"], check=False, stdout=subprocess.DEVNULL)
            bystander.kill()


def print_table(folder: Path, report: dict[str, Any], isolate: str, *, alive: bool, seconds: float) -> int:
    """Print each attack with what it reached, then the run; 1 if something was left or reached, or the run failed."""
    subprocess.run([*PENSTOCK, "broker", "stop"], check=False, stdout=subprocess.DEVNULL)
    tried, reached = Counter(lines_of(folder / "tried")), dict[str, set[str]]()
    for line in lines_of(folder / "reached"):
        name, _, hit = line.partition(": ")
        reached.setdefault(name, set()).add(hit)
    for name in FUNCTIONS:
        print(f"{name:30} tried {tried[name]:3}  reached {', '.join(sorted(reached.get(name, ()))) or '-'}")
    bad = sorted(set(reached) - NOT_COVERED[isolate])
    left = left_over(folder)
    print(f"{isolate}: {len(tried)} of {len(FUNCTIONS)} attacks tried, {sum(tried.values())} times; {len(bad)} reached; {left} left")
    print(f"run {report['status']} after {report['steps']} steps, {seconds:.0f} s; groups: {json.dumps(report['groups'])}")
    return int(bool(bad or left or not alive or report["status"] != "finished"))
