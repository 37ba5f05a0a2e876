"""The outcome of a group from its rewards: scored or filtered. Pure functions, used by the scorer and by `replay score`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.schema import AlgorithmSection, RewardSection
from penstock.topics.groups import Group, Outcome, ScoredSample
from penstock.topics.prompts import Prompt
from penstock.topics.samples import Rollout

if TYPE_CHECKING:
    from penstock.pipeline.rewards.functions import Score

UNTRAINED = "no sample has a trained token: each is truncated, aborted, empty or masked"
"""Reason of a group that is filtered although its rewards may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """Outcome, samples and metrics of a group that the reward functions scored."""

    outcome: Outcome
    reason: str | None
    """Reason for the filter; None if the group is scored."""
    samples: tuple[ScoredSample, ...]
    metrics: str | None
    """JSON object with the metrics that reward functions logged; None if there are none."""


def group_outcome(samples: Sequence[Rollout], completions: Sequence[str], score: "Score", *, algorithm: AlgorithmSection) -> GroupOutcome:
    """The outcome of a group, with the configured penalty for truncated completions and the configured filters."""
    penalty = algorithm.truncated_penalty if algorithm.truncated == "penalise" else 0.0
    scored = tuple(
        ScoredSample(
            rollout=sample,
            completion=completions[number],
            reward=reward if reward is None or sample.finish != "length" else reward + penalty,
            components=score.components[number],
            reward_error=score.broken.get(number),
            logged=json.dumps(score.logged[number]) if score.logged and score.logged[number] else None,
        )
        for number, (sample, reward) in enumerate(zip(samples, score.rewards, strict=True))
    )
    reason = _filtered(scored, score, algorithm)
    metrics = json.dumps(dict(score.metrics)) if score.metrics else None
    return GroupOutcome(outcome="scored" if reason is None else "filtered", reason=reason, samples=scored, metrics=metrics)


def _filtered(samples: Sequence[ScoredSample], score: "Score", algorithm: AlgorithmSection) -> str | None:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) < min(2, len(samples)):
        causes = "; ".join(dict.fromkeys(score.broken.values())) or "every reward function returned None for the others"
        return f"{len(rewards)} of {len(samples)} samples have a reward: {causes}"
    if algorithm.filter_zero_variance and zero_variance(rewards) and not (algorithm.combine == "advantages" and _differ(score)):
        return f"every sample {'with a reward ' if len(rewards) < len(samples) else ''}has the reward {rewards[0]:g}"
    if not any(is_trained(sample.rollout, truncated=algorithm.truncated) for sample in samples if sample.reward is not None):
        return UNTRAINED
    return None


def is_trained(sample: Rollout, *, truncated: str) -> bool:
    """True if a sample has tokens to train; `truncated` is `algorithm.truncated`."""
    cut = truncated == "mask" and sample.finish == "length"
    return not cut and sample.finish != "abort" and bool(sample.loss_mask.any())


def _differ(score: "Score") -> bool:
    """True if any component differs among the samples it applies to."""
    columns = [[value for value in column if value is not None] for column in zip(*score.components, strict=True)]
    return any(values and not zero_variance(values) for values in columns)


def group_of(
    prompt: Prompt, outcome: Outcome, *, reason: str | None, samples: tuple[ScoredSample, ...], reward: RewardSection, scored_ns: int
) -> Group:
    """The record of a group with its outcome."""
    return Group(
        group=prompt.group,
        outcome=outcome,
        reason=reason,
        slot=prompt.slot,
        min_version=prompt.min_version,
        samples_per_prompt=prompt.samples_per_prompt,
        epoch=prompt.epoch,
        row=prompt.row,
        prompt=prompt.prompt,
        prompt_ids=prompt.token_ids,
        columns=prompt.columns,
        reward_names=tuple(reward.functions),
        reward_weights=tuple(reward.weights or [1.0] * len(reward.functions)),
        samples=samples,
        created_ns=prompt.created_ns,
        scored_ns=scored_ns,
    )
