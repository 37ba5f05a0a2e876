"""Computes the logprobs of a micro-batch, on rows with shared prefixes and no padding, or on padded rows."""

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.infra.backends.base import TokenBatch
from penstock.infra.backends.logprobs.prefix_tree import TREE_ATTENTION, compiled, prefix_tree, tree_expected, tree_inputs
from penstock.infra.backends.settings import PIECE_ELEMENTS, PIECE_ELEMENTS_OF_GPU
from penstock.infra.backends.value_head import ValueHead
from penstock.infra.errors import BackendError
from penstock.infra.tensors.float32_head import float32_logits

TRIAL_WIDTH, TRIAL_WIDTH_OF_GPU = 33, 400
"""Length of the longest row that `choose_forward` compares; on a GPU the line of its tokens has several blocks."""


class Head(NamedTuple):
    """An output layer."""

    weight: torch.Tensor
    """[V, hidden] weight of the output layer."""
    bias: torch.Tensor | None = None
    in_float32: bool = False
    """True for float32 logits from a bfloat16 layer."""

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[U, V] logits of hidden states [U, hidden]."""
        return (float32_logits if self.in_float32 else functional.linear)(states, self.weight, self.bias)


class Passed(NamedTuple):
    """Result of a forward pass; tensors are [B, L-1] in float32, 0 on untrained tokens."""

    logprobs: torch.Tensor
    entropies: torch.Tensor | None
    values: torch.Tensor | None
    computed: int
    """Number of tokens that passed through the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One way to compute the logprobs of a model."""

    shared: bool = False
    """True to compute every distinct prefix once without padding; False for padded rows."""
    in_pieces: bool = False
    """True to compute logits from hidden states, a piece at a time; False to take all logits from the model."""
    compiled: bool = False
    """True for kernels that torch.compile makes: attention on the line of distinct tokens, and softmax over the vocabulary in one pass."""
    layers_compiled: bool = False
    """True if torch.compile also made the model's layers."""

    def __call__(
        self, module: Any, batch: TokenBatch, *, device: torch.device, entropy: bool = False, value: ValueHead | None = None
    ) -> Passed:
        """Pass a micro-batch through `module`: the model, or a DeepSpeed engine that wraps it. `value` needs `in_pieces`."""
        if not self.shared:
            return self._padded(module, batch, device=device, entropy=entropy, value=value)
        tree = prefix_tree(batch, line=self.compiled).to(device)
        with tree_expected(tree):
            states, head = self._run(module, **tree_inputs(tree), logits_to_keep=tree.predict)
        logprobs, entropies = token_logprobs(
            states[0], head=head, temperatures=tree.temperatures, row=tree.row, target=tree.target, entropy=entropy,
            support=_support_at(tree.slot, batch), fused=self.compiled,
        )  # fmt: skip
        values = None if value is None else value(states[0])[tree.row]
        return _passed(logprobs, entropies, values, slot=tree.slot, batch=batch, computed=len(tree.ids))

    def _padded(self, module: Any, batch: TokenBatch, *, device: torch.device, entropy: bool, value: ValueHead | None) -> Passed:
        """Compute padded rows without an attention mask: causal attention ignores padding on the right, and is fastest without a mask."""
        input_ids = torch.from_numpy(batch.input_ids).to(device, non_blocking=True)
        columns = torch.from_numpy(batch.logit_columns()).to(device)
        states, head = self._run(module, input_ids=input_ids[:, :-1], logits_to_keep=columns)
        rows, width = states.shape[:2]
        temperatures = torch.from_numpy(batch.temperatures).to(device).repeat_interleave(width)
        trained = torch.from_numpy(batch.completion_mask).to(device)[:, columns].flatten()
        row = trained.nonzero()[:, 0] if trained.any() else torch.zeros(1, dtype=torch.int64, device=device)
        slot = row // width * (input_ids.shape[1] - 1) + columns[row % width]
        states = states.reshape(rows * width, -1)
        logprobs, entropies = token_logprobs(
            states, head=head, temperatures=temperatures, row=row,
            target=input_ids[:, 1:][:, columns].flatten()[row], entropy=entropy, support=_support_at(slot, batch),
        )  # fmt: skip
        values = None if value is None else value(states)[row]
        return _passed(logprobs, entropies, values, slot=slot, batch=batch, computed=rows * (input_ids.shape[1] - 1))

    def _run(self, module: Any, **inputs: Any) -> tuple[torch.Tensor, Head | None]:
        """Return hidden states and the output layer, or without `in_pieces` logits and None."""
        if not self.in_pieces:
            return module(**inputs, use_cache=False).logits, None
        layer = module.get_output_embeddings()
        with _passing(layer):
            states = module(**inputs, use_cache=False).logits
        return states, Head(layer.weight, getattr(layer, "bias", None), getattr(layer, "in_float32", False))

    def __str__(self) -> str:
        rows = f"{'shared' if self.shared else 'padded'} rows{', compiled' if self.compiled else ''}"
        return f"{rows}{', layers compiled' if self.layers_compiled else ''}, logits {'in pieces' if self.in_pieces else 'whole'}"


def choose_forward(model: Any, *, share: str, device: torch.device, in_pieces: bool = True, compile_layers: bool = False) -> Forward:
    """Return the fastest way whose logprobs equal the plain forward's, and set up the model's attention and layers for it.

    `share` is `trainer.share_prompts`: `auto` shares prefixes if the logprobs stay equal, `on` raises `BackendError` if they do not, and
    `off` is the plain forward. `compile_layers` is `trainer.compile`.
    """
    plain = Forward()
    if share == "off":
        _set_compiled(model, compile_layers)
        return Forward(layers_compiled=compile_layers)
    config, on_gpu = model.config.get_text_config(), device.type == "cuda"
    longest = getattr(config, "max_position_embeddings", None) or TRIAL_WIDTH_OF_GPU
    batch = _trial_batch(config.vocab_size, width=min(TRIAL_WIDTH_OF_GPU, longest) if on_gpu else TRIAL_WIDTH)
    in_pieces = in_pieces and _gap(model, batch, Forward(in_pieces=True), plain, device=device) is None
    model.set_attn_implementation(TREE_ATTENTION)
    reasons = []
    # Without tf32, float32 products use no tensor cores: their kernels are slow, and slow to compile.
    compilable = on_gpu and (model.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest")
    for fused, layers in itertools.product((True, False) if compilable else (False,), (True, False) if compile_layers else (False,)):
        shared = Forward(shared=True, in_pieces=in_pieces, compiled=fused, layers_compiled=layers)
        _set_compiled(model, layers)
        reasons.append(_gap(model, batch, shared, plain, device=device))
        if reasons[-1] is None:
            return shared
        if fused or layers:
            logging.getLogger("penstock").warning("the trainer does not use %s, and tries a simpler way: %s", shared, reasons[-1])
    model.set_attn_implementation("sdpa")
    if share == "on":
        kind = model.config.model_type
        raise BackendError(f"trainer.share_prompts: {kind!r} models cannot share prompts ({reasons[-1]}); set it to 'auto' or 'off'")
    return Forward(in_pieces=in_pieces)


def _set_compiled(model: Any, compiled: bool) -> None:
    """Run the model's layers as torch.compile makes them, for sizes of all kinds, or as they are written.

    With gradient checkpointing only normalisations and MLPs are compiled: a compiled layer with attention may save other tensors when it
    is repeated, which torch rejects.
    """
    parts = ("Norm", "MLP") if model.is_gradient_checkpointing else ()
    for module in model.modules():
        if type(module).__name__.endswith(parts) if parts else isinstance(module, GradientCheckpointingLayer):
            if compiled:
                module.compile(dynamic=True)
            else:
                vars(module)["_compiled_call_impl"] = None  # torch has no other way back


def _gap(model: Any, batch: TokenBatch, tried: Forward, plain: Forward, *, device: torch.device) -> str | None:
    """Return why `tried` cannot replace `plain`; None if logprobs, and gradients of compiled kernels, agree up to rounding."""
    trained = torch.from_numpy(batch.completion_mask).to(device)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad][1:2] if tried.compiled else []
    results = []
    try:
        with torch.set_grad_enabled(bool(weights)):
            for forward, stance in ((tried, "default"), (plain, "force_eager")):
                with torch.compiler.set_stance(stance):
                    logprobs = forward(model, batch, device=device)[0][trained]
                results.append([logprobs.detach(), *(torch.autograd.grad(logprobs.sum(), weights) if weights else ())])
        if tried.compiled:
            with torch.no_grad():  # passes without gradient have kernels of their own
                tried(model, batch, device=device)
    # Architectures fail in many ways; a way that raises is not used.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    (logprobs, *gradient), (expected, *expected_gradient) = results
    exact = model.dtype == torch.float32
    gap = float((logprobs - expected).abs().mean())
    if not gap <= (1e-3 if exact else 0.15):
        return f"its logprobs differ by {gap:.2g} on average"
    for mine, theirs in zip(gradient, expected_gradient, strict=True):
        gap = float((mine - theirs).float().norm() / theirs.float().norm().clamp(min=1e-12))
        if not gap <= (1e-2 if exact else 0.3):
            return f"its gradient differs by {gap:.2g} of its norm"
    return None


def _trial_batch(vocabulary: int, *, width: int) -> TokenBatch:
    """Return two prompts with a common prefix and three completions of each, as pseudo-random ids, for `_gap`."""
    random = np.random.default_rng(0)
    ids = random.integers(0, vocabulary, (6, width))
    head, prompt, fork = (width * part // 33 for part in (8, 24, 27))
    ids[:, :head] = ids[0, :head]
    ids[1:3, :prompt], ids[4:, :prompt] = ids[0, :prompt], ids[3, :prompt]
    ids[2, :fork] = ids[1, :fork]
    ends = np.array([33, 30, 28, 27, 33, 31]) * width // 33
    real = np.arange(width)[None] < ends[:, None]
    return TokenBatch(
        input_ids=np.where(real, ids, 0), attention_mask=real, completion_mask=real[:, 1:] & (np.arange(width - 1) >= prompt - 1)[None],
        behaviour_logprobs=np.zeros((6, width - 1), np.float32), advantages=np.zeros(6, np.float32), temperatures=np.ones(6, np.float32),
        groups=np.arange(6) // 3, samples=np.arange(6) % 3,
    )  # fmt: skip


def _support_at(slot: torch.Tensor, batch: TokenBatch) -> torch.Tensor | None:
    """Return [M, k] support of the tokens at the flat indices `slot` of [B, L-1]; None for the full vocabulary."""
    if batch.support is None:
        return None
    return torch.from_numpy(batch.support).to(slot.device, torch.int64).flatten(0, 1)[slot]


def _scatter(values: torch.Tensor, slot: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    shape = batch.completion_mask.shape
    flat = torch.zeros(shape[0] * shape[1], dtype=values.dtype, device=values.device).index_copy(0, slot, values)
    return torch.where(torch.from_numpy(batch.completion_mask).to(values.device), flat.view(shape), 0.0)


def _passed(logprobs: torch.Tensor, *others: torch.Tensor | None, slot: torch.Tensor, batch: TokenBatch, computed: int) -> Passed:
    """Spread logprobs, entropies and values [M] at the flat indices `slot` over [B, L-1], with 0 elsewhere."""
    entropies, values = (None if other is None else _scatter(other, slot, batch) for other in others)
    return Passed(_scatter(logprobs, slot, batch), entropies, values, computed)


@contextlib.contextmanager
def _passing(layer: Any) -> Iterator[None]:
    """In the block, let the output layer return its input, so that the model returns hidden states instead of logits."""
    own = vars(layer).get("forward")
    layer.forward = lambda states: states
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own


def _normalise(logits: torch.Tensor, scale: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [U] logsumexp of scaled logits [U, V], and their entropies if requested."""
    scaled = logits.to(scale.dtype) * scale[:, None]
    normaliser = scaled.logsumexp(1)
    return normaliser, normaliser - (torch.softmax(scaled, dim=1) * scaled).sum(dim=1) if entropy else None


def _of_softmax(
    logits: torch.Tensor, scale: torch.Tensor, normaliser: torch.Tensor, total: torch.Tensor, of_entropy: torch.Tensor | None,
    entropies: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return [U, V] gradient of logits, without the part of one-hot targets.

    d logp / d logits = (onehot - softmax) * scale, d entropy / d logits = -softmax * (log softmax + entropy) * scale.
    """
    part = (logits.to(scale.dtype) * scale[:, None]).sub_(normaliser[:, None])
    if of_entropy is None or entropies is None:
        return part.exp_().mul_(-total[:, None])
    share_of_entropy = of_entropy[:, None] * (part + entropies[:, None])
    return part.exp_().mul_(-total[:, None] - share_of_entropy)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax((states @ weight.T + bias) * scale) of target tokens [M], one piece of rows at a time, so that no full logits exist.

    `row` is each token's row in `states`, which several may share; without weight, states are logits. Backward repeats several pieces.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: Any, bias: Any, scale: torch.Tensor, row: torch.Tensor, target: torch.Tensor,
        entropy: bool, fused: bool, in_float32: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ([M] logprobs, [U] entropies or an empty tensor); saves the logits only if they are a single piece."""
        normaliser, logprobs = torch.empty_like(scale), torch.empty(len(row), dtype=scale.dtype, device=scale.device)
        entropies = torch.zeros_like(scale) if entropy else scale.new_zeros(0)
        ctx.pieces = _pieces(row, rows=len(states), vocabulary=states.shape[1] if weight is None else weight.shape[0])
        ctx.fused, ctx.in_float32, saved = fused, in_float32, None
        normalise = compiled(_normalise) if fused else _normalise
        for rows, tokens in ctx.pieces:
            logits = states[rows] if weight is None else Head(weight, bias, in_float32)(states[rows])
            saved = logits if len(ctx.pieces) == 1 else None
            normaliser[rows], of_rows = normalise(logits, scale[rows], entropy)
            of_targets = logits[row[tokens] - rows.start, target[tokens]].to(scale.dtype) * scale[row[tokens]]
            logprobs[tokens] = of_targets - normaliser[row[tokens]]
            if of_rows is not None:
                entropies[rows] = of_rows
        ctx.save_for_backward(states, weight, bias, scale, row, target, normaliser, entropies, saved)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropies: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of states, weight and bias; None for the other arguments."""
        states, weight, bias, scale, row, target, normaliser, entropies, saved = ctx.saved_tensors
        grad = scale.new_zeros(len(row)) if grad is None else grad
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros(weight.shape, dtype=scale.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=scale.dtype, device=bias.device) if ctx.needs_input_grad[2] else None
        total = torch.zeros_like(scale).index_add_(0, row, grad) * scale
        share = grad * scale[row]
        of_softmax = compiled(_of_softmax) if ctx.fused else _of_softmax
        for rows, tokens in ctx.pieces:
            logits = saved
            if logits is None:
                logits = states[rows] if weight is None else Head(weight, bias, ctx.in_float32)(states[rows])
            of_entropy = (None, None) if grad_entropies is None else (grad_entropies[rows] * scale[rows], entropies[rows])
            part = of_softmax(logits, scale[rows], normaliser[rows], total[rows], *of_entropy)
            part.index_put_((row[tokens] - rows.start, target[tokens]), share[tokens], accumulate=True)
            if grad_bias is not None:
                grad_bias += part.sum(0)
            part = part.to(states.dtype)
            grad_states[rows] = part if weight is None else part @ weight
            if grad_weight is not None:
                _add_product(grad_weight, part.T, states[rows])
        head = None if grad_weight is None else grad_weight.to(weight.dtype), None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_states, *head, None, None, None, None, None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total`, with a float32 sum of products in a shorter type."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def token_logprobs(
    states: torch.Tensor, *, head: Head | None, temperatures: torch.Tensor, row: torch.Tensor, target: torch.Tensor, entropy: bool = False,
    support: torch.Tensor | None = None, fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return ([M] logprobs in float32 or wider, [M] entropies or None), both with gradient.

    `states` [U, hidden] pass through `head`; without a head they are logits [U, V].
    `temperatures` [U]; `row` [M], ascending, is the index in U that predicts each token, `target` [M] its id. `support` [M, k], padded
    with -1, restricts the distribution to the ids that each token was sampled from, itself included. With `fused`, softmax is compiled.
    """
    scale = temperatures.to(torch.promote_types(states.dtype, torch.float32)).reciprocal()
    if support is not None:
        return _within(support, states, head, scale, row, target, entropy=entropy)
    weight, bias, in_float32 = head or (None, None, False)
    logprobs, entropies = _TokenLogprobs.apply(states, weight, bias, scale, row, target, entropy, fused, in_float32)
    return logprobs, entropies[row] if entropy else None


def _within(
    support: torch.Tensor, states: torch.Tensor, head: Head | None, scale: torch.Tensor, row: torch.Tensor, target: torch.Tensor,
    *, entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Compute `token_logprobs` with each token's distribution renormalised over its support."""

    def of_piece(rows: slice, tokens: slice, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = part if head is None else head(part)
        scaled, at, ids = logits.to(scale.dtype) * scale[rows, None], row[tokens] - rows.start, support[tokens]
        logprobs = scaled[at[:, None], ids.clamp(min=0)].masked_fill(ids < 0, -torch.inf).log_softmax(1)
        of_targets = scaled[at, target[tokens]] - scaled[at, ids[:, 0]] + logprobs[:, 0]
        if not entropy:
            return of_targets, of_targets.new_zeros(0)
        logprobs = logprobs.masked_fill(ids < 0, 0.0)
        return of_targets, -(logprobs.exp() * logprobs).masked_fill(ids < 0, 0.0).sum(1)

    pieces = _pieces(row, rows=len(states), vocabulary=states.shape[1] if head is None else head.weight.shape[0])
    run = of_piece if len(pieces) == 1 else lambda *piece: checkpoint(of_piece, *piece, use_reentrant=False)
    logprobs, entropies = zip(*(run(rows, tokens, states[rows]) for rows, tokens in pieces), strict=True)
    return torch.cat(logprobs), torch.cat(entropies) if entropy else None


def _pieces(row: torch.Tensor, *, rows: int, vocabulary: int) -> list[tuple[slice, slice]]:
    """Divide the rows into pieces of bounded logits; return the rows of each, and the tokens that they predict."""
    step = max(1, (PIECE_ELEMENTS_OF_GPU if row.is_cuda else PIECE_ELEMENTS) // max(1, vocabulary))
    if rows <= step:
        return [(slice(0, rows), slice(0, len(row)))]
    starts = list(range(0, rows, step))
    ends = torch.searchsorted(row, torch.tensor([*starts, rows], device=row.device)).tolist()
    return [(slice(start, min(start + step, rows)), slice(ends[n], ends[n + 1])) for n, start in enumerate(starts)]
