"""Decides from a group's rewards how it ends: scored or filtered.

The rule: pure functions, shared by the scorer of a live run and by the rescoring of a recorded one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.algorithms.advantages import zero_variance
from penstock.pipeline.config.schema import AlgorithmSection, RewardSection
from penstock.topics.groups import Group, Outcome, ScoredSample
from penstock.topics.prompts import Prompt
from penstock.topics.samples import Rollout

if TYPE_CHECKING:
    from penstock.pipeline.envs.rewards import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a group whose completions all have a reward."""

    outcome: Outcome
    reason: str | None
    """The reason it was filtered; None if it was scored."""
    samples: tuple[ScoredSample, ...]


def verdict(samples: Sequence[Rollout], completions: Sequence[str], score: "Score", *, algorithm: AlgorithmSection) -> Verdict:
    """The outcome of these samples, by number; applies the configured penalty for truncated ones and filters."""
    rewards: list[float] = list(score.rewards)
    if algorithm.truncated == "penalise":
        penalty = algorithm.truncated_penalty
        rewards = [reward + penalty * (sample.finish == "length") for reward, sample in zip(rewards, samples, strict=True)]
    scored = tuple(
        ScoredSample(rollout=sample, completion=text, reward=reward, components=components)
        for sample, text, reward, components in zip(samples, completions, rewards, score.components, strict=True)
    )
    if algorithm.filter_zero_variance and zero_variance(rewards) and not (algorithm.combine == "advantages" and _differ(score)):
        return Verdict(outcome="filtered", reason=f"every sample has the reward {rewards[0]:g}", samples=scored)
    if not any(is_trained(sample, truncated=algorithm.truncated) for sample in samples):
        return Verdict(
            outcome="filtered", reason="no sample has a trained token: each is truncated, aborted, empty or masked", samples=scored
        )
    return Verdict(outcome="scored", reason=None, samples=scored)


def is_trained(sample: Rollout, *, truncated: str) -> bool:
    """Whether a sample has tokens to train; `truncated` is `algorithm.truncated`."""
    cut = truncated == "mask" and sample.finish == "length"
    return not cut and sample.finish != "abort" and bool(sample.loss_mask.any())


def _differ(score: "Score") -> bool:
    """Whether any component differs among the samples it applies to."""
    columns = [[value for value in column if value is not None] for column in zip(*score.components, strict=True)]
    return any(values and not zero_variance(values) for values in columns)


def group_of(
    prompt: Prompt, outcome: Outcome, *, reason: str | None, samples: tuple[ScoredSample, ...], reward: RewardSection, scored_ns: int
) -> Group:
    """The record of a prompt's group with its outcome."""
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
