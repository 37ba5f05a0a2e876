"""What is minimised per token: PPO's clipped ratio, GSPO's sequence ratio, CISPO's clipped weight.

The rule: each is a pure function (logprobs, proximal logprobs, advantages, mask) -> (loss [B, L-1], 0 outside the mask; sums over the mask)
that carries gradient through `logprobs` alone, and whose gradient where the two policies are equal is the plain policy gradient.
"""

from collections.abc import Callable, Mapping

import torch

from penstock.pipeline.algorithms.importance_weights import MAX_LOG_RATIO, log_ratio

Sums = dict[str, torch.Tensor]
Surrogate = Callable[..., tuple[torch.Tensor, Sums]]


def policy_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, Sums]:
    """PPO's clipped surrogate per token (arXiv 1707.06347), with GRPO's group advantages (arXiv 2402.03300).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - proximal_logprobs); `clip_high > clip_low` is DAPO's
    clip-higher (arXiv 2503.14476). `logprobs.detach()` as `proximal_logprobs` gives r = 1 and the plain policy gradient.
    `logprobs`, `proximal_logprobs`, `mask` [B, L-1], `advantages` [B] or [B, L-1]. For the sums see `_sums`.
    """
    log_ratios = log_ratio(logprobs, proximal_logprobs.detach(), mask)
    return _clipped(log_ratios, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def gspo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[torch.Tensor, Sums]:
    """GSPO (arXiv 2507.18071): PPO's surrogate with s, the geometric mean of a sequence's token ratios, in the place of each of them.

    In the paper's token form: value s, gradient s * grad logprob of the token, so that the mean over a sequence's tokens (`sequence_mean`)
    is -min(s A, clip(s) A) in value and gradient, and other aggregations and advantages per token stay defined. A clipped sequence has
    no gradient at all. Clip ranges are for s, which is far closer to 1 than a token's ratio. Shapes as in `policy_loss`.
    """
    tokens = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, logprobs - proximal_logprobs, 0.0).sum(dim=1, keepdim=True) / tokens
    shared = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
    log_ratios = torch.where(mask, shared + (logprobs - logprobs.detach()), 0.0)
    return _clipped(log_ratios, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[torch.Tensor, Sums]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob; every token keeps its gradient.

    The ratio r is a weight without gradient (sg), cut but never masked; `clip_low` = 1 leaves it without a lower bound, as the paper does.
    Against the behaviour policy it is REINFORCE with truncated importance weights (PipelineRL, arXiv 2509.19128, whose cap of 5 is the
    default). Shapes as in `policy_loss`; the clip fractions count weights that were cut.
    """
    log_ratios = log_ratio(logprobs.detach(), proximal_logprobs.detach(), mask)
    ratio = log_ratios.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * _per_token(advantages) * torch.where(mask, logprobs, 0.0)
    return torch.where(mask, loss, 0.0), _sums(log_ratios, mask, cut=weight != ratio)


SURROGATES: Mapping[str, Surrogate] = {"clip": policy_loss, "gspo": gspo_loss, "cispo": cispo_loss}


def _clipped(
    log_ratios: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, Sums]:
    ratio, per_token = log_ratios.exp(), _per_token(advantages)
    plain, clipped = ratio * per_token, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * per_token
    loss = -torch.minimum(plain, clipped)
    return torch.where(mask, loss, 0.0), _sums(log_ratios, mask, cut=clipped < plain)


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    return advantages[:, None] if advantages.ndim == 1 else advantages


@torch.no_grad()
def _sums(log_ratios: torch.Tensor, mask: torch.Tensor, *, cut: torch.Tensor) -> Sums:
    """Sums over `mask`, with r = current / proximal: tokens cut at the lower and at the upper end, r, and k3 of KL(proximal || current).

    r - 1 - log r estimates that divergence without bias for tokens drawn from the proximal policy (Schulman 2020).
    """
    below, above = cut & mask & (log_ratios < 0), cut & mask & (log_ratios > 0)
    return {
        "clip_fraction_sum": (below | above).sum(),
        "clip_fraction_low_sum": below.sum(),
        "clip_fraction_high_sum": above.sum(),
        "ratio_sum": (log_ratios.exp() * mask).sum(dtype=torch.float64),
        "kl_sum": ((torch.expm1(log_ratios) - log_ratios) * mask).sum(dtype=torch.float64),
    }
