"""From rewards to the outcome of a group: penalties for truncated samples, and the zero-variance filter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.algorithms.advantages import ADVANTAGES
from penstock.pipeline.config.schema import AlgorithmSection, RewardSection
from penstock.pipeline.learner.micro_batches import combined_advantages, sequences
from penstock.pipeline.learner.train_step import group_measures
from penstock.pipeline.rewards.functions import Score
from penstock.pipeline.rewards.scoring import group_of, scored_group
from penstock.topics import groups, prompts, rollouts
from tests.support.a_run import RecordBuilder

REWARDS = (1.0, 0.0, 1.0, 0.0)


def drawn(finishes: tuple[str, ...] = ("stop",) * 4) -> list[rollouts.Rollout]:
    records = [record for record in RecordBuilder().group(list(REWARDS), version=3) if record.topic.endswith(".rollouts")]
    return [replace(rollouts.decode(record.value), finish=finish) for record, finish in zip(records, finishes, strict=True)]


def outcome_of(samples: list[rollouts.Rollout], texts: list[str], score: Score, *, algorithm: AlgorithmSection) -> groups.Group:
    prompt = prompts.decode(RecordBuilder().group(list(REWARDS), version=3)[0].value)
    group = group_of(prompt, "scored", reason=None, reward=RewardSection(functions=["length"]), scored_ns=9)
    return scored_group(group, samples, texts, score, algorithm=algorithm)


def judged(rewards: tuple[float, ...] = REWARDS, *, finishes: tuple[str, ...] = ("stop",) * 4, **algorithm: Any) -> Any:
    score = Score(rewards=rewards, components=tuple((reward,) for reward in rewards))
    return outcome_of(drawn(finishes), ["a", "b", "c", "d"], score, algorithm=AlgorithmSection(**algorithm))


def test_a_group_is_scored_with_each_sample_beside_its_text_and_reward() -> None:
    outcome = judged()
    assert (outcome.outcome, outcome.reason) == ("scored", None)
    assert [(sample.rollout.sample, sample.completion, sample.reward, sample.components) for sample in outcome.samples] == [
        (0, "a", 1.0, (1.0,)), (1, "b", 0.0, (0.0,)), (2, "c", 1.0, (1.0,)), (3, "d", 0.0, (0.0,)),
    ]  # fmt: skip


@pytest.mark.parametrize(("asked", "outcome"), [(True, "filtered"), (False, "scored")])
def test_a_group_of_equal_rewards_is_filtered_only_if_that_is_asked_for(outcome: str, *, asked: bool) -> None:
    found = judged((0.25,) * 4, filter_zero_variance=asked)
    assert found.outcome == outcome
    assert found.reason == ("every sample has the reward 0.25" if asked else None)
    assert len(found.samples) == 4


@pytest.mark.parametrize(
    "rewards",
    [
        (0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2), (1 / 3, 1 - 2 / 3, 1 / 3, 1 / 3), (-0.3, -0.1 - 0.2, -0.3, -0.3), (1e9, 1e9 + 1, 1e9, 1e9),
        (1e-9, 1e-9 + 1e-18, 1e-9, 1e-9), (0.1, float(np.float32(0.1)), 0.1, 0.1), (0.0, -0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_rewards_that_are_equal_up_to_rounding_are_equal(rewards: tuple[float, ...]) -> None:
    assert judged(rewards).outcome == "filtered"


@pytest.mark.parametrize("rewards", [(0.3, 0.30001, 0.3, 0.3), (1e-9, 2e-9, 1e-9, 1e-9), (0.0, 1e-12, 0.0, 0.0), (-1.0, 1.0, -1.0, 1.0)])
def test_rewards_that_differ_by_more_than_rounding_are_trained_however_small_they_are(rewards: tuple[float, ...]) -> None:
    assert judged(rewards).outcome == "scored"


def test_equal_sums_of_different_components_are_trained_where_each_has_its_own_advantage() -> None:
    score = Score(rewards=(1.0,) * 4, components=((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
    for combine, outcome in (("rewards", "filtered"), ("advantages", "scored")):
        algorithm = AlgorithmSection.model_validate({"combine": combine})
        assert outcome_of(drawn(), ["a", "b", "c", "d"], score, algorithm=algorithm).outcome == outcome
    same = Score(rewards=(1.0,) * 4, components=((1.0, None),) * 4)
    assert outcome_of(drawn(), ["a", "b", "c", "d"], same, algorithm=AlgorithmSection(combine="advantages")).outcome == "filtered"


def test_a_truncated_sample_pays_the_penalty_and_keeps_its_components() -> None:
    found = judged(finishes=("stop", "stop", "length", "length"), truncated="penalise", truncated_penalty=-0.5)
    assert [sample.reward for sample in found.samples] == [1.0, 0.0, 0.5, -0.5]
    assert [sample.components for sample in found.samples] == [(1.0,), (0.0,), (1.0,), (0.0,)]


def test_the_filter_looks_at_rewards_after_the_penalty() -> None:
    cut = ("stop", "length", "stop", "length")
    settings: dict[str, Any] = {"truncated": "penalise", "truncated_penalty": -1.0, "filter_zero_variance": True}
    assert judged((1.0,) * 4, finishes=cut, **settings).outcome == "scored"
    assert judged((0.0, 1.0, 0.0, 1.0), finishes=cut, **settings).outcome == "filtered"


@pytest.mark.parametrize(
    ("finishes", "truncated", "outcome"),
    [
        (("length",) * 4, "mask", "filtered"),
        (("length",) * 4, "train", "scored"),
        (("length", "length", "length", "stop"), "mask", "scored"),
        (("abort", "length", "length", "abort"), "mask", "filtered"),
    ],
)
def test_a_group_without_a_trained_token_is_filtered_with_that_reason(finishes: tuple[str, ...], truncated: str, outcome: str) -> None:
    found = judged(finishes=finishes, truncated=truncated)
    assert found.outcome == outcome
    assert ("no sample has a trained token" in (found.reason or "")) == (outcome == "filtered")
    assert [sample.reward for sample in found.samples] == list(REWARDS)


def test_an_outcome_holds_all_that_a_later_reader_needs_of_its_prompt() -> None:
    prompt = prompts.decode(RecordBuilder().group(list(REWARDS), version=3)[0].value)
    reward = RewardSection(functions=["exact_match", "length"])
    group = group_of(prompt, "failed", reason="it broke", reward=reward, scored_ns=9)
    assert (group.group, group.min_version, group.prompt, group.columns) == (prompt.group, 3, prompt.prompt, prompt.columns)
    assert (group.outcome, group.reason, group.samples, group.scored_ns) == ("failed", "it broke", (), 9)
    assert (group.reward_names, group.reward_weights) == (("exact_match", "length"), (1.0, 1.0))


def test_samples_without_a_reward_stay_in_the_record_and_out_of_the_filter() -> None:
    score = Score(
        rewards=(1.0, None, 0.0, None), components=((1.0,), (None,), (0.0,), (None,)), broken={3: "reward f hangs"},
        logged=({"n": 1}, {}, {}, {}), metrics={"m": 2.0},
    )  # fmt: skip
    found = outcome_of(drawn(), ["a", "b", "c", "d"], score, algorithm=AlgorithmSection())
    assert (found.outcome, found.reason, found.metrics) == ("scored", None, '{"m": 2.0}')
    assert [sample.reward for sample in found.samples] == [1.0, None, 0.0, None]
    assert [sample.reward_error for sample in found.samples] == [None, None, None, "reward f hangs"]
    assert found.samples[0].logged == '{"n": 1}'


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((None,) * 4, "0 of 4 samples have a reward: every reward function returned None for the others"),
        ((1.0, None, None, None), "1 of 4 samples have a reward: every reward function returned None for the others"),
        ((0.5, None, 0.5, 0.5), "every sample with a reward has the reward 0.5"),
    ],
)
def test_a_group_with_too_few_or_equal_rewards_is_filtered_with_the_reason(rewards: tuple[float | None, ...], reason: str) -> None:
    score = Score(rewards=rewards, components=tuple((reward,) for reward in rewards))
    algorithm = AlgorithmSection(truncated="penalise", truncated_penalty=0.0)
    found = outcome_of(drawn(("length",) * 4), ["a", "b", "c", "d"], score, algorithm=algorithm)
    assert (found.outcome, found.reason) == ("filtered", reason)


@pytest.mark.parametrize("combine", ["rewards", "advantages"])
@pytest.mark.parametrize("missing", [(), (1,), (0, 3)])
def test_samples_without_a_reward_change_no_advantage_and_are_not_trained(combine: str, missing: tuple[int, ...]) -> None:
    rewards = [None if number in missing else reward for number, reward in enumerate((1.0, 0.25, 0.0, 0.5))]
    kept = [number for number in range(4) if number not in missing]

    (recorded,) = [groups.decode(out.value) for out in RecordBuilder().group(list(REWARDS), version=3) if out.topic.endswith(".groups")]

    def trained(numbers: list[int]) -> dict[int, float]:
        components = tuple((rewards[one],) for one in numbers)
        score = Score(rewards=tuple(rewards[one] for one in numbers), components=components, metrics={"a//b%": 3.0})
        found = outcome_of([drawn()[one] for one in numbers], ["x"] * len(numbers), score, algorithm=AlgorithmSection())
        group = replace(recorded, samples=found.samples, metrics=found.metrics)
        groups.decode(groups.encode(group))
        assert groups.headers(group, run="r").no_reward == (len([one for one in numbers if one in missing]) or None)
        assert group_measures([group])["reward/a/b_"] == 3.0
        assert group_measures([group])["reward_trained"] == pytest.approx(sum(group.rewards) / len(group.rewards))
        advantages = combined_advantages(ADVANTAGES["grpo"], combine=combine)
        return {one.sample: one.advantage for one in sequences(group, advantages=advantages, truncated="train")}

    assert trained([0, 1, 2, 3]) == trained(kept)
    assert list(trained(kept)) == kept
