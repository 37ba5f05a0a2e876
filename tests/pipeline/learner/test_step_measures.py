"""What a step measures of its groups: spread, truncation, lengths, and lag in optimizer steps."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.learner.train_step import Objective, group_measures
from penstock.topics.groups import Group
from tests.support.number_run import STEPS, NumberBackend, config_of, scored

pytest.importorskip("torch")


def with_samples(group: Group, *, lengths: tuple[int, ...], rewards: tuple[float, ...], finishes: tuple[str, ...]) -> Group:
    made = [
        replace(sample, reward=reward, rollout=replace(sample.rollout, token_ids=np.arange(length, dtype=np.int32), finish=finish))
        for sample, length, reward, finish in zip(group.samples, lengths, rewards, finishes, strict=True)
    ]
    return replace(group, samples=tuple(made))


def test_lengths_truncation_and_the_spread_of_rewards_are_over_all_samples() -> None:
    one, other = scored(2)
    groups = [
        with_samples(one, lengths=(1, 2, 3, 10), rewards=(0.0, 1.0, 0.0, 1.0), finishes=("stop", "stop", "length", "length")),
        with_samples(other, lengths=(2, 2, 2, 2), rewards=(1.0, 1.0, 1.0, 1.0), finishes=("stop", "stop", "stop", "length")),
    ]
    measured = group_measures(groups)
    assert (measured["completion_tokens_mean"], measured["completion_tokens_p95"], measured["completion_tokens_max"]) == (3.0, 10.0, 10.0)
    assert measured["truncated_share"] == 3 / 8
    assert measured["reward_std"] == pytest.approx(math.sqrt(0.75 * 0.25))
    assert measured["reward_group_std"] == pytest.approx(0.25)


def test_lag_counts_optimizer_steps_beside_versions() -> None:
    config = config_of(schedule={"steps_per_version": 3})
    policy = PolicyTrainer(config=config, steps=STEPS, backend=NumberBackend(), objective=Objective.of(config), steps_done=5)
    step = policy.step()
    for group in scored(2):  # drawn under version 0
        step.add(group)
    metrics = step.finish(learner_version=1).metrics
    assert (metrics["lag_max"], metrics["lag_steps_mean"], metrics["lag_steps_max"]) == (1.0, 5.0, 5.0)
