"""A run of a small model on the device by the product's own commands: one kill of the trainer, then report and audit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from penstock.gpu_check.figures import Figure, Machine, Skipped
from penstock.pipeline.data.tiny.model import make_tiny_model

CONFIG = """\
[run]
name = "gpu-check"
seed = 1

[model]
path = "tiny"

[data]
source = "tiny:successor"
size = 256
max_prompt_tokens = 32

[schedule]
prompts_per_step = 8
samples_per_prompt = 16

[sampling]
max_new_tokens = 16

[algorithm]
loss = "dapo"

[rollout]
workers = 1
concurrency = 128

[trainer]
lr = 7e-4
checkpoint_every = 5

[mlflow]
enabled = false
"""
COMMAND_S = {"cuda": 140.0, "cpu": 500.0}
"""Device -> limit of a command; CPUs are shared with other tests."""
ENGINES = {
    "vllm": (
        "rollout.engine=vllm",
        "schedule.mode=in_flight",
        "rollout.vllm.gpu_memory_utilization=0.3",
        "rollout.vllm.enforce_eager=true",
    ),
    "transformers": ("rollout.engine=transformers", "schedule.mode=pipelined"),
}


def run(here: Machine) -> Iterator[Figure]:
    """With vLLM on a GPU where it is installed, else with the engine of transformers; the trainer is killed halfway."""
    steps, engine = 20 if here.on_gpu else 8, "vllm" if here.on_gpu and find_spec("vllm") else "transformers"
    settings = (*ENGINES[engine], f"rollout.device={here.device.type}", f"trainer.device={here.device.type}")
    with _Commands(here) as commands:
        # The restarted trainer commits fewer steps than it takes to be killed again.
        yield from commands.train("killed", settings, engine=engine, steps=steps, kill_at=steps // 2 + 1)


def colocated(here: Machine) -> Iterator[Figure]:
    """Trainer and `transformers` engine time-share one GPU."""
    if not here.on_gpu:
        raise Skipped("there is no GPU to be shared")
    with _Commands(here) as commands:
        settings = (*ENGINES["transformers"], "launch.placement=colocated", "trainer.backend=torch")
        yield from commands.train("by-turns", settings, engine="transformers", steps=6, kill_at=None)


class _Commands:
    """Runs `penstock` with a state directory and a broker of its own."""

    def __init__(self, here: Machine) -> None:
        self._folder, self._limit_s = here.folder, COMMAND_S[here.device.type]
        self._home = here.folder / "home"
        self._environment = os.environ | {"PENSTOCK_HOME": str(self._home)}

    def __enter__(self) -> "_Commands":
        """Make the model and start the broker. Raises `Skipped` if no broker starts here."""
        (self._folder / "run.toml").write_text(CONFIG, encoding="utf-8")
        if not (self._folder / "tiny").exists():
            make_tiny_model(self._folder / "tiny")
        started = self._done("broker", "start")
        if started.returncode:
            raise Skipped(f"NO RUN WAS MADE, as no Kafka broker starts here: {_last_line(started)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._done("broker", "stop")

    def train(self, run: str, settings: Sequence[str], *, engine: str, steps: int, kill_at: int | None) -> Iterator[Figure]:
        """A run, and its figures; its trainer is killed with SIGKILL after it has computed step `kill_at`."""
        fault = {"PENSTOCK_FAULT": f"ledger.step.before:{kill_at}"} if kill_at else {}
        options = [part for setting in (f"run.steps={steps}", *settings) for part in ("--set", setting)]
        self._checked("run", "run.toml", "--plain", "--run-id", run, *options, **fault)
        report = json.loads((self._home / "runs" / run / "report.json").read_text(encoding="utf-8"))
        audit = json.loads(self._checked("audit", run, "--json"))
        time_s, reward = report["time"], report["reward_trained"]
        yield Figure(name=f"{engine}, steps", value=report["steps"], at_least=steps, at_most=steps)
        yield Figure(name="start", value=time_s["start_s"], unit="s")
        yield Figure(name="training", value=time_s["train_s"], unit="s")
        yield Figure(name="samples", value=report["samples"] / time_s["train_s"], unit="/s")
        yield Figure(name="reward of the first step", value=reward["first"])
        yield Figure(name="reward of the last step", value=reward["last"], at_least=reward["first"])
        killed = int(kill_at is not None)
        yield Figure(name="restarts of the trainer", value=sum(report["restarts"].values()), at_least=killed, at_most=killed)
        violations = sum(len(check["violations"]) for check in audit["checks"])
        yield Figure(name="violations that the audit finds", value=violations, at_most=0)

    def _checked(self, *command: str, **environment: str) -> str:
        """Output of a command. Raises `RuntimeError` if it fails."""
        done = self._done(*command, **environment)
        if done.returncode:
            raise RuntimeError(f"penstock {command[0]} ended with {done.returncode}: {_last_line(done)}")
        return done.stdout

    def _done(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *command],
            cwd=self._folder, env=self._environment | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=self._limit_s, check=False,
        )  # fmt: skip
        print(f"$ penstock {' '.join(command)}", done.stdout[-5000:], done.stderr[-5000:], sep="\n", flush=True)
        return done


def _last_line(done: "subprocess.CompletedProcess[str]") -> str:
    return ((done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"])[-1]
