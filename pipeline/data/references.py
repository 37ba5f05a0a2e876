"""Reference answers in the formats of data sets, and the columns of a row merged with values that a run adds."""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import isfinite
from typing import Any

import numpy as np

SOURCE_COLUMN = "data_source"
"""Column with the name of a row's source, added in a mixture."""
OWN = "columns"
"""Argument of reward functions with the columns that values of the run replace."""
GROUND_TRUTH = "ground_truth"
"""Key of the reference answer in data sets for verl."""
FORMS = 'text, a number, a list of these, or {"ground_truth": …}'
WRITTEN_DIGITS = 12
"""A fraction with more digits that equals a 32-bit float was stored as one, because such digits are not written by hand."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)


class InvalidReference(ValueError):
    """A reference answer that no built-in reward can compare; the message describes it: "null", "an empty list"."""


def accepted(reference: Any) -> tuple[str, ...]:
    """Return the texts that count as correct. Raises `InvalidReference` for null, empty text, and values that are not one of `FORMS`.

    Example:
        accepted({"ground_truth": [18.0, "eighteen"]})  # -> ("18", "eighteen")
    """
    return tuple(each if isinstance(each, str) else _digits(each) for each in _alternatives(reference))


def reference_text(columns: str | None) -> str | None:
    """Return the reference in a row's columns, which are JSON, as text; None if there is none."""
    reference = json.loads(columns or "{}").get("answer")
    return None if reference is None else str(reference)


def matches_reference(text: str, reference: Any) -> bool:
    """True if `text` equals an accepted text, or an accepted number in value; spaces around it are ignored. Raises as `accepted`.

    Example:
        matches_reference("18.0 ", 18)  # -> True
        matches_reference("18.0 ", "18")  # -> False
    """
    text = text.strip()
    number = Decimal(text) if NUMBER.fullmatch(text) else None
    return any(text == each if isinstance(each, str) else number == _decimal(each) for each in list(_alternatives(reference)))


def with_facts(columns: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns together with `facts`. A fact hides the column of the same name, whose value stays under `columns`.

    Example:
        with_facts({"level": 2, "step": "x"}, {"step": 7})  # -> {"level": 2, "step": 7, "columns": {"step": "x"}}
    """
    replaced = {name: value for name, value in columns.items() if name in facts}
    if not replaced:
        return {**columns, **facts}
    own = columns.get(OWN, {})
    return {**columns, **facts, OWN: {**(own if isinstance(own, Mapping) else {OWN: own}), **replaced}}


def _alternatives(reference: Any) -> Iterator[str | int | float]:
    """Yield the accepted texts and numbers. Raises `InvalidReference`."""
    if isinstance(reference, Mapping) and GROUND_TRUTH in reference:
        reference = reference[GROUND_TRUTH]
    if not isinstance(reference, list | tuple):
        yield from _written(_single(reference))
        return
    if not reference:
        raise InvalidReference("an empty list")
    for each in reference:
        try:
            yield from _written(_single(each))
        except InvalidReference as error:
            raise InvalidReference(f"a list with {error}") from error


def _single(reference: Any) -> str | int | float:
    """Return a text without surrounding spaces, or a number. Raises `InvalidReference` for anything else."""
    if isinstance(reference, str) and reference.strip():
        return reference.strip()
    if isinstance(reference, int | float) and not isinstance(reference, bool) and isfinite(reference):
        return reference
    raise InvalidReference(_named(reference))


def _written(reference: str | int | float) -> Iterator[str | int | float]:
    """Yield the value; before it, if it was a 32-bit float, the shortest decimal number that rounds to the same float."""
    if isinstance(reference, float) and not reference.is_integer() and len(_decimal(reference).as_tuple().digits) > WRITTEN_DIGITS:
        short = np.float32(reference)
        if short == reference:
            yield float(str(short))
    yield reference


def _named(reference: Any) -> str:
    """Describe a value that cannot be a reference, for an error message."""
    if reference is None:
        return "null"
    if isinstance(reference, str):
        return "empty text"
    if isinstance(reference, bool):
        return f"the boolean {str(reference).lower()}"
    if isinstance(reference, Mapping):
        return f"a dict with the keys {', '.join(map(str, reference))}" if reference else "an empty dict"
    return f"a value of type {type(reference).__name__}"


def _decimal(number: int | float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def _digits(number: int | float) -> str:
    """Return a number as text without an exponent, and without a decimal point if it is an integer."""
    return str(number) if isinstance(number, int) else format(_decimal(number + 0.0).normalize(), "f")
