"""A run over a link of 50 Mbit/s: workers lag behind the trainer, and nobody dies.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --mbit 50 --mparams 135 --workers 2 --private

A whole run of real processes in a network namespace of its own, whose loopback carries 50 Mbit/s in both directions together: version 0
of 135 M parameters in float32 alone takes longer than the 60 s of silence after which a reading is given up. The engine is the toy one,
and the trainer's arithmetic is replaced: each step changes 1 % of the elements. Ends with 1 if a worker ends with an error, the run does
not finish, a reading was given up, or the audit finds anything.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import own_network
from command import PENSTOCK

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.data.tiny.model import make_tiny_model
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create

RUN, LIMIT_S, HIDDEN, CHANGED = "slow", 3000.0, 576, 0.01
REWARD = "def even(prompts, completions, **columns):\n    return [len(text) % 2 for text in completions]\n"


def work_as_trainer(arguments: list[str]) -> int:
    """The trainer's process, with a backend that changes 1 % of the elements in each step."""
    import torch

    from penstock.infra.backends import torch_backend
    from penstock.infra.backends.base import StepResult
    from penstock.pipeline.runtime.main import main

    class RandomBackend(torch_backend.TorchBackend):
        """A model that learns nothing and changes all the same."""

        def backward(self, batch: Any, loss_fn: Any, *, denominator: float | None = None) -> dict[str, float]:
            """Only ask the loss, at log-probabilities of 0."""
            loss, statistics = loss_fn(torch.zeros(batch.behaviour_logprobs.shape))
            return {"loss_sum": float(loss), "tokens": float(batch.tokens), **statistics}

        @torch.no_grad()
        def step(self, *, denominator: float) -> StepResult:
            """Change elements at random."""
            generator = torch.Generator().manual_seed(self.steps)
            for parameter in self.parameters:
                flat = parameter.view(-1)
                flat[torch.randint(0, len(flat), (int(len(flat) * CHANGED) + 1,), generator=generator)] += 0.5
            self.steps += 1
            return StepResult(grad_norm=0.0, lr=0.0)

    torch_backend.TorchBackend = RandomBackend  # type: ignore[misc]
    return main(["trainer", *arguments])


def make_model(directory: Path, parameters: int) -> Path:
    """A model of about so many random parameters with the tiny model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_model(directory, steps=0)
    tiny = json.loads((directory / "config.json").read_text())
    config = LlamaConfig(
        **{name: tiny[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")},
        hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_attention_heads=9, num_hidden_layers=max(1, parameters // (16 * HIDDEN**2)),
        tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def settings_of(model: Path, reward: Path, bootstrap: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The run as a table of the configuration."""
    return {
        "run": {"steps": chosen.steps},
        "model": {"path": str(model)},
        "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "reward": {"functions": [f"{reward}:even"]},
        "schedule": {"mode": "in_flight", "prompts_per_step": 4, "samples_per_prompt": 4, "max_lag": 4},
        "sampling": {"max_new_tokens": 8},
        "algorithm": {"filter_zero_variance": False},
        "rollout": {"engine": "toy", "workers": chosen.workers},
        "trainer": {"export": False, "checkpoint_every": 0},
        "weights": {"shared": not chosen.private},
        "kafka": {"bootstrap": bootstrap},
        "mlflow": {"enabled": False},
    }


def wait_for(processes: dict[str, "subprocess.Popen[bytes]"]) -> dict[str, int | None]:
    """The statuses once all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        statuses = {name: process.poll() for name, process in processes.items()}
        if any(statuses.values()) or None not in statuses.values() or time.monotonic() > deadline:
            return statuses
        time.sleep(0.5)


def measure(home: Path, chosen: argparse.Namespace) -> int:
    """Make the run, wait for its end, print how it went."""
    model = make_model(home / "model", chosen.mparams * 1_000_000)
    reward = home / "even.py"
    reward.write_text(REWARD)
    bootstrap = embedded.start(home=home).bootstrap
    log = KafkaLog(bootstrap, client_id="slow-link")
    create(from_table(settings_of(model, reward, bootstrap, chosen)), log=log, run_id=RUN, notify=lambda _: None)
    own_network.throttle(chosen.mbit)
    common = ["--run", RUN, "--bootstrap", bootstrap]
    commands = {"trainer": [sys.executable, __file__, "--as-trainer", *common]}
    for role, slots in (("feeder", 1), ("scorer", 1), ("rollout", chosen.workers)):
        for slot in range(slots):
            commands[f"{role}-{slot}"] = [sys.executable, "-m", "penstock.workers", role, *common, "--slot", str(slot)]
    began, carried = time.monotonic(), own_network.carried()
    with ExitStack() as stack:
        outputs = {name: stack.enter_context((home / f"{name}.txt").open("wb")) for name in commands}
        processes = {name: subprocess.Popen(commands[name], stdout=outputs[name], stderr=subprocess.STDOUT) for name in commands}
        try:
            statuses = wait_for(processes)
        finally:
            for process in processes.values():
                process.terminate()
                process.wait(60)
    took, moved = time.monotonic() - began, own_network.carried() - carried
    said = {name: (home / f"{name}.txt").read_text() for name in commands}
    own_network.throttle(10_000.0)  # the report reads the whole run
    view = load(log, RUN)
    lag = summarise(view)["lag"]
    audit = subprocess.run([*PENSTOCK, "audit", RUN, "--bootstrap", bootstrap], check=False, stdout=subprocess.PIPE, text=True)
    between = [(later.time_ns - before.time_ns) / 1e9 for before, later in pairwise(view.versions[n] for n in sorted(view.versions))]
    print(
        f"{len(view.steps)} of {chosen.steps} steps in {took:.0f} s; {moved / took * 8 / 1e6:.1f} Mbit/s in the mean; statuses {statuses}"
    )
    print(f"seconds between versions: {', '.join(f'{seconds:.0f}' for seconds in between)}")
    print(f"lag of what was trained: {lag['mean']:.2f} versions in the mean, {lag['max']:.0f} at most")
    print(f"audit: {audit.stdout.strip().splitlines()[-1]}")
    given_up = [line for name, text in said.items() for line in text.splitlines() if "cannot be read" in line or "no chunk came" in line]
    print("\n".join(given_up) or "no reading was given up")
    log.close()
    ended_badly = any(statuses.values()) or None in statuses.values()
    return int(ended_badly or len(view.steps) < chosen.steps or bool(given_up) or audit.returncode != 0)


def main() -> int:
    """Run and judge."""
    if sys.argv[1:2] == ["--as-trainer"]:
        return work_as_trainer(sys.argv[2:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--mparams", type=int, default=135, help="million parameters, in float32")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--private", action="store_true", help="each worker reads for itself")
    chosen = parser.parse_args()
    own_network.enter()
    with tempfile.TemporaryDirectory(prefix="penstock-slow-") as name:
        os.environ["PENSTOCK_HOME"] = name
        try:
            return measure(Path(name), chosen)
        finally:
            embedded.stop(Path(name))


if __name__ == "__main__":
    sys.exit(main())
