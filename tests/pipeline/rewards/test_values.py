"""What a reward function may return, and the one line that each wrong value ends in."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.rewards.values import LARGEST, MOST_CHARACTERS, MOST_NAMES, Logged, RewardError, checked


class Odd:
    """A value whose text cannot be read."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0), (2, 2.0), (-0.5, -0.5), (None, None), (Decimal("0.25"), 0.25), (Fraction(1, 4), 0.25), (np.float32(0.5), 0.5),
        (np.int64(3), 3.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (np.array([0.5]), 0.5), (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5), (torch.tensor(True), 1.0), (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (1e18, 1e18), (0.1 + 0.2, 0.1 + 0.2),
    ],
)  # fmt: skip
def test_numbers_of_every_library_are_taken_to_the_last_bit(value: Any, number: float | None) -> None:
    assert checked("f", [value, 1.0], 2)[0] == [number, 1.0]
    assert checked("f", (1.0, value), 2)[0] == [1.0, number]


@pytest.mark.parametrize("values", [np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), np.array([1, 0.5], dtype=object), (1.0, 0.5)])
def test_a_whole_batch_may_be_an_array(values: Any) -> None:
    assert checked("f", values, 2)[0] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "returned nan for completion 1, which is not finite"),
        (float("-inf"), "returned -inf for completion 1, which is not finite"),
        (np.float32("nan"), "returned nan for completion 1, which is not finite"),
        (torch.tensor(float("inf")), "returned inf for completion 1, which is not finite"),
        (Decimal("NaN"), "returned nan for completion 1, which is not finite"),
        (Decimal("sNaN"), "returned nan for completion 1, which is not finite"),
        (1.1e18, "returned 1.1e+18 for completion 1, expected at most 1e+18"),
        (-(10**400), "for completion 1, expected at most 1e+18"),
        (Decimal("1e30"), "returned 1e+30 for completion 1, expected at most 1e+18"),
        ("1.0", "returned '1.0' for completion 1, expected a number or None"),
        (b"1", "returned b'1' for completion 1, expected a number or None"),
        (1j, "returned 1j for completion 1, expected a number or None"),
        ([1.0, 2.0], "returned [1.0, 2.0] for completion 1, expected a number or None"),
        (np.ones(3), "returned an array of 3 numbers for completion 1, expected one number; for named parts return a dict"),
        (torch.zeros(2, 2), "returned an array of 4 numbers for completion 1, expected one number"),
        (np.zeros(0), "returned an array of 0 numbers for completion 1"),
        (Odd(), "returned a Odd for completion 1, expected a number or None"),
        ({"a": "x"}, "returned 'x' for 'a' of completion 1, expected a number or None"),
        ({"a": float("nan")}, "returned nan for 'a' of completion 1, which is not finite"),
        ({1: 1.0}, "returned {1: 1.0} for completion 1, expected up to 64 names with numbers"),
        ({"a": 1e18, "b": 1e18}, "the sum of the parts of reward f.py:f for completion 1 is 2e+18: above 1e+18"),
    ],
)
def test_what_is_no_number_is_refused_with_the_function_the_completion_and_the_value(value: Any, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        checked("f.py:f", [0.0, value], 2)
    line = str(caught.value)
    assert words in line and "f.py:f" in line and "\n" not in line and len(line) < 300


@given(st.lists(st.none() | st.integers() | st.floats(allow_nan=False, min_value=-LARGEST, max_value=LARGEST), min_size=1, max_size=8))
def test_any_list_of_numbers_comes_back_or_is_refused_in_one_line(values: list[Any]) -> None:
    try:
        numbers, parts = checked("f", values, len(values))
    except RewardError:
        assert any(isinstance(value, int) and abs(value) > LARGEST for value in values)
        return
    assert numbers == [None if value is None else float(value) for value in values]
    assert parts == [{}] * len(values)


def test_named_parts_count_as_their_sum_and_those_that_are_none_do_not_apply() -> None:
    numbers, parts = checked("f", [{"form": 1, "answer": np.float32(0.5)}, {"form": None, "answer": 0.25}, {"form": None}, {}, 2.0], 5)
    assert numbers == [1.5, 0.25, None, None, 2.0]
    assert parts == [{"form": 1.0, "answer": 0.5}, {"form": None, "answer": 0.25}, {"form": None}, {}, {}]


@pytest.mark.parametrize("column", [list, tuple, np.array, torch.tensor])
def test_a_list_for_each_name_is_the_named_parts_of_all_completions(column: Any) -> None:
    numbers, parts = checked("f", {"form": column([1.0, 0.0, 1.0]), "answer": [None, 0.5, 2]}, 3)
    assert numbers == [1.0, 0.5, 3.0]
    assert parts == [{"form": 1.0, "answer": None}, {"form": 0.0, "answer": 0.5}, {"form": 1.0, "answer": 2.0}]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"form": [1.0], "answer": [0.0]}, "returned 1 values for 2 completions"),
        ({"form": [1.0, 0.0], "answer": [0.0]}, "returned a dict; expected a list of 2 numbers"),
        ({"form": 1.0}, "returned a dict; expected a list of 2 numbers"),
        ({}, "returned a dict; expected a list of 2 numbers"),
        ({"form": [1.0, "x"]}, "returned 'x' for 'form' of completion 1"),
        ({1: [1.0, 0.0]}, "returned {1: 1.0} for completion 0, expected up to 64 names with numbers"),
    ],
)
def test_names_without_a_number_for_each_completion_are_refused(returned: Any, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        checked("f", returned, 2)
    assert words in str(caught.value)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (float("nan"), "nan"), (float("-inf"), "-inf"), ([1.0, float("nan")], "[1.0, nan]"), (CIRCLE, "[[...]]"), (Odd(), "a Odd"),
        ({"a": Odd()}, "a dict"), ({(1, 2): 3}, "{(1, 2): 3}"), ({1}, "{1}"), (b"ab", "b'ab'"), ("", ""),
        (2**60, 2**60), (1 + 0j, "(1+0j)"),
    ],
)  # fmt: skip
def test_whatever_is_logged_for_a_sample_is_kept_as_json_or_as_its_text(value: Any, kept: Any) -> None:
    logged = Logged(1)
    logged.functions("f")["log_extra"]("x", [value])
    assert json.loads(json.dumps(logged.rows, allow_nan=False)) == [{"x": kept}]


def test_columns_and_metrics_are_kept_by_name_as_json() -> None:
    logged = Logged(2)
    log = logged.functions("f")
    log["log_extra"]("word", ["a", None])
    log["log_extra"]("pair", [np.array([1, 2]), {"k": Decimal(1)}])
    log["log_extra"]("long", ["x" * 10_000, "\ud800"])
    log["log_metric"]("longest", np.float32(3))
    log["log_metric"]("longest", 5)
    log["log_metric"]("undefined", float("nan"))
    logged.parts("g", [{"form": 1.0}, {"form": None}])
    first, second = json.loads(json.dumps(logged.rows))
    assert first == {"word": "a", "pair": [1, 2], "long": "x" * MOST_CHARACTERS + "…", "g/form": 1.0}
    assert second == {"pair": {"k": "1"}, "long": "\ud800"}
    assert logged.metrics == {"longest": 4.0, "g/form": 1.0}


def test_what_cannot_be_logged_is_refused_with_the_function_and_the_name() -> None:
    log = Logged(2).functions("f.py:f")
    for name, call in {
        "log_extra('word', …) got 1 values, not a list of 2": lambda: log["log_extra"]("word", ["a"]),
        "log_extra('word', …) got a str": lambda: log["log_extra"]("word", "ab"),
        "log_metric('x', 'many'): expected a number": lambda: log["log_metric"]("x", "many"),
        "logged under 3, expected a name": lambda: log["log_metric"](3, 1.0),
        f"after {MOST_NAMES} other names": lambda: [log["log_metric"](f"m{number}", 1.0) for number in range(MOST_NAMES + 1)],
    }.items():
        with pytest.raises(RewardError) as caught:
            call()
        assert name in str(caught.value) and "f.py:f" in str(caught.value)
