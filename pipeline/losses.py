"""Policy-gradient losses as pure functions of tensors: GRPO, Dr. GRPO and DAPO are one function with other arguments.

The rule: a loss is a float32 *sum* over weighted tokens, and statistics are sums too; whoever holds a whole step divides
once. Everything per token is [B, L-1], aligned to next-token positions as in `TokenBatch`. An own loss is any function
`(logprobs, batch, ...) -> (loss sum, statistics)` of that kind.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from infra.backends.batch import TokenBatch
from infra.backends.forward import token_entropy, token_logprobs

Stats = dict[str, float]
AGGREGATES = ("token_mean", "sequence_mean", "constant")


def policy_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate per token (arXiv 1707.06347), with GRPO's group advantages (arXiv 2402.03300).

    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - proximal_logprobs); `clip_high > clip_low` is DAPO's
    clip-higher (arXiv 2503.14476). `proximal_logprobs` carry no gradient: `logprobs.detach()` gives r = 1 and the plain policy
    gradient. `importance` w [B, L-1] corrects for a behaviour policy other than the proximal one (arXiv 2505.24298).
    `advantages` [B] or [B, L-1]. Returns the loss [B, L-1], 0 outside `mask`, and sums over the mask: `clipped`, `ratio_sum`, `kl_sum`
    (k3 between proximal and current policy: how far the step has moved).
    """
    log_ratio = torch.where(mask, logprobs - proximal_logprobs.detach(), 0.0)
    ratio = log_ratio.exp()
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    plain, clipped = ratio * per_token, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * per_token
    loss = -torch.minimum(plain, clipped)
    if importance is not None:
        loss = loss * importance
    with torch.no_grad():
        stats = {
            "clipped": ((clipped < plain) & mask).sum(),
            "ratio_sum": (ratio * mask).sum(),
            "kl_sum": ((torch.expm1(-log_ratio) + log_ratio) * mask).sum(),
        }
    return torch.where(mask, loss, 0.0), stats


def truncated_importance(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor, *, cap: float
) -> torch.Tensor:
    """min(cap, proximal / behaviour) per token, 1 outside `mask`, without gradient: truncated importance weights (arXiv 2509.19128)."""
    log_weight = torch.where(mask, proximal_logprobs - behaviour_logprobs, 0.0).detach()
    return log_weight.exp().clamp(max=cap)


def kl_k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(current || reference) per token, exp(d) - d - 1 with d = reference - current, 0 outside `mask`.

    Never negative and unbiased under the current policy (Schulman 2020, as used in GRPO, arXiv 2402.03300, equation 4).
    """
    difference = torch.where(mask, reference_logprobs.detach() - logprobs, 0.0)
    return torch.expm1(difference) - difference


def token_weights(mask: torch.Tensor, *, aggregate: str, max_tokens: int) -> tuple[torch.Tensor, float]:
    """(weights [B, L-1], what this batch adds to the step's denominator): sum(weights * loss) / sum(denominators) is the step's loss.

    `token_mean`: every token counts alike over the step (DAPO, arXiv 2503.14476). `sequence_mean`: every sequence counts alike
    (GRPO, arXiv 2402.03300). `constant`: the sum over a sequence divided by `max_tokens`, so that length has no influence
    (Dr. GRPO, arXiv 2503.20783). Sequences without a trained token count nowhere.
    """
    trained = mask.to(torch.float32)
    per_sequence = trained.sum(dim=1, keepdim=True)
    if aggregate == "token_mean":
        return trained, float(mask.sum())
    sequences = float((per_sequence > 0).sum())
    if aggregate == "sequence_mean":
        return trained / per_sequence.clamp(min=1.0), sequences
    if aggregate == "constant":
        if max_tokens < 1:
            raise ValueError(f"constant aggregation divides by max_tokens, which cannot be {max_tokens}")
        return trained / max_tokens, sequences
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def denominator(mask: np.ndarray[Any, Any], *, aggregate: str) -> float:
    """What `token_weights` adds to a step's denominator, from a numpy mask: counts add up over any cut of the step."""
    if aggregate == "token_mean":
        return float(mask.sum())
    if aggregate in AGGREGATES:
        return float(mask.any(axis=1).sum())
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def batch_loss(
    logprobs: torch.Tensor,
    batch: TokenBatch,
    *,
    proximal: np.ndarray[Any, Any] | torch.Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregate: str = "token_mean",
    max_tokens: int = 1,
    importance_cap: float = 0.0,
    kl_coef: float = 0.0,
    reference: np.ndarray[Any, Any] | torch.Tensor | None = None,
) -> tuple[torch.Tensor, Stats]:
    """The un-normalised loss of one micro-batch and its statistics, both to be added up over the step.

    `proximal` None takes the current policy (design: `current`); pass `batch.behaviour_logprobs` for `behaviour`, a snapshot's
    logprobs for `snapshot`. `importance_cap` above 0 weighs tokens by the truncated ratio proximal / behaviour. `kl_coef` adds
    k3 to `reference` [B, L-1]. Finish the summed statistics with `summarise`.
    """

    def tensor(array: np.ndarray[Any, Any] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(array, device=logprobs.device)

    mask, behaviour, advantages = tensor(batch.completion_mask), tensor(batch.behaviour_logprobs), tensor(batch.advantages)
    near = logprobs.detach() if proximal is None else tensor(proximal)
    importance = truncated_importance(near, behaviour, mask, cap=importance_cap) if importance_cap else None
    loss, sums = policy_loss(logprobs, near, advantages, mask, clip_low=clip_low, clip_high=clip_high, importance=importance)
    weights, count = token_weights(mask, aggregate=aggregate, max_tokens=max_tokens)
    if kl_coef:
        if reference is None:
            raise ValueError(f"kl_coef = {kl_coef} needs reference logprobs")
        to_reference = kl_k3(logprobs, tensor(reference), mask)
        loss = loss + kl_coef * to_reference
        sums["kl_reference_sum"] = to_reference.detach().sum()
    sums |= _importance_sums(logprobs, behaviour, mask)
    numbers = torch.stack([value.to(torch.float64) for value in sums.values()]).tolist()
    return (loss * weights).sum(dtype=torch.float32), dict(zip(sums, numbers, strict=True)) | {"denominator": count}


def add_stats(parts: Iterable[Mapping[str, float]]) -> Stats:
    """Statistics of several micro-batches as those of one, added in order."""
    total: Stats = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def summarise(sums: Mapping[str, float]) -> Stats:
    """A step's summed statistics as means over its `tokens`, its `loss` (`loss_sum` / `denominator`) and the effective sample size.

    `ess` = (sum w)^2 / (N sum w^2) in (0, 1] over *unclamped* token weights w = current / behaviour (arXiv 2509.19128); clamping first
    hides the tail it is there to show. `kl` is k3 between proximal and current policy, `kl_behaviour` and `kl_reference` likewise;
    `clip_fraction` is of tokens whose gradient was cut off. An own loss's `NAME_sum` comes out as the mean NAME.
    """
    tokens = sums["tokens"]
    if not tokens:
        return {"tokens": 0.0}
    result = {"tokens": tokens}
    if "clipped" in sums:
        result["clip_fraction"] = sums["clipped"] / tokens
    if sums.get("weight_squares"):
        result["ess"] = sums["weight_sum"] ** 2 / (tokens * sums["weight_squares"])
    if "loss_sum" in sums:
        result["loss"] = sums["loss_sum"] / sums["denominator"]
    means = {name.removesuffix("_sum"): value / tokens for name, value in sums.items() if name.endswith("_sum")}
    return means | result


@torch.no_grad()
def _importance_sums(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over `mask` of w = current / behaviour, w^2 and k3 between the two, in float64: w^2 of a wild token overflows float32."""
    log_weight = torch.where(mask, logprobs - behaviour_logprobs, 0.0).double()
    weight = log_weight.exp() * mask
    return {
        "tokens": mask.sum(),
        "weight_sum": weight.sum(),
        "weight_squares": (weight * weight).sum(),
        "kl_behaviour_sum": ((torch.expm1(-log_weight) + log_weight) * mask).sum(),
    }


__all__ = [
    "AGGREGATES", "add_stats", "batch_loss", "denominator", "kl_k3", "policy_loss", "summarise", "token_entropy", "token_logprobs",
    "token_weights", "truncated_importance",
]  # fmt: skip
