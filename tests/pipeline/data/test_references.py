"""Answers: every form that data sets have is accepted or refused with its name, and facts of the run are never hidden by columns."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.data.references import InvalidReference, accepted, matches_reference, with_facts
from penstock.pipeline.rewards.builtin import exact_match, math_verify
from penstock.pipeline.rewards.functions import resolve
from penstock.pipeline.rewards.values import RewardError


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("seven", ("seven",)),
        (" 7\n", ("7",)),
        (18, ("18",)),
        (18.0, ("18",)),
        (-0.5, ("-0.5",)),
        (1e-7, ("0.0000001",)),
        (1e22, ("10000000000000000000000",)),
        (["7", "seven", 7.0], ("7", "seven", "7")),
        ({"ground_truth": "efghi", "style": "rule"}, ("efghi",)),
        ({"ground_truth": 18.0}, ("18",)),
        ({"ground_truth": ["a", "b"]}, ("a", "b")),
    ],
)
def test_text_numbers_lists_and_ground_truths_are_accepted(answer: Any, texts: tuple[str, ...]) -> None:
    assert accepted(answer) == texts
    assert exact_match(list(texts), [answer] * len(texts)) == [1.0] * len(texts)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "null"),
        ("", "empty text"),
        (" \n", "empty text"),
        (float("nan"), "a value of type float"),
        (True, "the boolean true"),
        ([], "an empty list"),
        (["7", None], "a list with null"),
        ([""], "a list with empty text"),
        ([["7"]], "a list with a value of type list"),
        ({}, "an empty dict"),
        ({"text": ["a"], "answer_start": [0]}, "a dict with the keys text, answer_start"),
        ({"ground_truth": None}, "null"),
        ({"ground_truth": {"inputs": []}}, "a dict with the keys inputs"),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name_and_no_completion_is_right(answer: Any, what: str) -> None:
    with pytest.raises(InvalidReference) as caught:
        accepted(answer)
    assert str(caught.value) == what
    for text in ("", "None", "null", "nan", "True", "[]", "{}", str(answer)):
        with pytest.raises(InvalidReference):
            matches_reference(text, answer)
    for name in ("exact_match", "math_verify"):
        with pytest.raises(RewardError, match=rf"the answer .column 'gold'. is .*, which the reward {name} cannot compare: expected text"):
            resolve([name]).check({"answer": answer}, answer_field="gold")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("18", 18.0, True),
        ("18.0 ", 18, True),
        ("1.8e1", 18, True),
        ("+18", 18, True),
        ("18.5", 18, False),
        ("18", "18", True),
        ("18.0", "18", False),
        ("007", "7", False),
        ("0.1", 0.1, True),
        ("0.1000000000000000055", 0.1, False),
        ("1e9999999999999999999", 18, False),
        ("NaN", 18, False),
        ("1_8", 18, False),
        ("", 0, False),
        ("eighteen", [18, "eighteen"], True),
    ],
)
def test_numbers_are_compared_by_value_and_texts_by_their_characters(text: str, answer: Any, right: bool) -> None:
    assert matches_reference(text, answer) is right


@pytest.mark.parametrize("text", ["0.1", "-2.7", "3.14159", "1234.56", "1e-7", "0.1234567"])
def test_an_answer_in_a_column_of_32_bit_floats_is_the_number_that_a_person_wrote(text: str) -> None:
    (answer,) = pa.array([float(text)], pa.float32()).to_pylist()
    for form in (answer, [answer], {"ground_truth": answer}):
        assert matches_reference(text, form) and matches_reference(str(answer), form)
        assert not matches_reference(f"{text}1" if "e" not in text else "1.1e-7", form)
        assert math_verify([text], [form]) == [1.0]


@pytest.mark.parametrize("number", [123456792.0, 1234567.125, 0.1, 1 / 3, 2.0**100, 1e300])
def test_a_64_bit_float_is_no_other_number_of_fewer_digits(number: float) -> None:
    assert matches_reference(str(number), number)
    assert not matches_reference(f"{number:.7g}", number) or float(f"{number:.7g}") == number


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text().filter(str.strip)))
def test_every_accepted_text_is_the_answer(answer: Any) -> None:
    assert all(matches_reference(text, answer) for text in accepted(answer))


@pytest.mark.parametrize(
    ("reward", "columns", "rewards"),
    [
        ("soft_overlong", {"longest": 5}, [-0.5, -1.0]),
        ("soft_overlong", {"cache": "x", "longest": None}, [-0.5, -1.0]),
        ("soft_overlong?cache=4", {"cache": 7}, [-0.75, -1.0]),
        ("own.py:scaled", {"scale": 3}, [3.0, 3.0]),
        ("own.py:scaled?scale=2", {"scale": 3}, [2.0, 2.0]),
        ("own.py:scaled?scale=2", {"scale": [3], "level": 1}, [2.0, 2.0]),
    ],
)
def test_a_column_does_not_change_an_option_of_a_reward(tmp_path: Path, reward: str, columns: dict[str, Any], rewards: list[float]) -> None:
    (tmp_path / "own.py").write_text(
        "def scaled(completions, scale, **columns):\n"
        "    return [float(scale[0] if isinstance(scale, list) else scale) for _ in completions]\n"
    )
    judges = resolve([reward], base_dir=tmp_path, max_completion_length=10)
    judges.check(columns)
    score = judges.score(["x", "y"], prompt="p", messages=None, columns=columns, completion_ids=[[1] * 9, [1] * 10])
    assert list(score.rewards) == rewards


def test_math_verify_takes_the_best_of_the_accepted_answers() -> None:
    answers = [["1", "\\frac{1}{2}"], 0.5, {"ground_truth": 18.0}]
    assert math_verify(["0.5", "$\\frac{2}{4}$", "\\boxed{18}"], answers) == [1.0, 1.0, 1.0]
    assert math_verify(["3", "3", "3"], answers) == [0.0, 0.0, 0.0]


def test_a_fact_is_seen_under_its_name_and_the_column_under_columns() -> None:
    assert with_facts({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    assert with_facts({"a": 1, "b": None}, {"b": 2}) == {"a": 1, "b": 2, "columns": {"b": None}}
    twice = with_facts(with_facts({"a": 1, "b": 1}, {"a": 2}), {"b": 2})
    assert twice == {"a": 2, "b": 2, "columns": {"a": 1, "b": 1}}
    assert with_facts({"a": 1, "columns": {"c": 3}}, {"a": 2}) == {"a": 2, "columns": {"c": 3, "a": 1}}
    assert with_facts({"a": 1, "columns": "text"}, {"a": 2}) == {"a": 2, "columns": {"columns": "text", "a": 1}}
    assert with_facts({"columns": "text"}, {"a": 2}) == {"columns": "text", "a": 2}
