"""Importance weights proximal / behaviour: truncated or masked, per token, per sequence or by a sequence's geometric mean.

Weights have no gradient and do not change a step's denominator, in which masked tokens count like others.
"""

import torch

from penstock.pipeline.algorithms.registry import CORRECTIONS

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before `exp`: e^20 = 5e8 is far outside any bound, and its square still fits into float32."""


def token_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - behaviour_logprobs) [B, L-1] per token; 1 outside `mask` [B, L-1]; the logarithm is clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio(logprobs, behaviour_logprobs, mask).exp()


def sequence_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, 1] product of a sequence's token ratios over `mask`; 1 without a trained token; clamped like `token_ratio`.

    The unbiased weight of a full completion; its variance grows with the length (Liu et al. 2025, see `CORRECTIONS`).
    """
    difference = torch.where(mask, logprobs - behaviour_logprobs, 0.0)
    return difference.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def geometric_ratio(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, 1] geometric mean of a sequence's token ratios over `mask`; 1 without a trained token; clamped like `token_ratio`.

    Its variance decreases with the length, while that of the product grows, at the price of a bias.
    """
    return mean_log_ratio(logprobs, behaviour_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def mean_log_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, 1] mean of logprobs - other_logprobs over a sequence's `mask`; 0 without a trained token."""
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, logprobs - other_logprobs, 0.0).sum(dim=1, keepdim=True) / tokens


def log_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - other_logprobs [B, L-1], 0 outside `mask`, clamped to +-`MAX_LOG_RATIO`, beyond which it has no gradient."""
    return torch.where(mask, logprobs - other_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


RATIOS = {"token": token_ratio, "sequence": sequence_ratio, "geometric": geometric_ratio}


def truncated(ratio: torch.Tensor, *, high: float) -> torch.Tensor:
    """min(high, ratio), of any shape: truncated importance sampling (TIS); less variance, with a bias towards the proximal policy."""
    return ratio.clamp(max=high)


def masked(ratio: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """The ratio if low <= ratio <= high, else 0, of any shape: masked importance sampling (MIS), with low > 0 IcePop."""
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@torch.no_grad()
def accepted_sequences(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor, *, limit: float
) -> torch.Tensor:
    """[B, 1] False for sequences whose mean k3 of KL(behaviour || proximal), w - 1 - log w, over `mask` is above `limit`."""
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
    """(weights [B, L-1] without gradient, sums over `mask`) of the named correction; a bound of None is the correction's own.

    All arguments are [B, L-1]. The weights multiply the loss of each token; with a separate proximal policy that is decoupled PPO
    (arXiv 2505.24298, arXiv 2110.00641). Sums: the ratio before and after (`correction_weight_raw_sum`, `correction_weight_sum`) and the
    truncated or masked tokens (`corrected_fraction_sum`); a sequence's weight counts once for each of its tokens.
    Raises `ValueError` for an unknown correction and for bounds that exclude the weight 1.
    """
    spec = CORRECTIONS.get(correction)
    if spec is None:
        raise ValueError(f"unknown correction {correction!r}: choose one of {', '.join(CORRECTIONS)}")
    lowest, highest = spec.low if low is None else low, spec.high if high is None else high
    if not 0.0 <= lowest <= 1.0 <= highest:
        raise ValueError(f"correction bounds must enclose the weight 1 and not be negative: {lowest} and {highest}")
    ratio = RATIOS[spec.unit](proximal_logprobs, behaviour_logprobs, mask).expand(mask.shape)
    weights = masked(ratio, low=lowest, high=highest) if spec.masks else truncated(ratio, high=highest)
    return weights, {
        "correction_weight_raw_sum": (ratio * mask).sum(dtype=torch.float64),
        "correction_weight_sum": (weights * mask).sum(dtype=torch.float64),
        "corrected_fraction_sum": ((weights != ratio) & mask).sum(),
    }
