"""Policy-gradient losses: GRPO, Dr. GRPO, DAPO, GSPO, SAPO and CISPO are one function with different arguments; importance weights.

A loss is a float32 *sum* over weighted tokens, and statistics are sums too; the trainer divides once per step. Values per token are
[B, L-1], aligned to next-token positions as in `TokenBatch`. A user's loss has the form `(logprobs, batch, ...) -> (loss sum, statistics)`.
Importance weights proximal / behaviour have no gradient and do not change a step's denominator, in which masked tokens count like others.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from penstock.infra.backends.base import TokenBatch
from penstock.pipeline.algorithms.registry import AGGREGATES, CORRECTIONS

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
        raise ValueError(f"correction bounds must be at least 0 and enclose the importance weight 1, got {lowest} and {highest}")
    ratio = RATIOS[spec.unit](proximal_logprobs, behaviour_logprobs, mask).expand(mask.shape)
    weights = masked(ratio, low=lowest, high=highest) if spec.masks else truncated(ratio, high=highest)
    return weights, {
        "correction_weight_raw_sum": (ratio * mask).sum(dtype=torch.float64),
        "correction_weight_sum": (weights * mask).sum(dtype=torch.float64),
        "corrected_fraction_sum": ((weights != ratio) & mask).sum(),
    }


Sums = dict[str, torch.Tensor]
Surrogate = Callable[..., tuple[torch.Tensor, Sums]]
Stats = dict[str, float]
SAPO_TEMPERATURES = 1.0, 1.05
"""Temperatures for positive and for other advantages."""
KL_WEIGHT_CAP = 5.0
"""Upper bound of the weight of k3, as of `tis`."""
MAX_LOG_WEIGHT = 300.0
"""Log weights in statistics are clamped to +-300: the square of e^300 is still a finite float64."""


def policy_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
) -> tuple[torch.Tensor, Sums]:
    """PPO's clipped surrogate per token (arXiv 1707.06347), with GRPO's group advantages (arXiv 2402.03300).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - proximal_logprobs); `clip_high > clip_low` is DAPO's
    clip-higher (arXiv 2503.14476); for A < 0 `clip_dual` bounds r, which the minimum does not (arXiv 1912.09729).
    With `logprobs.detach()` as `proximal_logprobs` r is 1 and the loss is the plain policy gradient.
    `logprobs`, `proximal_logprobs`, `mask` [B, L-1], `advantages` [B] or [B, L-1]. For the sums see `_sums`.
    """
    log_ratios = log_ratio(logprobs, proximal_logprobs.detach(), mask)
    return _clipped(log_ratios, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


def gspo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    clip_dual: float | None = None,
) -> tuple[torch.Tensor, Sums]:
    """GSPO (arXiv 2507.18071): PPO's surrogate with s, the geometric mean of a sequence's token ratios, instead of each token's ratio.

    As in the paper's GSPO-token, each token's ratio has the value s and the gradient s * grad logprob of the token. So the mean over a
    sequence's tokens (`sequence_mean`) is -min(s A, clip(s) A) in value and gradient, and advantages may differ between tokens. Where the
    clipped term is the minimum, the whole sequence has no gradient. Clip ranges apply to s, which is far closer to 1 than a token's ratio.
    Shapes as in `policy_loss`.
    """
    shared = mean_log_ratio(logprobs, proximal_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).detach()
    log_ratios = torch.where(mask, shared + (logprobs - logprobs.detach()), 0.0)
    return _clipped(log_ratios, advantages, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


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

    The ratio r is a weight without gradient (sg), clamped but never masked; `clip_low` = 1 means no lower bound, as in the paper.
    Against the behaviour policy it is REINFORCE with truncated importance weights (PipelineRL, arXiv 2509.19128, whose cap of 5 is the
    default). Shapes as in `policy_loss`; the clip fractions count clamped weights.
    """
    log_ratios = log_ratio(logprobs.detach(), proximal_logprobs.detach(), mask)
    ratio = log_ratios.exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * _per_token(advantages) * torch.where(mask, logprobs, 0.0)
    return torch.where(mask, loss, 0.0), _sums(log_ratios, mask, cut=weight != ratio)


def sapo_loss(
    logprobs: torch.Tensor, proximal_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **_: float
) -> tuple[torch.Tensor, Sums]:
    """SAPO (arXiv 2511.20347): -(4 / t) sigmoid(t (r - 1)) A, a soft gate on the ratio instead of a clip range.

    t = 1 for A > 0 and 1.05 otherwise, as in the paper: the gradient's weight is 1 at r = 1 and decreases on both sides, faster for A <= 0.
    Clip ranges are not used, and the clip fractions are 0. Shapes as in `policy_loss`.
    """
    log_ratios = log_ratio(logprobs, proximal_logprobs.detach(), mask)
    per_token = _per_token(advantages)
    temperature = torch.where(per_token > 0, *SAPO_TEMPERATURES)
    loss = -torch.sigmoid(temperature * (log_ratios.exp() - 1.0)) * 4.0 / temperature * per_token
    return torch.where(mask, loss, 0.0), _sums(log_ratios, mask, cut=torch.zeros_like(mask))


SURROGATES: Mapping[str, Surrogate] = {"clip": policy_loss, "gspo": gspo_loss, "sapo": sapo_loss, "cispo": cispo_loss}


def kl_k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(current || reference) per token, exp(d) - d - 1 with d = reference - current, 0 outside `mask`.

    Never negative and unbiased under the current policy (Schulman 2020, as used in GRPO, arXiv 2402.03300, equation 4). Tokens sampled
    from another policy need the weight current / that policy, whose gradient is part of the KL's (arXiv 2512.02556). d is clamped to
    +-`MAX_LOG_RATIO`. All arguments and the result are [B, L-1].
    """
    difference = torch.where(mask, reference_logprobs.detach() - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def entropy_bonus(entropies: torch.Tensor | None, mask: torch.Tensor, *, floor: float | None) -> torch.Tensor:
    """[B, L-1] min(entropy, floor) of each token's distribution, 0 outside `mask`; its gradient is 0 above the floor.

    Without a floor it is the bonus of A3C (arXiv 1602.01783), which always pulls every token towards the uniform distribution.
    """
    if entropies is None:
        raise ValueError("an entropy bonus needs token entropies: open the backend with entropy_bonus=True")
    return torch.where(mask, entropies if floor is None else entropies.clamp(max=floor), 0.0)


def token_weights(mask: torch.Tensor, *, aggregate: str, max_tokens: int, sample_tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [B, L-1]: sum(weights * loss) over a step, divided once by its denominator, is the step's loss.

    `token_mean`: every token of the step has equal weight (DAPO, arXiv 2503.14476). `sequence_mean`: every sequence has equal weight
    (GRPO, arXiv 2402.03300). `constant`: the sum over a sequence divided by `max_tokens`, so that length has no influence
    (Dr. GRPO, arXiv 2503.20783). `sample_tokens` [B]: trained tokens of the sample that a row is part of; by default the row's own.
    """
    trained = mask.to(torch.float32)
    per_sequence = trained.sum(dim=1, keepdim=True) if sample_tokens is None else sample_tokens[:, None].to(torch.float32)
    if aggregate == "token_mean":
        return trained
    if aggregate == "sequence_mean":
        return trained / per_sequence.clamp(min=1.0)
    if aggregate == "constant":
        if max_tokens < 1:
            raise ValueError(f"constant aggregation divides by max_tokens, which must be above 0, not {max_tokens}")
        return trained / max_tokens
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def batch_loss(
    logprobs: torch.Tensor,
    batch: TokenBatch,
    *,
    proximal: np.ndarray[Any, Any] | torch.Tensor | None = None,
    surrogate: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = None,
    aggregate: str = "token_mean",
    max_tokens: int = 1,
    correction: str = "none",
    correction_low: float | None = None,
    correction_high: float | None = None,
    reject_kl: float | None = None,
    kl_coef: float = 0.0,
    kl_weighted: bool = False,
    reference: np.ndarray[Any, Any] | torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    entropy_floor: float | None = None,
    entropies: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Stats]:
    """The un-normalised loss of one micro-batch and its statistics, both to be summed over the step.

    `logprobs` [B, L-1] are the current policy's, with gradient. `proximal` [B, L-1]: None for the current policy (`current`),
    `batch.behaviour_logprobs` for `behaviour`, a snapshot's logprobs for `snapshot`. `surrogate` is one of `SURROGATES`; `correction` is
    one of `CORRECTIONS` or "none": it multiplies each token's loss by the bounded ratio proximal / behaviour, which with a separate
    proximal policy is decoupled PPO (arXiv 2505.24298). `reject_kl` drops sequences with a mean k3 of KL(behaviour || proximal) above it.
    `kl_coef` adds k3 to `reference` [B, L-1], without the correction; with `kl_weighted` it is weighted by current / behaviour.
    `entropy_coef` rewards `entropies` [B, L-1] of the sampling distributions up to `entropy_floor` nats. `values` [B, L-1] of a value head
    are subtracted from the advantages, to which the head is fitted; the loss sum is the policy's alone.
    The trainer divides by the step's count, masked tokens included. `summarise` turns the summed statistics into means.
    """

    def tensor(array: np.ndarray[Any, Any] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(array, device=logprobs.device)

    if surrogate not in SURROGATES:
        raise ValueError(f"unknown surrogate {surrogate!r}: choose one of {', '.join(SURROGATES)}")
    mask, behaviour, advantages = tensor(batch.completion_mask), tensor(batch.behaviour_logprobs), tensor(batch.advantages)
    near = logprobs.detach() if proximal is None else tensor(proximal)
    bounds = {"clip_low": clip_low, "clip_high": clip_high} | ({} if clip_dual is None else {"clip_dual": clip_dual})
    baselined = advantages if values is None else _per_token(advantages) - values.detach()
    loss, sums = SURROGATES[surrogate](logprobs, near, baselined, mask, **bounds)
    if correction != "none":
        importance, corrected = correction_weights(near, behaviour, mask, correction=correction, low=correction_low, high=correction_high)
        loss = loss * importance
        sums |= corrected
    if reject_kl is not None:
        accepted = accepted_sequences(near, behaviour, mask, limit=reject_kl)
        loss = loss * accepted
        sums["rejected_fraction_sum"] = (mask & ~accepted).sum()
    parts = None if batch.sample_tokens is None else tensor(batch.sample_tokens)
    weights = token_weights(mask, aggregate=aggregate, max_tokens=max_tokens, sample_tokens=parts)
    if kl_coef:
        if reference is None:
            raise ValueError(f"kl_coef = {kl_coef} needs reference logprobs: open the backend with reference=True")
        to_reference = kl_k3(logprobs, tensor(reference), mask)
        kl_weight = log_ratio(logprobs, behaviour, mask).exp().clamp(max=KL_WEIGHT_CAP) if kl_weighted else 1.0
        loss = loss + kl_coef * to_reference * kl_weight
        sums["kl_reference_sum"] = to_reference.detach().sum()
    if entropy_coef:
        loss = loss - entropy_coef * entropy_bonus(entropies, mask, floor=entropy_floor)
    if values is not None:
        errors = torch.where(mask, values - _per_token(advantages), 0.0).square()
        loss = loss + 0.5 * (errors - errors.detach())  # the gradient of the regression, and no value
        sums |= {"value_error_sum": errors.detach().sum(), "value_target_sum": (_per_token(advantages).square() * mask).sum()}
    sums |= _importance_sums(logprobs, behaviour, mask)
    numbers = torch.stack([value.to(torch.float64) for value in sums.values()]).tolist()
    return (loss * weights).sum(dtype=torch.float32), dict(zip(sums, numbers, strict=True))


def add_stats(parts: Iterable[Mapping[str, float]]) -> Stats:
    """Sum of the statistics of several micro-batches, in order."""
    total: Stats = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def summarise(sums: Mapping[str, float]) -> Stats:
    """A step's summed statistics as means over its `tokens`, its `loss` (`loss_sum` / `denominator`) and the effective sample size.

    `tokens` and `denominator` are the trainer's counts of the step. Each `NAME_sum`, also of a user's loss, becomes the mean NAME.
    `ess` = (sum w)^2 / (N sum w^2) in (0, 1] over *unclamped* token weights w = current / behaviour (arXiv 2509.19128), because clamping
    would hide the tail. `weight` is their mean, `kl` is k3 between proximal and current policy, `kl_behaviour_k1` and `kl_behaviour_k3`
    between behaviour and current, `clip_fraction` (and `_low`, `_high`) of tokens that the surrogate clips.
    See docs/explanation/algorithms.md.
    """
    tokens = sums["tokens"]
    if not tokens:
        return {"tokens": 0.0}
    result = {"tokens": tokens}
    if sums.get("weight_squares"):
        result["ess"] = sums["weight_sum"] ** 2 / (tokens * sums["weight_squares"])
    if "loss_sum" in sums:
        result["loss"] = sums["loss_sum"] / sums["denominator"]
    means = {name.removesuffix("_sum"): value / tokens for name, value in sums.items() if name.endswith("_sum")}
    return means | result


@torch.no_grad()
def _importance_sums(logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over `mask` of w = current / behaviour, w^2, and k1 and k3 of KL(behaviour || current), in float64 as w^2 is large.

    k1 = -log w and k3 = w - 1 - log w are both unbiased for tokens sampled from the behaviour policy (Schulman 2020); k3 is never negative.
    """
    log_weight = torch.where(mask, logprobs - behaviour_logprobs, 0.0).double().clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    weight = log_weight.exp() * mask
    return {
        "tokens": mask.sum(),
        "weight_sum": weight.sum(),
        "weight_squares": (weight * weight).sum(),
        "kl_behaviour_k1_sum": -log_weight.sum(),
        "kl_behaviour_k3_sum": (torch.expm1(log_weight) - log_weight).sum(),
    }


def _clipped(
    log_ratios: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, *, clip_low: float, clip_high: float, clip_dual: float | None
) -> tuple[torch.Tensor, Sums]:
    """Loss of each token [B, L-1] under PPO's clipping, from log ratios [B, L-1], and its sums; arguments as in `policy_loss`."""
    ratio, per_token = log_ratios.exp(), _per_token(advantages)
    plain, clipped = ratio * per_token, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * per_token
    least = torch.minimum(plain, clipped)
    bounded = least if clip_dual is None else torch.where(per_token < 0, torch.maximum(least, clip_dual * per_token), least)
    return torch.where(mask, -bounded, 0.0), _sums(log_ratios, mask, cut=(clipped < plain) | (bounded > least))


def _per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Advantages [B] or [B, L-1] in a shape that multiplies token values [B, L-1]."""
    return advantages[:, None] if advantages.ndim == 1 else advantages


@torch.no_grad()
def _sums(log_ratios: torch.Tensor, mask: torch.Tensor, *, cut: torch.Tensor) -> Sums:
    """Sums over `mask`, with r = current / proximal: tokens clipped at the lower and upper end, r, and k3 of KL(proximal || current).

    r - 1 - log r estimates that divergence without bias for tokens sampled from the proximal policy (Schulman 2020).
    """
    below, above = cut & mask & (log_ratios < 0), cut & mask & (log_ratios > 0)
    return {
        "clip_fraction_sum": (below | above).sum(),
        "clip_fraction_low_sum": below.sum(),
        "clip_fraction_high_sum": above.sum(),
        "ratio_sum": (log_ratios.exp() * mask).sum(dtype=torch.float64),
        "kl_sum": ((torch.expm1(log_ratios) - log_ratios) * mask).sum(dtype=torch.float64),
    }
