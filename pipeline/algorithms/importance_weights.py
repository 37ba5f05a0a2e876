"""Importance weights for a behaviour policy that is not the proximal one: truncated or masked, by token, by sequence or by its mean.

The rule: weights carry no gradient and never change what a step is divided by; a masked token counts in the denominator like any other.
"""

import torch

from penstock.pipeline.algorithms.registry import CORRECTIONS

MAX_LOG_RATIO = 20.0
"""Log ratios are cut to +-20 before `exp`: e^20 = 5e8 is far outside any bound, and its square still fits into float32."""


def token_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - behaviour_logprobs) [B, L-1] per token; 1 outside `mask` [B, L-1]; the logarithm is cut to +-`MAX_LOG_RATIO`."""
    return log_ratio(logprobs, behaviour_logprobs, mask).exp()


def sequence_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The product of a sequence's token ratios over `mask`, as [B, 1]; 1 where nothing is trained; cut like a token's.

    The unbiased weight of a whole completion; its variance grows with the length (Liu et al. 2025, see `CORRECTIONS`).
    """
    difference = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    return difference.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def geometric_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The geometric mean of a sequence's token ratios over `mask`, as [B, 1]; 1 where nothing is trained; cut like a token's.

    Its variance falls with the length where the product's grows, for a bias: it weighs a completion by its mean token.
    """
    return mean_log_ratio(logprobs, behaviour_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_log_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean of logprobs - other_logprobs over a sequence's `mask`, as [B, 1]; 0 where nothing is trained."""
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, logprobs - other_logprobs, 0.0).sum(dim=1, keepdim=True) / tokens


def log_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - other_logprobs [B, L-1], 0 outside `mask`, cut to +-`MAX_LOG_RATIO`: beyond that it is constant and has no gradient."""
    return torch.where(mask, logprobs - other_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}


def truncated(ratio: torch.Tensor, *, high: float) -> torch.Tensor:
    """min(high, ratio), of any shape: truncated importance sampling (TIS); smaller variance for a bias towards the proximal policy."""
    return ratio.clamp(max=high)


def masked(ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """The ratio where low <= ratio <= high, else 0, of any shape: masked importance sampling (MIS), with low > 0 IcePop."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def accepted_sequences(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor, *, limit: float
) -> torch.Tensor:
    """[B, 1] False for sequences over whose `mask` the mean k3 of KL(behaviour || proximal), w - 1 - log w, is above `limit`."""
    logs = log_ratio(proximal_logprobs, behaviour_logprobs, mask)
    return mean_log_ratio(torch.expm1(logs), logs, mask) <= limit


@torch.no_grad()
def correction_weights(
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    correction: str,
    low: float | None = None,
    high: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(weights [B, L-1] without gradient, sums over `mask`) of the named correction; None takes its own bound.

    All arguments are [B, L-1]; the weights multiply the loss of each token, which with a proximal policy of its own is decoupled PPO
    (arXiv 2505.24298, arXiv 2110.00641). Sums: the ratio before and after (`correction_weight_raw_sum`, `correction_weight_sum`) and the
    tokens that were cut or masked (`corrected_fraction_sum`); a sequence's weight counts once for each of its tokens.
    Raises `ValueError` for an unknown correction and for bounds that exclude the weight 1.
    """
    chosen = CORRECTIONS.get(correction)
    if chosen is None:
        raise ValueError(f"unknown correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    lowest, highest = chosen.low if low is None else low, chosen.high if high is None else high
    if not 0.0 <= lowest <= 1.0 <= highest:
        raise ValueError(f"correction bounds must enclose the weight 1 and not be negative: {lowest} and {highest}")
    ratio = RATIOS[chosen.unit](proximal_logprobs, behaviour_logprobs, mask).expand(mask.shape)
    weights = masked(ratio, low=lowest, high=highest) if chosen.masks else truncated(ratio, high=highest)
    return weights, {
        "correction_weight_raw_sum": (ratio * mask).sum(dtype=torch.float64),
        "correction_weight_sum": (weights * mask).sum(dtype=torch.float64),
        "corrected_fraction_sum": ((weights != ratio) & mask).sum(),
    }
