"""Peaks of a trainer's memory: of a backward pass on fake tensors, and of DeepSpeed as one rank of several that do not exist.

`python -m tests.support.peaks RANKS STAGE BUCKET OVERLAPS` prints the parameters, and the largest sum of bytes, of such a rank.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.logprobs import forward
from penstock.infra.backends.logprobs.prefix_tree import TREE_ATTENTION
from penstock.infra.backends.model import Adapters
from tests.support.allocations import Allocations

SMALL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 20_000, "tie_word_embeddings": False,
}  # fmt: skip


def batch(*, prompt: int, completion: int, rows: int, samples: int = 8) -> TokenBatch:
    """Rows of full length, `samples` of each prompt."""
    random, length = np.random.default_rng(0), prompt + completion
    ids, groups = random.integers(0, 1_000, (rows, length)), np.arange(rows) // samples
    ids[:, :prompt] = ids[groups * samples, :prompt]
    trained = np.zeros((rows, length - 1), bool)
    trained[:, prompt - 1 :] = True
    return TokenBatch(
        input_ids=ids, attention_mask=np.ones((rows, length), bool), completion_mask=trained,
        behaviour_logprobs=np.zeros((rows, length - 1), np.float32), advantages=np.ones(rows, np.float32),
        temperatures=np.ones(rows, np.float32), groups=groups, samples=np.arange(rows) % samples,
    )  # fmt: skip


def backward_peak(
    sizes: dict[str, Any], rows: TokenBatch, *, layers: int, checkpointing: bool, lora_rank: int, in_pieces: bool
) -> tuple[int, int]:
    """(bytes above those before the pass, computed tokens) of forward and backward pass of a model with so many layers, in bfloat16."""

    def pieces(_row: torch.Tensor, *, rows: int, vocabulary: int) -> list[tuple[slice, slice]]:
        step = max(1, forward.PIECE_ELEMENTS_OF_GPU // vocabulary)  # fake tensors have no values to search in
        starts = range(0, rows, step)
        return [(part := slice(start, min(start + step, rows)), part) for start in starts]

    config = transformers.AutoConfig.for_model(**{**sizes, "num_hidden_layers": layers})
    originals = forward._pieces, torch.nn.Module._apply
    with FakeTensorMode(allow_non_fake_inputs=True), Allocations() as allocations, torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        model.set_attn_implementation(TREE_ATTENTION)
        try:
            forward._pieces = pieces
            if lora_rank:
                torch.nn.Module._apply = lambda module, *_, **__: module  # type: ignore[assignment,method-assign]
                Adapters(model, rank=lora_rank, alpha=32.0, seed=0)
                torch.nn.Module._apply = originals[1]  # type: ignore[method-assign]
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.train()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    _sums_gradients(parameter)
            before = allocations.peak = allocations.now
            logprobs, *_, computed = forward.Forward(shared=True, in_pieces=in_pieces)(model, rows, device=torch.device("cpu"))
            logprobs.sum().backward()
        finally:
            forward._pieces, torch.nn.Module._apply = originals  # type: ignore[method-assign]
    return allocations.peak - before, computed


def _sums_gradients(parameter: torch.Tensor) -> None:
    total = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)

    def add(_: torch.Tensor) -> None:
        total.add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[arg-type]


def deepspeed_peak(ranks: int, stage: int, bucket: int, overlaps: int) -> tuple[int, int]:
    """(parameters, peak in bytes) of rank 0 of a trainer whose collectives do nothing, in its second step, on the CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from penstock.infra.backends.deepspeed.backend import DeepSpeedBackend

    os.environ.update(WORLD_SIZE=str(ranks), RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29777")
    torch.distributed.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks)
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SMALL), dtype=torch.bfloat16)
        count = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(Path(folder))
        del model
        options = {"zero_optimization": {"reduce_bucket_size": bucket, "overlap_comm": bool(overlaps)}}
        rows = batch(prompt=10, completion=20, rows=2)
        with Allocations() as allocations:
            backend = DeepSpeedBackend(
                model_path=folder, lr=1e-6, dtype="bfloat16", device="cpu", zero_stage=stage, deepspeed_config=options,
                gradient_checkpointing=True,
            )  # fmt: skip
            for _ in range(2):
                allocations.peak = allocations.now
                backend.backward(rows, lambda logprobs: (logprobs.sum(), {}))
                backend.step(denominator=1.0)
    return count, allocations.peak


if __name__ == "__main__":
    print(*deepspeed_peak(*map(int, sys.argv[1:])), flush=True)
    os._exit(0)  # the group of ranks that do not exist cannot be left
