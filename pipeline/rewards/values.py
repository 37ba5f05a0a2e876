"""Validates the return value of a reward function: one number or None for each completion, with named parts.

The value of a completion is a number, None, or a dict of named parts: `{"format": 1.0, "length": 0.5}` counts as their sum, 1.5, and each
part is recorded under its name. A dict whose values are all None counts as None. A dict of lists, `{"format": [1.0, 0.0], "length":
[0.5, 0.5]}`, has the parts of all completions.
"""

from collections.abc import Mapping
from decimal import Decimal
from math import isfinite
from numbers import Real
from typing import Any

from penstock.pipeline.rewards.faults import RewardError

LARGEST = 1e18
"""Largest absolute value of a reward; sums and squares of larger ones lose precision or overflow."""
MOST_PARTS = 64
SHOWN = 80

Parts = dict[str, float | None]


def checked(name: str, returned: Any, count: int) -> tuple[list[float | None], list[Parts]]:
    """The rewards of `count` completions and their named parts, from the return value of `name`. Raises `RewardError`."""
    values = _rows(returned) if isinstance(returned, Mapping) else _plain(returned)
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"reward {name} returned a {type(returned).__name__}, expected a list of {count} numbers")
    if len(values) != count:
        raise RewardError(f"reward {name} returned {len(values)} values for {count} completion{'s' * (count != 1)}")
    parts = [_parts(name, value, number) for number, value in enumerate(values)]
    totals = [
        _sum(name, own, number) if isinstance(value, Mapping) else _number(f"reward {name} returned", value, f"completion {number}")
        for number, (value, own) in enumerate(zip(values, parts, strict=True))
    ]
    return totals, parts


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _rows(columns: Mapping[Any, Any]) -> list[dict[Any, Any]] | None:
    """The named parts of each completion from one list per name; None if the values are not lists of one length."""
    lists = [_plain(column) for column in columns.values()]
    if not all(isinstance(column, (list, tuple)) for column in lists) or len({len(column) for column in lists}) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def bounded(total: float, what: str) -> float:
    """Return a sum of rewards. Raises `RewardError` if it is not finite or too large.

    Example:
        bounded(2.5, "the weighted sum")  # -> 2.5
    """
    if not abs(total) <= LARGEST:
        raise RewardError(f"{what} is {total:g}, which is not finite" if not isfinite(total) else f"{what} is {total:g}: above {LARGEST:g}")
    return total


def shown(value: Any) -> str:
    """A value in one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _parts(name: str, value: Any, number: int) -> Parts:
    if not isinstance(value, Mapping):
        return {}
    if len(value) > MOST_PARTS or not all(isinstance(part, str) for part in value):
        raise RewardError(f"reward {name} returned {shown(value)} for completion {number}, expected at most {MOST_PARTS} names to numbers")
    return {part: _number(f"reward {name} returned", item, f"{part!r} of completion {number}") for part, item in value.items()}


def _sum(name: str, parts: Parts, number: int) -> float | None:
    values = [value for value in parts.values() if value is not None]
    return bounded(sum(values), f"the sum of the parts of reward {name} for completion {number}") if values else None


def _number(prefix: str, value: Any, what: str) -> float | None:
    """A Python, NumPy or torch number as a float; arrays of one element count as numbers."""
    size = getattr(value, "numel", None) or getattr(value, "size", None)
    size = size() if callable(size) else size
    if hasattr(value, "tolist") and isinstance(size, int) and size != 1:
        raise RewardError(f"{prefix} an array of {size} numbers for {what}, expected one number; for named parts return a dict")
    plain = value.item() if hasattr(value, "item") and hasattr(value, "tolist") else value
    if plain is None:
        return None
    if not isinstance(plain, (Real, Decimal)):
        raise RewardError(f"{prefix} {shown(plain)} for {what}, expected a number or None")
    try:
        reward = float(plain)
    except (OverflowError, ValueError):
        reward = float("inf") if isinstance(plain, int) else float("nan")
    if not isfinite(reward) and not isinstance(plain, int):
        raise RewardError(f"{prefix} {reward} for {what}, which is not finite")
    if abs(reward) > LARGEST:
        raise RewardError(f"{prefix} {shown(plain) if reward == float('inf') else f'{reward:g}'} for {what}, expected at most {LARGEST:g}")
    return reward
