"""The memory model against the allocations of the code that it describes: of backward passes on fake tensors, and of DeepSpeed's ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.backends.hardware import GIB
from penstock.pipeline.config.load import from_table, with_values
from penstock.pipeline.launch.check import propose
from penstock.pipeline.launch.check.memory import (
    BUCKET_ELEMENTS,
    PIECE_ELEMENTS,
    PIECE_ELEMENTS_OF_GPU,
    Estimate,
    Shape,
    estimates,
    micro_batch,
    shape_of,
    trainer_parts,
)
from penstock.pipeline.launch.check.propose import Inputs, written
from tests.support.sparse_model import sizes

STATE = ("weights", "masters", "adapters", "moments", "gradients", "context", "gathered weights", "reduced gradients")
"""Parts that follow from the number of parameters and ranks."""


def shape(sizes_: dict[str, Any]) -> Shape:
    of_model = shape_of(sizes_)
    assert of_model is not None
    return of_model


@pytest.mark.costly
def test_logits_come_in_the_pieces_that_the_forward_pass_makes() -> None:
    forward = pytest.importorskip("penstock.infra.backends.logprobs.forward")
    assert (forward.PIECE_ELEMENTS, forward.PIECE_ELEMENTS_OF_GPU) == (PIECE_ELEMENTS, PIECE_ELEMENTS_OF_GPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "gib"),
    [
        ("0.5B", 1, 24), ("0.5B", 8, 24), ("0.5B", 8, 80), ("1.5B", 1, 24), ("1.5B", 8, 24), ("1.5B", 1, 40), ("1.5B", 2, 80),
        ("7B", 2, 40), ("7B", 8, 40), ("7B", 8, 80), ("14B", 8, 80), ("32B", 4, 80),
    ],
)  # fmt: skip
def test_the_estimate_of_what_init_writes_is_within_a_tenth_of_the_peak_of_fake_tensors(
    name: str, gpus: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = pytest.importorskip("tests.support.peaks")
    monkeypatch.setattr(propose, "check_engine", lambda _config: None)
    of_model = shape(sizes(name))
    inputs = Inputs(
        rows=1000, prompt_field="question", answer_field="answer", longest_prompt=250, longest_reference=20, context=32768,
        count=of_model.parameters, half=True, template=True, held_out=64, gpus=gpus, cores=16, bfloat16=True, shape=of_model,
        memory=(gib * GIB,) * gpus,
    )  # fmt: skip
    config = propose._loaded(written(name, "d.jsonl", ["exact_match"], inputs, base=Path(), notify=lambda _: None), Path(), inputs)
    trainer, prompt, completion = config.trainer, config.data.max_prompt_tokens, config.max_completion_tokens
    rows = peaks.batch(prompt=prompt, completion=completion, rows=max(1, micro_batch(config) // (completion + prompt // 8)))
    how = {
        "checkpointing": trainer.gradient_checkpointing, "lora_rank": trainer.lora_rank,
        "in_pieces": trainer.backend == "torch" or trainer.zero_stage < 3,
    }  # fmt: skip
    (few, tokens), (more, _) = (peaks.backward_peak(sizes(name), rows, layers=layers, **how) for layers in (2, 4))
    waiting = 4 * BUCKET_ELEMENTS[trainer.processes > 1] if trainer.backend == "deepspeed" else 0
    passes = more + (more - few) / 2 * (of_model.layers - 4) + min(waiting, 4 * of_model.parameters)
    estimate = estimates(with_values(config, "trainer", micro_batch_tokens=tokens), of_model, gpu=True)[0]
    state = sum(estimate.parts.get(part, 0) for part in STATE)
    print(f"{name} {gpus} x {gib}: {tokens} tokens, estimate {estimate.gpu / 1e9:.1f} GB, peak {(state + passes) / 1e9:.1f} GB")
    assert estimate.gpu - estimate.parts.get("while loading", 0) == pytest.approx(state + passes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stage", "bucket", "overlaps"),
    [(2, 2, 2e7, False), (4, 2, 5e7, False), (4, 2, 2e7, True), (8, 2, 2e7, False), (2, 3, 2e7, False), (8, 3, 2e7, True)],
)
def test_the_estimate_of_a_rank_of_deepspeed_is_within_a_tenth_of_its_peak(
    ranks: int, stage: int, bucket: float, *, overlaps: bool
) -> None:
    peaks = pytest.importorskip("tests.support.peaks")
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "tests.support.peaks", *map(str, (ranks, stage, int(bucket), int(overlaps)))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    count, peak = map(int, result.stdout.splitlines()[-1].split())
    table = {
        "run": {"steps": 1}, "model": {"path": "m"}, "data": {"source": "d.jsonl", "max_prompt_tokens": 10},
        "schedule": {"prompts_per_step": 1, "samples_per_prompt": 2}, "sampling": {"max_new_tokens": 20},
        "trainer": {
            "backend": "deepspeed", "zero_stage": stage, "processes": ranks, "dtype": "bfloat16", "gradient_checkpointing": True,
            "deepspeed_config": {"zero_optimization": {"reduce_bucket_size": bucket, "overlap_comm": overlaps}},
        },
    }  # fmt: skip
    of_model = shape({"model_type": "llama", **peaks.SMALL})
    parts = trainer_parts(from_table(table), of_model, gpu=True)
    print(f"{ranks} ranks, stage {stage}: estimate {Estimate(role='trainer', parts=parts).gpu - parts['context']:,}, peak {peak:,}")
    assert of_model.parameters == pytest.approx(count, rel=1e-3)  # without Qwen2's biases
    assert Estimate(role="trainer", parts=parts).gpu - parts["context"] == pytest.approx(peak, rel=0.1)
