"""Tiny models for vLLM, weights to swap in, and the recompute that tells whether a label is true."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.engines.base import Completion, EngineSettings, GroupRequest, Sampling, Span
from penstock.infra.tensors.stream import TensorBytes

ROWS = 4
LIMIT = 1e-4
"""Nats between vLLM's logprob and a recompute in float32."""


def save_model(
    directory: Path, *, tied: bool, head_dim: int = 32, layers: int = 2, hidden: int = 64, positions: int = 512, **others: Any
) -> Path:
    """A random Qwen3 whose logits are far from flat, so that a wrong version shows."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=90, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=positions, tie_word_embeddings=tied, initializer_range=0.15,
        **others,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def load_model(directory: Path) -> Any:
    """The model as transformers computes it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)


def version_values(directory: Path) -> Callable[[int], dict[str, Any]]:
    """The parameters of each version: those of the directory, and another third of noise on top for every version; -1 is the directory."""
    import torch

    base = {name: parameter.clone() for name, parameter in load_model(directory).named_parameters()}

    def values(version: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(version + 1)
        moved = version != -1
        return {name: value + moved * 0.3 * value.abs().mean() * torch.randn(value.shape, generator=random) for name, value in base.items()}

    return values


def tensors_of(values: dict[str, Any]) -> list[TensorBytes]:
    """As they come from the topic."""
    return [
        TensorBytes(name=name, dtype="float32", shape=tuple(value.shape), data=value.numpy().tobytes()) for name, value in values.items()
    ]


def largest_error(
    directory: Path, asked: dict[int, GroupRequest], completions: Iterable[Completion], values: Callable[[int], dict[str, Any]]
) -> float:
    """Largest difference of any token's logprob from a recompute of the whole sequence under the weights of its label."""
    import torch

    model, drawn = load_model(directory), [completion for completion in completions if len(completion.token_ids)]
    worst = 0.0
    for version in sorted({span.version for completion in drawn for span in completion.spans}):
        for name, parameter in model.named_parameters():
            parameter.copy_(values(version)[name])
        for completion in drawn:
            bounds = [*(span.start for span in completion.spans), len(completion.token_ids)]
            assert bounds[0] == 0
            assert all(start < end for start, end in itertools.pairwise(bounds))
            places = [(bounds[i], bounds[i + 1]) for i, span in enumerate(completion.spans) if span.version == version]
            if not places:
                continue
            request = asked[completion.group]
            ids = torch.tensor(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
            with torch.inference_mode():
                logits = model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1] / request.sampling.temperature
            if completion.support is not None:  # of the distribution over these ids alone
                kept = torch.from_numpy(completion.support.astype(np.int64))
                among = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool).scatter_(1, kept % (logits.shape[1] + 1), True)
                logits = logits.masked_fill(~among[:, :-1], -torch.inf)
            expected = logits.log_softmax(-1).gather(1, ids[len(request.prompt_ids) :, None])[:, 0].numpy()
            for start, end in places:
                worst = max(worst, float(np.abs(expected[start:end] - completion.logprobs[start:end]).max()))
    return worst


def open_engine(directory: Path, **changes: Any) -> Any:
    from penstock.infra.engines.vllm.engine import VllmEngine

    return VllmEngine(EngineSettings(directory=directory, **{"concurrency": 16, "longest": 256} | changes))


def request(group: int, *, temperature: float = 1.0, tokens: int = 60, prompt: int = 9, rows: int = ROWS, **limits: Any) -> GroupRequest:
    ids = np.random.default_rng(group).integers(3, 90, prompt).astype(np.int32)
    sampling = Sampling(temperature=temperature, max_new_tokens=tokens, stop_ids=(2,), **limits)
    return GroupRequest(group=group, prompt_ids=ids, samples=tuple(range(rows)), rows=rows, seed=3, sampling=sampling)


def draw_with_swaps(engine: Any, asked: list[GroupRequest], values: Any, *, every: int) -> tuple[list[Completion], int]:
    """All samples, with new weights after every `every` steps as long as samples are in work, and the number of these swaps."""
    for one in asked:
        engine.submit(one)
    found: list[Completion] = []
    steps = swaps = 0
    while not engine.idle:
        found += engine.step()
        steps += 1
        if steps % every == 0 and not engine.idle:
            engine.load_weights(engine.version + 1, tensors_of(values(engine.version + 1)))
            swaps += 1
    return found, swaps


def completions(found: dict[str, Any]) -> list[Completion]:
    """What vllm_owner.py wrote of what its engine drew."""
    return [
        Completion(
            group=one["group"], sample=one["sample"], token_ids=np.array(one["ids"], dtype=np.int32),
            logprobs=np.array(one["logprobs"], dtype=np.float32), finish="length",
            spans=tuple(Span(*span) for span in one["spans"]), started_ns=0, ended_ns=0,
        )
        for one in found["drawn"]
    ]  # fmt: skip
