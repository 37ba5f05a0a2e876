"""From logits to tokens: one pure function, vectorised over the rows.

The rule: a row's token depends on its own logits and its own uniform number only, and its logprob is of the distribution it was drawn from.
"""

import torch

from penstock.infra.engines.base import Sampling


def choose(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token a row by inverse CDF: ids `int64[B]` and their logprobs `float32[B]`, from `logits[B, V]` and `uniform: float64[B]`.

    The order is temperature, top-k, top-p, renormalise. Greedy takes the likeliest token and reports its logprob at temperature 1.
    """
    logits = logits.float()
    if sampling.greedy:
        logprobs, ids = logits.log_softmax(-1).max(-1)
        return ids, logprobs
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        logits = _truncated(logits, sampling)
    logprobs = logits.log_softmax(-1)
    # In float64: over a vocabulary of 150,000 a float32 sum loses the rarer tokens.
    cdf = logprobs.double().exp_().cumsum_(-1)
    ids = torch.searchsorted(cdf, uniform.unsqueeze(-1) * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


def _truncated(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Leave the `top_k` likeliest tokens, and of those the fewest whose probability reaches `top_p` (arXiv 1904.09751)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1.0:
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = -torch.inf
    return torch.empty_like(ordered).scatter_(-1, order, ordered)
