"""The forward pass: which way each architecture takes and what it computes, attention on the line of distinct tokens, and the head."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function

from penstock.gpu_check.figures import Figure, Machine
from penstock.gpu_check.models import samples
from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.logprobs.forward import Forward, Head, choose_forward, token_logprobs
from penstock.infra.backends.logprobs.prefix_tree import PrefixTree, block_mask, line_attention, prefix_tree, tree_attention
from penstock.infra.backends.torch_backend import TorchBackend
from penstock.pipeline.learner.micro_batches import pack

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 64, "query_pre_attn_scalar": 64},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "lfm2": {"full_attn_idxs": [1]},
    "qwen2": {},
}
"""Model types, and what is special about each; `lfm2` carries state along the line, so that its rows cannot be shared."""


def forward(here: Machine) -> Iterator[Figure]:
    """Each architecture's chosen way against padded rows; then one of them repeats a pass, and passes of other sizes."""
    batch = pack(samples(2, per_group=4, prompt=100, mean=60, longest=200, vocabulary=500))
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in a run
    for kind, more in ARCHITECTURES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            kind, vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, **more,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(here.device).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.05)
        for dtype in (torch.float32,) if kind == "lfm2" else (torch.float32, torch.bfloat16):
            model.to(dtype)
            started = time.perf_counter()
            chosen = choose_forward(model, share="auto", device=here.device)
            chosen_s = time.perf_counter() - started
            with torch.no_grad():
                gap = (chosen(model, batch, device=here.device)[0] - Forward()(model, batch, device=here.device)[0]).abs()
            trained = torch.from_numpy(batch.completion_mask).to(here.device)
            name, exact = f"{kind} {str(dtype)[6:]}, {chosen}", dtype == torch.float32
            value = float(gap[trained].max() if exact else gap[trained].mean())
            yield Figure(name=name, value=value, unit="nats", at_most=1e-3 if exact else 0.02)
            if here.on_gpu:
                yield Figure(name="compiled", value=chosen.compiled, at_least=not exact)
                yield Figure(name="chosen within", value=chosen_s, unit="s")
    model.save_pretrained(here.folder / kind)
    yield from _repeated(here, here.folder / kind, batch)


def _repeated(here: Machine, path: Path, batch: TokenBatch) -> Iterator[Figure]:
    for deterministic in ("warn", "strict"):
        backend = TorchBackend(model_path=str(path), lr=1e-6, device=here.device.type, dtype="bfloat16", deterministic=deterministic)
        gradients = []
        for _ in range(2):
            backend.backward(batch, lambda logprobs: (logprobs.sum(), {}))
            gradients.append([master.grad for master in backend.masters])
            for master in backend.masters:
                master.grad = None
        different = sum(not torch.equal(*pair) for pair in zip(*gradients, strict=True))
        limit = 0 if deterministic == "strict" else None
        yield Figure(name=f"gradients that differ in a second pass, {deterministic}", value=different, at_most=limit)
    if not here.on_gpu:
        return
    before = counters["stats"]["unique_graphs"]
    for size in range(1, 21):
        other = pack(samples(1 + size % 3, per_group=1 + size % 5, prompt=60 * size, mean=20 * size, longest=800, vocabulary=500))
        backend.backward(other, lambda logprobs: (logprobs.sum(), {}))
        backend.logprobs(other)
    yield Figure(name="graphs compiled again for 20 other batches", value=counters["stats"]["unique_graphs"] - before, at_most=0)


def attention(here: Machine) -> Iterator[Figure]:
    """One layer, forward and backward: against float32 with a dense mask, and its time next to rows and padded rows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in a run
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    for name, heads, groups, width in (("0.5B", 14, 2, 64), ("7B", 28, 4, 128)) if here.on_gpu else (("tiny", 4, 2, 16),):
        layer = torch.nn.Module()
        vars(layer).update(num_key_value_groups=heads // groups, is_causal=True)

        def tensors(
            rows: int, size: int, shape: tuple[int, ...] = (heads, groups, groups, heads), width: int = width
        ) -> list[torch.Tensor]:
            """Query, key, value and the gradient of the output."""
            made = [torch.randn(rows, count, size, width, device=here.device, dtype=dtype).requires_grad_() for count in shape]
            return [*made[:3], made[3].detach().transpose(1, 2)]

        few, batch = pack(_lengths(here, 1)), pack(_lengths(here, 6))
        line = prefix_tree(few, line=True).to(here.device)
        assert line.ends is not None
        index = torch.arange(len(line.ids), device=here.device)
        allowed = (index[None] <= index[:, None]) & (index[:, None] < line.ends[None])
        inputs = tensors(1, len(line.ids))
        exact = _results(partial(_dense, allowed=allowed), [tensor.detach().float().requires_grad_() for tensor in inputs])
        way = _on_line(line) if here.on_gpu else partial(_dense, allowed=allowed)
        results = _results(way, inputs)
        gap = max(float((mine.float() - theirs).norm() / theirs.norm()) for mine, theirs in zip(results, exact, strict=True))
        yield Figure(name=f"{name}: error of output and gradients", value=gap, at_most=0.02)
        again = _results(way, inputs)
        yield Figure(
            name="tensors that differ when repeated",
            value=sum(not torch.equal(*pair) for pair in zip(results, again, strict=True)),
            at_most=0,
        )
        on_rows, on_line = (prefix_tree(batch, line=line).to(here.device) for line in (False, True))
        inputs = tensors(1, len(on_rows.ids))
        rows_s = _seconds_a_layer(here, partial(_on_rows, on_rows, layer), inputs)
        yield Figure(name=f"on rows, {len(on_rows.ids)} tokens", value=rows_s * 1e3, unit="ms")
        if not here.on_gpu:
            continue
        inputs = tensors(1, len(on_line.ids))
        line_s = _seconds_a_layer(here, _on_line(on_line), inputs)
        yield Figure(name="on the line", value=line_s * 1e3, unit="ms")
        yield Figure(name="faster by", value=rows_s / line_s, at_least=1.5)
        padded = tensors(*batch.input_ids.shape)
        padded_s = _seconds_a_layer(here, _padded, padded)
        yield Figure(name="padded rows", value=padded_s * 1e3, unit="ms")
        yield Figure(name="line to padded rows", value=line_s / padded_s, at_most=2.0)


def _lengths(here: Machine, prompts: int) -> list[Any]:
    return samples(prompts) if here.on_gpu else samples(prompts, per_group=4, prompt=20, mean=10, longest=20)


def _results(way: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of query, key and value."""
    *tensors, upstream = inputs
    out = way(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


def _seconds_a_layer(here: Machine, way: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """Time of one of ten layers, so that launches overlap with kernels as in a model."""
    return here.seconds(lambda: [_results(way, inputs) for _ in range(10)], repeats=3) / 10


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, allowed: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


def _padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _on_rows(tree: PrefixTree, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return tree_attention(layer, query, key, value, None, prefix_tree=tree)[0]


def _on_line(tree: PrefixTree) -> Callable[..., torch.Tensor]:
    assert tree.ends is not None
    mask = block_mask(tree.ends, tree.positions, causal_mask_function)
    return lambda query, key, value: line_attention(query, key, value, mask, scaling=query.shape[-1] ** -0.5)


def head(here: Machine) -> Iterator[Figure]:
    """Logprobs and entropies of 512 rows and their gradients against float64; then time and memory of 7,000 rows of a 7B's head."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in a run
    vocabulary, hidden = (152_064, 3584) if here.on_gpu else (1000, 32)
    weight = (torch.randn(vocabulary, hidden, device=here.device) * hidden**-0.5).requires_grad_()
    states = torch.randn(512 if here.on_gpu else 16, hidden, device=here.device).requires_grad_()
    results = [
        _of_head(here, states, weight),
        _of_head(here, states.detach().double().requires_grad_(), weight.detach().double().requires_grad_()),
    ]
    names = ("logprobs", "entropies", "gradient of states", "gradient of weights")
    for name, mine, exact in zip(names, *results, strict=True):
        yield Figure(name=f"{name}: error", value=float((mine - exact).abs().max() / exact.abs().max()), at_most=1e-4)
    del results
    rows = 7000 if here.on_gpu else 32
    weight, states = (tensor.detach().bfloat16().requires_grad_() for tensor in (weight, torch.randn(rows, hidden, device=here.device)))
    for entropy in (False, True):
        seconds = here.seconds(partial(_of_head, here, states, weight, entropy=entropy), repeats=3)
        name = f"{rows} rows{' with entropies' if entropy else ''}"
        yield Figure(name=name, value=seconds / rows * 1e6, unit="us a row", at_most=None if entropy else here.limit(16.0))
        peak = here.peak_bytes(partial(_of_head, here, states, weight, entropy=entropy))
        yield Figure(name="peak", value=peak / 1e9, unit="GB", at_most=here.limit(4.0))


def _of_head(here: Machine, states: torch.Tensor, weight: torch.Tensor, *, entropy: bool = True) -> list[torch.Tensor]:
    """Logprobs, entropies if requested, and the gradients of their sums; half of the rows predict two tokens."""
    rows, generator = len(states), torch.Generator().manual_seed(0)
    row = torch.arange(rows).repeat_interleave(1 + torch.arange(rows) % 2)
    target = torch.randint(len(weight), row.shape, generator=generator)
    logprobs, entropies = token_logprobs(
        states, head=Head(weight), temperatures=torch.full((rows,), 0.9, device=here.device), row=row.to(here.device),
        target=target.to(here.device), entropy=entropy, fused=here.on_gpu,
    )  # fmt: skip
    values = [logprobs] if entropies is None else [logprobs, entropies]
    gradients = torch.autograd.grad(sum(value.sum() for value in values), (states, weight))
    return [*(value.detach() for value in values), *gradients]
