"""What of a group is trained, with which advantage, and what a step divides by: the part of a step that needs no torch.

The rule: pure functions of recorded groups and of a run's settings, the same ones for the trainer, for replay and for `explain`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.pipeline.algorithms.advantages import ADVANTAGES, handle_truncated
from penstock.pipeline.config.plugins import load
from penstock.pipeline.learner.micro_batches import TokenSequence
from penstock.topics.groups import Group

AGGREGATES = ("token_mean", "sequence_mean", "constant")


def advantage_function(name: str) -> Callable[..., Any]:
    """The advantage of that name, or a user's own by `package:function` or `file.py:function`. Raises `PluginError`."""
    return ADVANTAGES[name] if name in ADVANTAGES else load(name)


def sequences(group: Group, *, advantages: Callable[..., Any], truncated: str) -> list[TokenSequence]:
    """The samples of a group that are trained, in order of their numbers; aborted and empty ones are not.

    `truncated` is `algorithm.truncated`: under "mask" a sample that ran out of tokens is left out, its reward stays in the group's mean.
    """
    samples = group.samples
    rewards, trained = handle_truncated(
        [sample.reward for sample in samples],
        truncated=[sample.rollout.finish == "length" for sample in samples],
        rule="mask" if truncated == "mask" else "train",  # a penalty stands in the reward already
    )
    return [
        TokenSequence(
            group=group.group,
            sample=sample.rollout.sample,
            prompt_ids=group.prompt_ids,
            completion_ids=sample.rollout.token_ids,
            behaviour_logprobs=sample.rollout.behaviour_logprobs,
            loss_mask=sample.rollout.loss_mask,
            advantage=float(advantage),
            temperature=sample.rollout.temperature,
        )
        for sample, advantage, keep in zip(samples, advantages(rewards), trained, strict=True)
        if keep and sample.rollout.finish != "abort" and len(sample.rollout.token_ids)
    ]


def denominator(mask: np.ndarray[Any, Any], *, aggregate: str) -> float:
    """What a mask [B, L] of trained tokens adds to a step's denominator: counts add up over any cut of the step.

    Tokens under `token_mean`, sequences with a trained token under `sequence_mean` and `constant`.
    """
    if aggregate == "token_mean":
        return float(mask.sum())
    if aggregate in AGGREGATES:
        return float(mask.any(axis=1).sum())
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def token_share(tokens: int, *, aggregate: str, max_tokens: int) -> float:
    """What each of a sequence's `tokens` trained tokens counts in the step's sum, before its division: 1, 1/tokens or 1/max_tokens.

    Example:
        token_share(4, aggregate="sequence_mean", max_tokens=16)  # -> 0.25
    """
    if aggregate == "token_mean":
        return 1.0
    return 1.0 / (max_tokens if aggregate == "constant" else max(tokens, 1))
