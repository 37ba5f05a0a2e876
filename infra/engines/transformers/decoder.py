"""Prefill, decode steps and sampling of tokens for one group."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from penstock.infra.engines.base import Sampling

LEAST_ROOM = 32
CACHED_TRACES = 8
"""Number of cached traces: lengths are rounded up to powers of two."""


class Decoder(Protocol):
    """Computes logits for one group at a time."""

    traced: bool

    def prefill(self, prompt: torch.Tensor, *, rows: int, room: int) -> torch.Tensor:
        """Process the prompt `int64[L]`; return logits `[rows, V]` of the first new token. At most `room` new tokens follow."""

    def next(self, ids: torch.Tensor) -> torch.Tensor:
        """Append one token per row, `int64[rows]`; return logits `[rows, V]` of the token after it, valid until the next call."""

    def forget(self) -> None:
        """Free traces, keys and values: the next call is `prefill`."""


def open_decoder(model: Any) -> Decoder:
    """Return the traced decoder if it gives the logits of the model's full forward pass in a short trial, else the plain one."""
    traced = TracedDecoder(model)
    try:
        fits = _agrees(traced, model)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        fits = False
    traced.forget()
    return traced if fits else PlainDecoder(model)


class PlainDecoder:
    """The model's forward as transformers runs it, with a growing cache."""

    traced = False

    def __init__(self, model: Any) -> None:
        self._model = model
        # Without it a long prompt has logits for all its positions.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self._cache: Any = None

    def prefill(self, prompt: torch.Tensor, *, rows: int, room: int) -> torch.Tensor:
        """Process the prompt once, or once per row if its cache cannot be repeated; return logits `[rows, V]` of the first new token."""
        self._cache = DynamicCache(config=self._model.config)
        once = all(isinstance(layer, DynamicLayer) for layer in self._cache.layers)
        logits = self._forward(prompt.unsqueeze(0).expand(1 if once else rows, -1))
        if once:
            self._cache.batch_repeat_interleave(rows)
        return logits.expand(rows, -1)

    def next(self, ids: torch.Tensor) -> torch.Tensor:
        return self._forward(ids.unsqueeze(1))

    def forget(self) -> None:
        self._cache = None

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._last_only)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class TracedDecoder(PlainDecoder):
    """A decode step recorded once per shape and run without Python, on a cache of fixed size and the model's own weights."""

    traced = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._steps: dict[tuple[int, int], _Step] = {}
        self._step: _Step | None = None

    def prefill(self, prompt: torch.Tensor, *, rows: int, room: int) -> torch.Tensor:
        """Process the prompt once, and copy its keys and values to the buffers of a trace for this many rows and tokens."""
        self._cache = DynamicCache(config=self._model.config)
        logits = self._forward(prompt.unsqueeze(0))
        layers = self._cache.layers
        if not layers or not all(type(layer) is DynamicLayer for layer in layers):
            raise TypeError("only plain attention caches have a fixed shape")
        length = max(LEAST_ROOM, 1 << (len(prompt) + room - 1).bit_length())
        step = self._steps.pop((rows, length), None) or _Step(self._model, layers, rows=rows, length=length)
        self._steps[rows, length] = self._step = step
        if len(self._steps) > CACHED_TRACES:
            del self._steps[next(iter(self._steps))]
        step.fill(layers, len(prompt))
        return logits.expand(rows, -1)

    def next(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._step is not None
        return self._step(ids)

    def forget(self) -> None:
        super().forget()
        self._steps.clear()
        self._step = None


class _Step:
    """One trace, or on a GPU one CUDA graph, and its buffers."""

    def __init__(self, model: Any, layers: list[Any], *, rows: int, length: int) -> None:
        example = layers[0].keys
        self._kv = [kv.new_zeros((rows, kv.shape[1], length, kv.shape[3])) for kv in [x.keys for x in layers] + [x.values for x in layers]]
        self._mask = torch.full((1, 1, 1, length), torch.finfo(example.dtype).min, dtype=example.dtype, device=example.device)
        self._position = torch.zeros((1, 1), dtype=torch.int64, device=example.device)
        self._ids = torch.zeros((rows, 1), dtype=torch.int64, device=example.device)
        self._used = 0
        record = _captured if example.device.type == "cuda" else _traced
        self._run = record(_OneToken(model), self._ids, self._position, self._mask, *self._kv)

    def fill(self, layers: list[Any], used: int) -> None:
        """Reset the buffers to the prompt's keys and values, the same for all rows."""
        for buffer, kv in zip(self._kv, [x.keys for x in layers] + [x.values for x in layers], strict=True):
            buffer.zero_()[:, :, :used] = kv
        self._mask.fill_(torch.finfo(self._mask.dtype).min)[..., :used] = 0
        self._used = used

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Append one token per row, `int64[rows]`; return logits `[rows, V]` of the token after it, valid until the next call."""
        self._ids.copy_(ids.unsqueeze(1))
        self._position.fill_(self._used)
        self._mask[..., self._used] = 0
        self._used += 1
        return self._run()


def _traced(step: torch.nn.Module, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that runs `step` on these tensors, whose content may change between calls, without Python."""
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        # The tracer warns of every Python number it records; these are shapes, which are fixed.
        warnings.simplefilter("ignore")
        trace = torch.jit.trace(step, tuple(tensor.clone() for tensor in inputs), check_trace=False)

    def run() -> torch.Tensor:
        with torch.jit.optimized_execution(False):  # a profiling optimiser would fuse operations later and change bits between calls
            logits: torch.Tensor = trace(*inputs)
        return logits

    return run


def _captured(step: torch.nn.Module, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that runs `step` on these tensors as one CUDA graph; its result is a buffer that each call overwrites."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):  # libraries allocate at their first call, which a capture does not allow
        step(*inputs)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits: torch.Tensor = step(*inputs)

    def run() -> torch.Tensor:
        graph.replay()
        return logits

    return run


class _OneToken(torch.nn.Module):
    """The traced function: ids `[B, 1]` at one position over the buffers -> logits `[B, V]`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, position: torch.Tensor, mask: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        half = len(kv) // 2
        cache = _FixedCache(kv[:half], kv[half:], position[0])
        output = self.model(input_ids=ids, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class _FixedCache(Cache):
    """A cache over fixed buffers: writes at `position` and reads everything; the mask hides unused positions."""

    def __init__(self, keys: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], position: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._keys, self._values, self._position = keys, values, position

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys[layer_idx].index_copy_(2, self._position, key)
        self._values[layer_idx].index_copy_(2, self._position, value)
        return self._keys[layer_idx], self._values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _agrees(decoder: Decoder, model: Any) -> bool:
    """Return True if a prompt of 5 tokens and 4 decode steps in 2 rows give the logits of full forward passes up to rounding."""
    parameter = next(model.parameters())
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(18, device=parameter.device).reshape(2, 9) * 7919 % vocabulary
    ids[1, :5] = ids[0, :5]
    with torch.inference_mode():
        logits = [decoder.prefill(ids[0, :5], rows=2, room=4)]
        logits += [decoder.next(ids[:, position]).clone() for position in range(5, 9)]
        expected = model(input_ids=ids).logits[:, 4:].float()
    difference = (torch.stack(logits, 1).float() - expected).abs().max()
    return bool(difference <= (1e-3 if parameter.dtype == torch.float32 else 5e-2) * expected.abs().max())


def choose(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample one token per row of `logits[B, V]` by inverse CDF of `uniform: float64[B]`.

    Returns ids `int64[B]`, their logprobs `float32[B]` and, if the sampling is limited, the support `int64[B, k]`, padded with -1.
    The order is temperature, top-k, top-p, renormalise; the logprobs are those of the sampling distribution. Greedy takes the most likely
    token and reports its logprob at temperature 1.
    """
    logits, support = logits.float(), None
    if sampling.greedy:
        logprobs, ids = logits.log_softmax(-1).max(-1)
        return ids, logprobs, None
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        logits, support = _truncated(logits, sampling)
    logprobs = logits.log_softmax(-1)
    # In float64: over a vocabulary of 150,000 a float32 sum loses rare tokens.
    cdf = logprobs.double().exp_().cumsum_(-1)
    ids = torch.searchsorted(cdf, uniform.unsqueeze(-1) * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1), support


def _truncated(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keep the logits of the `top_k` most likely tokens, and of those the fewest whose probability reaches `top_p` (arXiv 1904.09751).

    Returns logits with -inf elsewhere, and the support of limited sampling.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1.0:
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = -torch.inf
    support = order.masked_fill(ordered.isneginf(), -1)[:, : sampling.top_k] if sampling.limited else None
    return torch.empty_like(ordered).scatter_(-1, order, ordered), support
