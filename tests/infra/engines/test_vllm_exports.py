"""What a trainer exports is a model that vLLM draws from as transformers does: the trained one, and adapters merged or by themselves."""

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.engines.base import GroupRequest, Sampling
from tests.support.training import train
from tests.support.vllm_helpers import load_model, open_engine, save_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

TOKENS, PROMPTS = 24, 6


def exported(directory: Path, *, lora_rank: int) -> tuple[Path, Path]:
    """A random model and what three steps of training make of it."""
    from penstock.infra.backends.registry import open_backend

    base = save_model(directory / "base", tied=True)
    backend = open_backend("torch", model_path=str(base), lr=1e-2, lora_rank=lora_rank)
    train(backend, 3)
    backend.export(directory / "model", backend.weights())
    backend.close()
    return base, directory / "model"


def prompts() -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(3, 40, 5 + number).astype(np.int32) for number in range(PROMPTS)]


def by_transformers(model: Any) -> list[list[int]]:
    """The most likely tokens, one after another, of a whole forward pass each."""
    import torch

    found = []
    for prompt in prompts():
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def by_engine(engine: Any) -> list[list[int]]:
    how = Sampling(max_new_tokens=TOKENS, stop_ids=(), greedy=True)
    for number, prompt in enumerate(prompts()):
        engine.submit(GroupRequest(group=number, prompt_ids=prompt, samples=(0,), rows=1, seed=0, sampling=how))
    found: dict[int, list[int]] = {}
    while not engine.idle:
        found |= {one.group: one.token_ids.tolist() for one in engine.step()}
    return [found[number] for number in range(PROMPTS)]


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["full", "LoRA"])
def test_an_export_gives_the_same_greedy_tokens_in_vllm_as_in_plain_transformers(tmp_path: Path, lora_rank: int) -> None:
    base, model = exported(tmp_path, lora_rank=lora_rank)
    expected = by_transformers(load_model(model))
    assert expected != by_transformers(load_model(base))
    with closing(open_engine(model)) as engine:
        assert by_engine(engine) == expected
