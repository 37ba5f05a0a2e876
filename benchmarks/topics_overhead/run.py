"""Cost of the topics in a run of these sizes: CPU per sample and phase, and as a share of the workers' CPU, with the time of a step.

    python -m benchmarks topics_overhead run
    python -m benchmarks topics_overhead run --tokens 16 --steps 40

Every worker is a real process; the engine is the toy one and the trainer's backend computes nothing, so that the pipeline is left. The
figures are those of the report's `topics` line. Completions have `--tokens` tokens on average: the toy engine samples their lengths
uniformly from 1 to twice as many.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.support.command import WORKER, command_of, failed, own_broker, parser_of, processes
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create

LIMIT_S = 900.0
FREE_TRAINER = [*command_of("benchmarks.topics_overhead.run"), "--as-trainer"]
"""Command of a trainer that computes nothing."""
FUNCTIONS = """def even(prompts, completions, **columns):
    return [len(text) % 2 for text in completions]


def raw(rewards):
    return rewards
"""


def work_as_trainer(arguments: Sequence[str]) -> int:
    """Run the trainer with a backend that neither computes nor changes anything."""
    import torch

    from penstock.infra.backends import torch_backend
    from penstock.infra.backends.base import StepResult
    from penstock.pipeline.runtime.main import main

    class FreeBackend(torch_backend.TorchBackend):
        """A model whose optimizer steps cost nothing."""

        def backward(self, batch: Any, loss_fn: Any, *, denominator: float | None = None) -> dict[str, float]:
            """Compute the loss at log-probabilities of 0."""
            loss, statistics = loss_fn(torch.zeros(batch.behaviour_logprobs.shape))
            return {"loss_sum": float(loss), "tokens": float(batch.tokens), **statistics}

        def step(self, *, denominator: float) -> StepResult:
            """Count the step."""
            self.steps += 1
            return StepResult(grad_norm=0.0, lr=0.0)

    torch_backend.TorchBackend = FreeBackend  # type: ignore[misc]
    return main(["trainer", *arguments])


def settings_of(home: Path, bootstrap: str, *, context: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run on the tiny model as a table of the configuration; nothing computes with its weights, so it may claim any `context`."""
    from penstock.pipeline.data.tiny.model import make_tiny_model

    functions, model = home / "functions.py", make_tiny_model(home / "model", steps=0)
    functions.write_text(FUNCTIONS)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": context}))
    table = {
        "model": {"path": str(model)}, "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "reward": {"functions": [f"{functions}:even"]}, "schedule": {"mode": "one_step_off"},
        "algorithm": {"advantage": f"{functions}:raw", "filter_zero_variance": False}, "rollout": {"engine": "toy", "workers": 1},
        "trainer": {"micro_batch_tokens": 1 << 17, "export": False, "checkpoint_every": 0}, "kafka": {"bootstrap": bootstrap},
        "mlflow": {"enabled": False},
    }  # fmt: skip
    return {name: table.get(name, {}) | sections.get(name, {}) for name in {**table, **sections}}


def measure(home: Path, bootstrap: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The report's figures of one run, and the median seconds between steps."""
    log, run = KafkaLog(bootstrap, client_id="overhead"), f"overhead-{int(time.time()):x}"
    settings = settings_of(
        home, bootstrap, context=2 * chosen.tokens + 64, run={"steps": chosen.steps},
        schedule={"prompts_per_step": chosen.prompts, "samples_per_prompt": chosen.samples},
        sampling={"max_new_tokens": 2 * chosen.tokens - 1}, algorithm={"advantage": "grpo"}, rollout={"workers": chosen.workers},
    )  # fmt: skip
    create(from_table(settings), log=log, run_id=run, notify=lambda _: None)
    common = ["--run", run, "--bootstrap", bootstrap]
    slots = [("feeder", 0), ("scorer", 0), *(("rollout", slot) for slot in range(chosen.workers))]
    commands = {f"{role}-{slot}": [*WORKER, role, *common, "--slot", str(slot)] for role, slot in slots}
    with processes({"trainer": [*FREE_TRAINER, *common], **commands}, home) as running:
        deadline, statuses = time.monotonic() + LIMIT_S, dict[str, int | None]()
        while time.monotonic() < deadline and not any(statuses.values()) and (not statuses or None in statuses.values()):
            statuses = {name: process.poll() for name, process in running.items()}
            time.sleep(0.1)
    for name, status in statuses.items():
        if status:
            raise failed(f"{name} ended with {status}", home / f"{name}.txt")
    view = load(log, run)
    log.close()
    moments = [view.steps[step].time_s for step in sorted(view.steps)]
    between = [later - earlier for earlier, later in pairwise(moments)]
    return {**summarise(view)["time"], "samples": sum(map(len, view.samples.values())), "step_s": statistics.median(between)}


def main(arguments: Sequence[str]) -> int:
    """Run, measure, print."""
    if arguments[:1] == ["--as-trainer"]:
        return work_as_trainer(arguments[1:])
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--prompts", type=int, default=32, help="groups per step (U)")
    parser.add_argument("--samples", type=int, default=16, help="samples per group (K)")
    parser.add_argument("--tokens", type=int, default=2000, help="mean tokens of a completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="rollout workers")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    chosen = parser.parse_args(arguments)
    with own_broker("topics-overhead") as (home, broker):
        figures = measure(home, broker.bootstrap, chosen)
    if chosen.json:
        print(json.dumps(figures))
        return 0
    per_step = chosen.prompts * chosen.samples
    print(f"{figures['samples']:,} samples of {chosen.tokens:,} tokens on average, {per_step} a step; load {os.getloadavg()[0]:.1f}")
    print(f"topics: {figures['topics_overhead_ms_per_sample']:.3f} ms a sample, {figures['topics_overhead_ratio']:.1%} of the workers' CPU")
    for phase, seconds in figures["topics_overhead_s"].items():
        print(f"  {phase:<8}{1000 * seconds / figures['samples']:>8.3f} ms a sample")
    print(f"step: {figures['step_s']:.2f} s (median)")
    return 0
