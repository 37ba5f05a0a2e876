"""What a trainer backend trains, and what on: a random model, random batches and a loss whose gradient depends on the logprobs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.infra.backends.base import TokenBatch

VOCABULARY = 40


def save_tiny_model(path: Path, **changed: Any) -> str:
    """Write a random Qwen3 of two layers, the same each time, with these settings changed; returns where it is."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    plain: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    Qwen3ForCausalLM(Qwen3Config(**{**plain, **changed})).save_pretrained(path)
    return str(path)


def batch_of(seed: int, rows: int = 4, *, prompt: int = 3, longest: int = 6) -> TokenBatch:
    """Random prompts and completions of unequal length."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, longest + 1, rows)
    width = prompt + int(lengths.max())
    ids = random.integers(1, VOCABULARY, (rows, width))
    real = np.arange(width)[None] < prompt + lengths[:, None]
    return TokenBatch(
        input_ids=np.where(real, ids, 0).astype(np.int64),
        attention_mask=real,
        completion_mask=real[:, 1:] & (np.arange(width - 1)[None] >= prompt - 1),
        behaviour_logprobs=np.zeros((rows, width - 1), np.float32),
        advantages=random.normal(size=rows).astype(np.float32),
        temperatures=np.linspace(0.7, 1.3, rows, dtype=np.float32),
        groups=np.zeros(rows, np.int64),
        samples=np.arange(rows),
    )


def loss_of(batch: TokenBatch) -> Any:
    """A loss whose gradient depends on the logprobs: -exp(logprob / 4) * advantage, summed."""
    mask, advantages = torch.from_numpy(batch.completion_mask), torch.from_numpy(batch.advantages)[:, None]

    def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        on = logprobs.device
        return -((logprobs / 4).exp() * advantages.to(on) * mask.to(on)).sum(), {"extra": 1.0}

    return loss


def take_step(backend: Any, batches: Sequence[TokenBatch]) -> tuple[float, Any]:
    """One optimizer step; gives the mean loss and what the backend says of the step."""
    count = float(sum(batch.tokens for batch in batches))
    total = sum(backend.backward(batch, loss_of(batch), denominator=count)["loss_sum"] for batch in batches)
    return total / count, backend.step(denominator=count)


def train(backend: Any, steps: int = 5, first: int = 0) -> list[tuple[float, Any]]:
    """Some steps on batches that follow from the step's number."""
    return [take_step(backend, [batch_of(10 * step, 4), batch_of(10 * step + 1, 3)]) for step in range(first, first + steps)]
