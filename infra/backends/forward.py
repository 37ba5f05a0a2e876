"""Computes log-probabilities of the sampled tokens.

The rule: logits become float32 before anything is summed over the vocabulary, a chunk of rows at a time, so that no
float32 copy of all logits ever exists.
"""

from typing import Any

import torch

from penstock.infra.backends.batch import TokenBatch

CHUNK_ELEMENTS = 2**24  # 64 MiB of float32 logits at a time: large enough to be fast, small beside any model


class _DrawnLogprobs(torch.autograd.Function):
    """Log-softmax at one column of each row; saves only the logits in their own dtype and each row's normaliser."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, token_ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(scale)
        normaliser = torch.empty_like(scale)
        for rows in _chunks(logits):
            scaled = logits[rows].to(scale.dtype) * scale[rows, None]
            torch.logsumexp(scaled, dim=1, out=normaliser[rows])
            torch.sub(scaled.gather(1, token_ids[rows, None])[:, 0], normaliser[rows], out=out[rows])
        ctx.save_for_backward(logits, token_ids, scale, normaliser)
        ctx.mark_non_differentiable(normaliser)
        return out, normaliser

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, token_ids, scale, normaliser = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        weight = grad * scale
        for rows in _chunks(logits):
            # d logp / d logits = (onehot - softmax) * scale
            part = (logits[rows].to(scale.dtype) * scale[rows, None]).sub_(normaliser[rows, None]).exp_().mul_(-weight[rows, None])
            drawn = token_ids[rows, None]
            part.scatter_(1, drawn, part.gather(1, drawn) + weight[rows, None])
            grad_logits[rows] = part.to(logits.dtype)
        return grad_logits, None, None


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
    """log softmax(logits / temperature) at `token_ids`, in float32.

    `logits` [..., V] of any float dtype, `token_ids` [...], `temperature` a number or a tensor that broadcasts over [...];
    returns [...]. Memory above the logits themselves is one chunk of 64 MiB, forward and backward.
    """
    return _drawn(logits, token_ids, temperature)[0].view(token_ids.shape)


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature), float32 [...], without gradient, for reports."""
    flat = logits.detach().reshape(-1, logits.shape[-1])
    scale = _scale(flat, logits.shape[:-1], temperature)
    out = torch.empty_like(scale)
    for rows in _chunks(flat):
        scaled = flat[rows].to(scale.dtype) * scale[rows, None]
        normaliser = torch.logsumexp(scaled, dim=1)
        out[rows] = normaliser - (torch.softmax(scaled, dim=1) * scaled).sum(dim=1)
    return out.view(logits.shape[:-1])


def batch_logprobs(model: Any, batch: TokenBatch, *, device: torch.device, entropy: bool = False) -> tuple[torch.Tensor, float]:
    """([B, L-1] float32 log-probabilities, 0 where nothing is trained; the sum of entropies over trained tokens if asked for).

    Logits are computed only in columns that some row trains. No attention mask is passed: with padding on the right
    causality hides it, and attention without a mask takes the fast path.
    """
    input_ids = torch.from_numpy(batch.input_ids).to(device, non_blocking=True)
    columns = torch.from_numpy(batch.logit_columns()).to(device)
    mask = torch.from_numpy(batch.completion_mask).to(device)
    temperatures = torch.from_numpy(batch.temperatures).to(device)[:, None]
    logits = model(input_ids=input_ids[:, :-1], logits_to_keep=columns, use_cache=False).logits
    drawn = token_logprobs(logits, input_ids[:, 1:][:, columns], temperatures.expand(-1, len(columns)))
    trained = mask[:, columns]
    drawn = torch.where(trained, drawn, torch.zeros((), device=device))
    total = float((token_entropy(logits, temperatures.expand(-1, len(columns))) * trained).sum()) if entropy else 0.0
    return torch.zeros(mask.shape, device=device).index_copy(1, columns, drawn), total


def _drawn(logits: torch.Tensor, token_ids: torch.Tensor, temperature: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    flat = logits.reshape(-1, logits.shape[-1])
    scale = _scale(flat, token_ids.shape, temperature)
    result: tuple[torch.Tensor, torch.Tensor] = _DrawnLogprobs.apply(flat, token_ids.reshape(-1), scale)
    return result


def _scale(flat: torch.Tensor, shape: torch.Size, temperature: torch.Tensor | float) -> torch.Tensor:
    dtype = torch.promote_types(flat.dtype, torch.float32)
    per_token = torch.as_tensor(temperature, dtype=dtype, device=flat.device).expand(shape).reshape(-1)
    return per_token.reciprocal()


def _chunks(flat: torch.Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, flat.shape[1]))
    return [slice(start, start + rows) for start in range(0, flat.shape[0], rows)]
