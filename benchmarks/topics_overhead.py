"""What the topics cost a run at given sizes: CPU per sample, by phase, and as a share of the workers' CPU, beside the time of a step.

    python benchmarks/topics_overhead.py
    python benchmarks/topics_overhead.py --tokens 16 --steps 40

Every worker is a real process; the engine is the toy one and the trainer's backend computes nothing, so that what is left is the pipeline.
The figures are those of the report's `topics` line. Completions have `--tokens` tokens in the mean: the toy engine draws their lengths
evenly from 1 to twice as many.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.data.tiny.model import make_tiny_model
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create

LIMIT_S = 900.0
REWARD = "def even(prompts, completions, **columns):\n    return [len(text) % 2 for text in completions]\n"


def work_as_trainer(arguments: list[str]) -> int:
    """The trainer's process, with a backend that neither computes nor changes anything."""
    import torch

    from penstock.infra.backends import torch_backend
    from penstock.infra.backends.base import StepResult
    from penstock.pipeline.runtime.main import main

    class FreeBackend(torch_backend.TorchBackend):
        """A model whose optimizer steps cost nothing."""

        def backward(self, batch: Any, loss_fn: Any, *, denominator: float | None = None) -> dict[str, float]:
            """Only ask the loss, at log-probabilities of 0."""
            loss, statistics = loss_fn(torch.zeros(batch.behaviour_logprobs.shape))
            return {"loss_sum": float(loss), "tokens": float(batch.tokens), **statistics}

        def step(self, *, denominator: float) -> StepResult:
            """Only count."""
            self.steps += 1
            return StepResult(grad_norm=0.0, lr=0.0)

    torch_backend.TorchBackend = FreeBackend  # type: ignore[misc]
    return main(["trainer", *arguments])


def settings_of(model: Path, reward: Path, bootstrap: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The run as a table of the configuration."""
    return {
        "run": {"steps": chosen.steps},
        "model": {"path": str(model)},
        "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "reward": {"functions": [f"{reward}:even"]},
        "schedule": {"mode": "one_step_off", "prompts_per_step": chosen.prompts, "samples_per_prompt": chosen.samples},
        "sampling": {"max_new_tokens": 2 * chosen.tokens - 1},
        "algorithm": {"filter_zero_variance": False},
        "rollout": {"engine": "toy", "workers": chosen.workers},
        "trainer": {"micro_batch_tokens": 1 << 17, "export": False, "checkpoint_every": 0},
        "kafka": {"bootstrap": bootstrap},
        "mlflow": {"enabled": False},
    }


def make_model(directory: Path, *, context: int) -> Path:
    """The tiny model, said to have room for `context` tokens: nothing is computed with it."""
    file = make_tiny_model(directory, steps=0) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": context}))
    return directory


def wait_for(processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, int | None]:
    """The statuses once all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        statuses = {name: process.poll() for name, process in processes.items()}
        if any(statuses.values()) or None not in statuses.values() or time.monotonic() > deadline:
            return statuses
        time.sleep(0.1)


def measure(home: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The report's figures of one run, and the seconds between each step and the next."""
    model = make_model(home / "model", context=2 * chosen.tokens + 64)
    reward = home / "even.py"
    reward.write_text(REWARD)
    bootstrap = embedded.start(home=home).bootstrap
    log, run = KafkaLog(bootstrap, client_id="overhead"), f"overhead-{int(time.time()):x}"
    create(from_table(settings_of(model, reward, bootstrap, chosen)), log=log, run_id=run, notify=lambda _: None)
    common = ["--run", run, "--bootstrap", bootstrap]
    commands = {"trainer": [sys.executable, __file__, "--as-trainer", *common]}
    for role, slots in (("feeder", 1), ("scorer", 1), ("rollout", chosen.workers)):
        for slot in range(slots):
            commands[f"{role}-{slot}"] = [sys.executable, "-m", "penstock.workers", role, *common, "--slot", str(slot)]
    with ExitStack() as stack:
        outputs = {name: stack.enter_context((home / f"{name}.txt").open("wb")) for name in commands}
        processes = {name: subprocess.Popen(commands[name], stdout=outputs[name], stderr=subprocess.STDOUT) for name in commands}
        try:
            statuses = wait_for(processes)
        finally:
            for process in processes.values():
                process.terminate()
                process.wait(60)
    if failed := [name for name, status in statuses.items() if status]:
        raise SystemExit(f"{failed[0]} ended with {statuses[failed[0]]}:\n{(home / f'{failed[0]}.txt').read_text()[-2000:]}")
    view = load(log, run)
    log.close()
    moments = [view.steps[step].time_s for step in sorted(view.steps)]
    between = [later - earlier for earlier, later in pairwise(moments)]
    return {**summarise(view)["time"], "samples": sum(map(len, view.samples.values())), "step_s": statistics.median(between)}


def main() -> int:
    """Run, measure, print."""
    if sys.argv[1:2] == ["--as-trainer"]:
        return work_as_trainer(sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32, help="groups per step (U)")
    parser.add_argument("--samples", type=int, default=16, help="samples per group (K)")
    parser.add_argument("--tokens", type=int, default=2000, help="mean tokens of a completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="rollout workers")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="topics-overhead-") as name:
        os.environ["PENSTOCK_HOME"] = name
        try:
            figures = measure(Path(name), chosen)
        finally:
            embedded.stop(Path(name))
    if chosen.json:
        print(json.dumps(figures))
        return 0
    per_step = chosen.prompts * chosen.samples
    print(f"{figures['samples']:,} samples of {chosen.tokens:,} tokens in the mean, {per_step} a step; load {os.getloadavg()[0]:.1f}")
    print(f"topics: {figures['topics_overhead_ms_per_sample']:.3f} ms a sample, {figures['topics_overhead_ratio']:.1%} of the workers' CPU")
    for phase, seconds in figures["topics_overhead_s"].items():
        print(f"  {phase:<8}{1000 * seconds / figures['samples']:>8.3f} ms a sample")
    print(f"step: {figures['step_s']:.2f} s (median)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
