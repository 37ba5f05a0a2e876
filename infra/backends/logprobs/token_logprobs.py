"""Log-probabilities of drawn tokens, a piece of the vocabulary's logits at a time.

The rule: logits become float32 before anything is summed over the vocabulary, and at most 64 MiB of them are alive: where all of them
do not fit, they are computed again for the gradient.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PIECE_ELEMENTS = 2**23
"""32 MiB of float32 logits in a piece: as much again may be kept for the gradient, or is the intermediate of a sum."""


class _Drawn(torch.autograd.Function):
    """log softmax((states @ weight.T + bias) * scale); several drawn tokens may share one row; without weight, states are logits."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: Any, bias: Any, scale: torch.Tensor, row: torch.Tensor, target: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vocabulary = states.shape[1] if weight is None else weight.shape[0]
        normaliser, drawn = torch.empty_like(scale), torch.empty(len(row), dtype=scale.dtype, device=scale.device)
        entropies = torch.zeros_like(scale) if entropy else scale.new_zeros(0)
        pieces = _pieces(row, rows=len(states), vocabulary=vocabulary)
        kept = None
        for rows, tokens in pieces:
            logits = states[rows] if weight is None else functional.linear(states[rows], weight, bias)
            kept = logits if len(pieces) == 1 else None
            scaled = logits.to(scale.dtype) * scale[rows, None]
            normaliser[rows] = scaled.logsumexp(1)
            drawn[tokens] = scaled[row[tokens] - rows.start, target[tokens]] - normaliser[row[tokens]]
            if entropy:
                entropies[rows] = normaliser[rows] - (torch.softmax(scaled, dim=1) * scaled).sum(dim=1)
        ctx.save_for_backward(states, weight, bias, scale, row, target, normaliser, entropies, kept)
        ctx.set_materialize_grads(False)
        return drawn, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropies: torch.Tensor | None) -> tuple[Any, ...]:
        states, weight, bias, scale, row, target, normaliser, entropies, kept = ctx.saved_tensors
        grad = scale.new_zeros(len(row)) if grad is None else grad
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros(weight.shape, dtype=scale.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=scale.dtype, device=bias.device) if ctx.needs_input_grad[2] else None
        total = torch.zeros_like(scale).index_add_(0, row, grad) * scale
        share = grad * scale[row]
        for rows, tokens in _pieces(row, rows=len(states), vocabulary=states.shape[1] if weight is None else weight.shape[0]):
            logits = kept
            if logits is None:
                logits = states[rows] if weight is None else functional.linear(states[rows], weight, bias)
            # d logp / d logits = (onehot - softmax) * scale, d entropy / d logits = -softmax * (log softmax + entropy) * scale
            part = (logits.to(scale.dtype) * scale[rows, None]).sub_(normaliser[rows, None])
            if grad_entropies is None:
                part = part.exp_().mul_(-total[rows, None])
            else:
                share_of_entropy = (grad_entropies[rows] * scale[rows])[:, None] * (part + entropies[rows, None])
                part = part.exp_().mul_(-total[rows, None] - share_of_entropy)
            part.index_put_((row[tokens] - rows.start, target[tokens]), share[tokens], accumulate=True)
            if grad_bias is not None:
                grad_bias += part.sum(0)
            part = part.to(states.dtype)
            grad_states[rows] = part if weight is None else part @ weight
            if grad_weight is None:
                continue
            if part.dtype == grad_weight.dtype:
                grad_weight.addmm_(part.T, states[rows])
            else:
                grad_weight += part.T @ states[rows]
        given = None if grad_weight is None else grad_weight.to(weight.dtype), None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_states, *given, None, None, None, None


def token_logprobs(
    states: torch.Tensor,
    *,
    head: tuple[torch.Tensor, torch.Tensor | None] | None,
    temperatures: torch.Tensor,
    row: torch.Tensor,
    target: torch.Tensor,
    entropy: bool = False,
    support: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """([M] log-probabilities in float32, or wider, [M] entropies of the distributions if asked for), both with gradient.

    `states` [U, hidden] go through `head`, the output layer's weight [V, hidden] and bias; without a head they are logits [U, V].
    `temperatures` [U]; `row` [M], ascending, says which of the U predicts each token, `target` [M] its id. `support` [M, k] are the ids
    that each token was drawn from, itself among them, -1 behind the last: both are of the distribution over those alone.
    """
    weight, bias = head or (None, None)
    scale = temperatures.to(torch.promote_types(states.dtype, torch.float32)).reciprocal()
    if support is not None:
        return _within(support, states, weight, bias, scale, row, target, entropy=entropy)
    drawn, entropies = _Drawn.apply(states, weight, bias, scale, row, target, entropy)
    return drawn, entropies[row] if entropy else None


def _within(
    support: torch.Tensor, states: torch.Tensor, weight: Any, bias: Any, scale: torch.Tensor, row: torch.Tensor, target: torch.Tensor,
    *, entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """What `token_logprobs` gives, renormalised over each token's support."""

    def of_piece(rows: slice, tokens: slice, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = part if weight is None else functional.linear(part, weight, bias)
        scaled, at, ids = logits.to(scale.dtype) * scale[rows, None], row[tokens] - rows.start, support[tokens]
        logprobs = scaled[at[:, None], ids.clamp(min=0)].masked_fill(ids < 0, -torch.inf).log_softmax(1)
        drawn = scaled[at, target[tokens]] - scaled[at, ids[:, 0]] + logprobs[:, 0]
        if not entropy:
            return drawn, drawn.new_zeros(0)
        logprobs = logprobs.masked_fill(ids < 0, 0.0)
        return drawn, -(logprobs.exp() * logprobs).masked_fill(ids < 0, 0.0).sum(1)

    pieces = _pieces(row, rows=len(states), vocabulary=states.shape[1] if weight is None else weight.shape[0])
    run = of_piece if len(pieces) == 1 else lambda *given: checkpoint(of_piece, *given, use_reentrant=False)
    drawn, entropies = zip(*(run(rows, tokens, states[rows]) for rows, tokens in pieces), strict=True)
    return torch.cat(drawn), torch.cat(entropies) if entropy else None


def _pieces(row: torch.Tensor, *, rows: int, vocabulary: int) -> list[tuple[slice, slice]]:
    """Rows of each piece, and the drawn tokens that they predict."""
    step = max(1, PIECE_ELEMENTS // max(1, vocabulary))
    starts = list(range(0, rows, step))
    ends = torch.searchsorted(row, torch.tensor([*starts, rows], device=row.device)).tolist()
    return [(slice(start, min(start + step, rows)), slice(ends[n], ends[n + 1])) for n, start in enumerate(starts)]
