"""Share of each sample in its step's gradient: advantage, micro-batch and weight.

Computed by the run's own functions from the recorded groups of the step. Effects that need unrecorded logprobs are named in `left_out`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.pipeline.algorithms.registry import LOSSES
from penstock.pipeline.config.load import Config
from penstock.pipeline.learner import training_samples
from penstock.pipeline.learner.training_samples import TokenSequence
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """One trained sample in its step."""

    group: int
    sample: int
    advantage: float
    tokens: int
    """Number of trained tokens."""
    micro_batch: int | None
    """None if the ledger's boundaries end before it."""
    token_weight: float
    """Coefficient of each trained token's log-probability in the step's descent direction, before any importance ratio."""

    @property
    def weight(self) -> float:
        """`token_weight` summed over the sample's trained tokens."""
        return self.token_weight * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Shares of all trained samples of a step."""

    samples: tuple[SampleShare, ...]
    aggregate: str
    denominator: float
    """Divisor of the step's loss sum."""
    tokens: int

    def of(self, group: int) -> dict[int, SampleShare]:
        """Sample -> its share, for one group."""
        return {share.sample: share for share in self.samples if share.group == group}


def shares(plan: Sequence[Group], *, config: Config, boundaries: Sequence[int] = (), trust_code: bool = False) -> StepShares:
    """Compute the shares of a step's samples, in plan order; its micro-batches end at `boundaries`.

    A trained token's weight is A · c / D: A the sample's advantage, c the token's weight (`token_share`), D the step's
    denominator. It is -dL/dlogprob if current, proximal and behaviour policy are equal, for every built-in loss without its KL term.
    Raises `PluginError` if the user's advantage function is missing, `ValueError` if it needs `trust_code`.
    """
    function = training_samples.advantage_function(config.advantage, trust_code=trust_code)
    advantages = training_samples.combined_advantages(function, combine=config.algorithm.combine)
    rows = [row for group in plan for row in training_samples.sequences(group, advantages=advantages, truncated=config.algorithm.truncated)]
    masks = [row.loss_mask[None] for row in rows]
    total = training_samples.denominator(masks, plan, aggregate=config.aggregate, counts_untrained=config.counts_untrained)
    longest = config.max_completion_tokens

    def share(number: int, row: TokenSequence) -> SampleShare:
        tokens = int(row.loss_mask.sum())
        counts = training_samples.token_share(tokens, aggregate=config.aggregate, max_tokens=longest) if tokens else 0.0
        batch = bisect_right(boundaries, number)
        return SampleShare(
            group=row.group,
            sample=row.sample,
            advantage=row.advantage,
            tokens=tokens,
            micro_batch=batch if batch < len(boundaries) else None,
            token_weight=row.advantage * counts / total if total else 0.0,
        )

    parts = tuple(share(number, row) for number, row in enumerate(rows))
    return StepShares(samples=parts, aggregate=config.aggregate, denominator=total, tokens=sum(part.tokens for part in parts))


def left_out(config: Config) -> list[str]:
    """Sentences about the effects that the gradient weights leave out because the log does not hold them."""
    algorithm, lines = config.algorithm, []
    if algorithm.loss not in LOSSES:
        lines.append(f"the loss is the run's own, {algorithm.loss}: what it makes of advantage and denominator is its business")
    if config.proximal != "current":
        ratio = "current / behaviour" if config.proximal == "behaviour" else "current / snapshot"
        lines.append(
            f"the ratio {ratio} of each token, clipped at -{config.clip_low:g}/+{config.clip_high:g}, is not in the log: it "
            "needs the learner's logprobs at that step; `penstock replay train` computes them again"
        )
    if config.correction != "none":
        lines.append(
            f"the correction weight {config.correction} (proximal / behaviour, bounded) is not in the log: it needs the learner's "
            "logprobs; the step's mean is its metric correction_weight"
        )
    if algorithm.reject_kl is not None:
        lines.append(
            f"sequences with a mean KL above reject_kl {algorithm.reject_kl:g} have no gradient; which ones needs the learner's logprobs"
        )
    if algorithm.entropy_coef:
        lines.append(
            f"the pull of the entropy bonus (entropy_coef {algorithm.entropy_coef:g}) comes on top; it needs the learner's entropies"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        lines.append(
            f"advantages are of the rewards as they were scored: the step took kl_coef {algorithm.kl_coef:g} times each sample's KL to the "
            "reference off them, whose logprobs are not in the log"
        )
    elif algorithm.kl_coef:
        lines.append(
            f"the pull towards the reference policy (kl_coef {algorithm.kl_coef:g}) comes on top; it needs the reference's logprobs"
        )
    return lines


def clipped(entry: Entry, config: Config) -> float | None:
    """Factor by which the step's gradient was clipped to `trainer.max_grad_norm`, 1 if it was not; None without a recorded norm."""
    norm, limit = entry.metrics.get("grad_norm"), config.trainer.max_grad_norm
    if norm is None:
        return None
    return min(1.0, limit / (norm + 1e-6)) if norm else 1.0  # the 1e-6 is torch's (clip_grads_with_norm_)
