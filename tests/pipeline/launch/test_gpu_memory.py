"""The memory of GPUs decides what `init` writes, what `check` refuses and which splits `plan` compares."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.backends.nvidia import GIB, MEMORY, gpu_memory
from penstock.pipeline import cli
from penstock.pipeline.cli.app import OK, USAGE
from penstock.pipeline.config.load import Config, ConfigError, from_table, load, with_device_defaults
from penstock.pipeline.launch.check import propose
from penstock.pipeline.launch.check.fit import exceeded, memory_line, planned, proposals
from penstock.pipeline.launch.check.memory import Shape, cached_rows, estimates, shape_of
from penstock.pipeline.launch.check.propose import Inputs, written
from tests.support.sparse_model import sizes, sparse_model

COUNTS = {"0.5B": 494, "1.5B": 1544, "7B": 7616, "14B": 14770, "32B": 32764}
TABLE = """
"""


def shape(name: str) -> Shape:
    of_model = shape_of(sizes(name))
    assert of_model is not None
    return of_model


def inputs(name: str, *, gpus: int, memory: int) -> Inputs:
    return Inputs(
        rows=1000, prompt_field="question", answer_field="answer", longest_prompt=250, longest_answer=20, context=32768,
        count=COUNTS[name] * 10**6, half=True, template=True, held_out=64, gpus=gpus, cores=16, bfloat16=True, shape=shape(name),
        memory=(memory,) * gpus,
    )  # fmt: skip


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for GPUs counts as installed."""
    monkeypatch.setattr(propose, "check_engine", lambda _config: None)


def proposal(name: str, *, gpus: int, memory: int) -> Config:
    """What `init` writes, as a run reads it."""
    text = written(name, "rows.jsonl", ["exact_match"], inputs(name, gpus=gpus, memory=memory), base=Path(), notify=lambda _: None)
    return propose._loaded(text, Path(), inputs(name, gpus=gpus, memory=memory))


def as_row(config: Config) -> str:
    trainer, rollout = config.trainer, config.rollout
    size = config.engine.gpus(rollout.vllm)
    way = trainer.backend if trainer.backend == "torch" else f"zero-{trainer.zero_stage}"
    adapters, again = " lora" if trainer.lora_rank else "", " checkpointing" if trainer.gradient_checkpointing else ""
    return f"{trainer.processes}+{rollout.workers}x{size} {way}{adapters}{again} {trainer.micro_batch_tokens} tokens {rollout.concurrency} rows"


if __name__ == "__main__":
    propose.check_engine = lambda _config: None
    for name in COUNTS:
        for memory in (24, 40, 80):
            for gpus in (1, 2, 4, 8):
                try:
                    print(f"{name:<4} {gpus} x {memory}: {as_row(proposal(name, gpus=gpus, memory=memory * GIB))}")
                except ConfigError as error:
                    print(f"{name:<4} {gpus} x {memory}: {str(error).partition(' (')[0]}")
