"""Reference answers in the forms that data sets have them, and the columns of a row merged with the facts that a run adds."""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import isfinite
from typing import Any

import numpy as np

OWN = "columns"
"""Name under which a reward function finds the columns whose names the run's facts have."""
GROUND_TRUTH = "ground_truth"
"""Key of the answer in the dicts of data sets made for verl."""
FORMS = 'text, a number, a list of these, or {"ground_truth": …}'
WRITTEN_DIGITS = 12
"""A fraction of more digits that is a 32-bit float was one in the data: people do not write these digits."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


class AnswerError(ValueError):
    """An answer that no built-in reward can judge; the text is what it is: "null", "an empty list"."""


def accepted(answer: Any) -> tuple[str, ...]:
    """The texts that are right answers. Raises `AnswerError` for null, empty text, and everything that is not one of `FORMS`.

    Example:
        accepted({"ground_truth": [18.0, "eighteen"]})  # -> ("18", "eighteen")
    """
    return tuple(each if isinstance(each, str) else _digits(each) for each in _alternatives(answer))


def is_answer(text: str, answer: Any) -> bool:
    """True if `text` is one of the accepted answers: equal to a text, or equal in value to a number; spaces around it do not count.

    Example:
        is_answer("18.0 ", 18)  # -> True
        is_answer("18.0 ", "18")  # -> False

    Raises:
        AnswerError: as `accepted`.
    """
    text = text.strip()
    number = Decimal(text) if NUMBER.fullmatch(text) else None
    return any(text == each if isinstance(each, str) else number == _decimal(each) for each in list(_alternatives(answer)))


def with_facts(columns: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The columns and the facts by name. A fact replaces a column of its name, whose value is then under `columns`.

    Example:
        with_facts({"level": 2, "step": "x"}, {"step": 7})  # -> {"level": 2, "step": 7, "columns": {"step": "x"}}
    """
    replaced = {name: value for name, value in columns.items() if name in facts}
    if not replaced:
        return {**columns, **facts}
    own = columns.get(OWN, {})
    return {**columns, **facts, OWN: {**(own if isinstance(own, Mapping) else {OWN: own}), **replaced}}


def _alternatives(answer: Any) -> Iterator[str | int | float]:
    if isinstance(answer, Mapping) and GROUND_TRUTH in answer:
        answer = answer[GROUND_TRUTH]
    if not isinstance(answer, list | tuple):
        yield from _written(_single(answer))
        return
    if not answer:
        raise AnswerError("an empty list")
    for each in answer:
        try:
            yield from _written(_single(each))
        except AnswerError as error:
            raise AnswerError(f"a list with {error}") from error


def _single(answer: Any) -> str | int | float:
    """An answer that is text or a number; text without the spaces around it."""
    if isinstance(answer, str) and answer.strip():
        return answer.strip()
    if isinstance(answer, int | float) and not isinstance(answer, bool) and isfinite(answer):
        return answer
    raise AnswerError(_named(answer))


def _written(answer: str | int | float) -> Iterator[str | int | float]:
    """The answer; before it, if it is a fraction and was a 32-bit float, the number of fewest digits that such a float holds as this one.

    Example:
        list(_written(0.10000000149011612))  # -> [0.1, 0.10000000149011612]
    """
    if isinstance(answer, float) and not answer.is_integer() and len(_decimal(answer).as_tuple().digits) > WRITTEN_DIGITS:
        short = np.float32(answer)
        if short == answer:
            yield float(str(short))
    yield answer


def _named(answer: Any) -> str:
    if answer is None:
        return "null"
    if isinstance(answer, str):
        return "empty text"
    if isinstance(answer, bool):
        return f"the boolean {str(answer).lower()}"
    if isinstance(answer, Mapping):
        return f"a dict with the keys {', '.join(map(str, answer))}" if answer else "an empty dict"
    return f"a value of type {type(answer).__name__}"


def _decimal(number: int | float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def _digits(number: int | float) -> str:
    """A number without an exponent, and without a point if it is whole."""
    return str(number) if isinstance(number, int) else format(_decimal(number + 0.0).normalize(), "f")
