"""The arithmetic of evaluations, and configurations of the evaluator."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.config.load import Config, ConfigError
from penstock.pipeline.learner.evaluation import pass_at, summary
from penstock.pipeline.rewards.functions import Score
from penstock.workers.evaluator.worker import EarlyStopping
from tests.support.least_config import least_config


def score(*rewards: float) -> Score:
    """Two functions: the reward, and a second one that applies to the first completion only."""
    return Score(rewards=rewards, components=tuple((reward, 0.25 if number == 0 else None) for number, reward in enumerate(rewards)))


def test_a_prompt_whose_reward_broke_is_counted_and_is_in_no_mean() -> None:
    values = summary(
        greedy=[score(1.0), None, score(0.4)],
        sampled=[score(1.0, 0.0, 1.0, 0.2), score(0.0, 0.0, 0.0, 0.6), None],
        samples=4, names=["exact", "form"], threshold=0.5,
    )  # fmt: skip
    assert (values["n"], values["n_failed"]) == (3.0, 1.0 + 4.0)
    assert (values["greedy_accuracy"], values["sampled_accuracy"]) == (0.5, 3 / 8)
    assert values["greedy_reward"] == pytest.approx(0.7)
    assert values["sampled_reward/exact"] == pytest.approx(2.8 / 8)
    assert values["sampled_reward/form"] == pytest.approx(0.25)
    assert [values[f"pass_at_{k}"] for k in ("2", "4", "k")] == [pytest.approx((5 / 6 + 1 / 2) / 2), 1.0, 1.0]


def test_where_every_reward_broke_there_is_a_count_and_no_accuracy() -> None:
    values = summary(greedy=[None, None], sampled=[None, None], samples=3, names=["exact"], threshold=1.0)
    assert values == {"n": 2.0, "samples": 3.0, "n_failed": 8.0}
    stopping = EarlyStopping(target=0.0, patience=1)
    assert [stopping.note(version=version, accuracy=values.get("greedy_accuracy")) for version in range(3)] == [None] * 3


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_solved_one(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at(k, solved=sum(outcomes), samples=len(outcomes)) == pytest.approx(sum(map(any, choices)) / len(choices))


def config_of(**held: Any) -> Config:
    return least_config(eval=held, reward={"functions": ["exact_match", "length"], "weights": [2.0, -1.0]})


def test_an_evaluation_has_the_runs_functions_and_their_best_reward_as_threshold_unless_it_has_its_own() -> None:
    assert (config_of().eval_reward.functions, config_of().eval_threshold) == (["exact_match", "length"], 2.0)
    own = config_of(functions=["contains"], weights=[3.0])
    assert (own.eval_reward.functions, own.eval_reward.weights, own.eval_threshold) == (["contains"], [3.0], 3.0)
    assert config_of(threshold=0.5).eval_threshold == 0.5
    with pytest.raises(ConfigError, match=r"eval\.weights: 2 weights for 1 eval\.functions"):
        config_of(functions=["contains"], weights=[3.0, 1.0])


def test_several_sources_are_told_apart_by_name() -> None:
    assert config_of(source="a.jsonl").eval_sources == ["a.jsonl"]
    assert config_of(source=["a.jsonl", "tiny:successor"]).eval_sources == ["a.jsonl", "tiny:successor"]
    with pytest.raises(ConfigError, match=r"eval\.source: two sources have the same name 'a'"):
        config_of(source=["x/a.jsonl", "y/a.jsonl"])
