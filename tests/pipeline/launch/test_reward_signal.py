"""Rewards that cannot teach: a wrong answer earns more than the right one, or all samples earn the same low reward."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.errors import PenstockError
from penstock.pipeline.algorithms.advantages import RewardScale
from penstock.pipeline.data import Row
from penstock.pipeline.launch.check.preflight import ENOUGH, equal_and_low, refuse_reversed, swapped
from tests.pipeline.launch.test_check import configured, found, project


def rows_of(*answers: str | None) -> list[Row]:
    made = []
    for number, answer in enumerate(answers):
        columns = {} if answer is None else {"answer": answer}
        made.append(Row(index=number, origin=f"rows.jsonl line {number + 1}", prompt=f"{number}?", messages=None, columns=columns))
    return made


def refused(answers: list[str], reward: Callable[[str, str], float]) -> str | None:
    """The line that refuses a reward of (completion, answer); None if it passes."""
    rows = rows_of(*answers)
    pairs = swapped(rows, answers)
    right = [reward(answers[own], answers[own]) for own, _ in pairs]
    wrong = [reward(answers[other], answers[own]) for own, other in pairs]
    try:
        refuse_reversed([rows[own] for own, _ in pairs], right, wrong)
    except PenstockError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "reward",
    [
        lambda text, answer: -float(text == answer),
        lambda text, answer: float(text != answer),
        lambda text, answer: 1.0 - float(text == answer),
        lambda text, answer: 0.5 * float(text == answer) - 2.0 * float(text == answer),
        lambda text, answer: float(abs(int(text) - int(answer))),
    ],
    ids=["negative", "unequal", "one minus", "negative weights", "distance"],
)
def test_a_reward_that_prefers_wrong_answers_is_refused_with_both_rewards(reward: Callable[[str, str], float]) -> None:
    line = str(refused(["4", "4", "7"], reward))
    assert line.startswith(
        "reward.functions: a wrong answer earns more than the right one: for rows.jsonl line 1 its own answer has the reward "
    )
    assert "the answer of rows.jsonl line 3" in line and "\n" not in line


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abc", max_size=3), min_size=1, max_size=6), st.dictionaries(st.text("abc", max_size=3), st.floats(-9, 9)))
def test_a_reward_that_does_not_look_at_the_row_is_never_refused(answers: list[str], rewards: dict[str, float]) -> None:
    assert refused(answers, lambda text, _: rewards.get(text, 0.0)) is None
    assert refused(answers, lambda text, answer: float(text == answer)) is None


def test_rows_without_an_answer_or_with_the_same_one_are_not_compared() -> None:
    assert swapped(rows_of(None, "a", None, "a"), ["p", "a", "q", "a"]) == []
    assert swapped(rows_of(None, "a", None, "b"), ["p", "a", "q", "b"]) == [(1, 3), (3, 1)]
    assert swapped([], []) == []


def test_check_and_run_refuse_a_reversed_reward(tmp_path: Path) -> None:
    reversed_reward = "return [-float(a == b) for a, b in zip(completions, answer)]"
    told, problem = found(configured(project(tmp_path, reward=reversed_reward)))
    assert "a wrong answer earns more than the right one" in str(problem) and "disk" in told | {"disk": ""}


@pytest.mark.parametrize("rewards", [[0.0] * 8, [0.3, 0.1 + 0.2] * 4, [-1.0] * 8, [0.49] * 2])
def test_samples_that_all_have_the_same_low_reward_are_a_warning_and_many_of_them_are_refused(rewards: list[float]) -> None:
    scale = RewardScale(-1.0 if min(rewards) < 0 else 0.0, 1.0)
    said = r"all {} sampled completions have the reward .* the task is too hard: take easier"
    assert re.match(said.format(len(rewards)), equal_and_low(rewards, scale) or "")
    many = rewards * (ENOUGH // len(rewards))
    with pytest.raises(PenstockError, match=said.format(len(many))):
        equal_and_low(many, scale)


@pytest.mark.parametrize("rewards", [[0.0] * 7 + [1.0], [1.0] * 8, [0.5] * 8, [0.0], []])
def test_samples_that_differ_or_have_a_high_reward_pass_and_so_do_fewer_than_two(rewards: list[float]) -> None:
    assert equal_and_low(rewards, RewardScale(0.0, 1.0)) is None


def test_without_a_known_range_no_reward_is_low() -> None:
    assert equal_and_low([0.0] * ENOUGH, RewardScale(0.0, 0.0)) is None
