"""Validates the return value of a reward function, one number or None for each completion, with named parts; and the values it logs.

The value of a completion is a number, None, or a dict of named parts: `{"format": 1.0, "length": 0.5}` counts as their sum, 1.5, and each
part is recorded under its name. A dict whose values are all None counts as None. A dict of lists, `{"format": [1.0, 0.0], "length":
[0.5, 0.5]}`, has the parts of all completions. Functions log as in TRL, by `log_extra(column, values)` and `log_metric(name, value)`.
"""

import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from math import isfinite
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.infra.errors import Unrecoverable
from penstock.infra.sandbox.child import text_of

LARGEST = 1e18
"""Largest absolute value of a reward; sums and squares of larger ones lose precision or overflow."""
MOST_PARTS = 64
SHOWN = 80

Parts = dict[str, float | None]


class RewardError(ValueError):
    """A reward function raised an exception or returned an invalid reward; one line with its name."""


def broke(name: str, error: BaseException, function: Callable[..., Any] | None = None) -> RewardError:
    """Return the error of the reward `name` in one line: the exception, the last line in `function`'s file, and the line that raised."""
    if isinstance(error, RewardError):
        return error
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None) if function else None
    own = [frame for frame in frames if code is not None and frame[0] == code.co_filename]
    lines = dict.fromkeys(f"{Path(file).name} line {line}" for file, line in [*own[-1:], *frames[-1:]])
    location = f" ({', raised at '.join(lines)})" if lines else ""
    text = text_of(error, characters=400)
    return RewardError(f"reward {name} broke: {type(error).__name__}{f': {text}' if text else ''}{location}")


class BrokenReward(Unrecoverable):
    """A reward function fails so often that the run stops; one line with the failure and the fix."""


def checked(name: str, returned: Any, count: int) -> tuple[list[float | None], list[Parts]]:
    """Validate what `name` returned for `count` completions; return the reward and the named parts of each. Raises `RewardError`."""
    values = _rows(returned) if isinstance(returned, Mapping) else _plain(returned)
    if not isinstance(values, (list, tuple)):
        raise RewardError(f"reward {name} returned a {type(returned).__name__}; expected a list of {count} numbers, one per completion")
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
    """Convert one list per named part to one dict per completion; return None if the values are not lists of equal length."""
    lists = [_plain(column) for column in columns.values()]
    if not all(isinstance(column, (list, tuple)) for column in lists) or len({len(column) for column in lists}) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def bounded(total: float, what: str) -> float:
    """Return a sum of rewards. Raises `RewardError` if it is not finite or too large."""
    if not abs(total) <= LARGEST:
        raise RewardError(f"{what} is {total:g}, which is not finite" if not isfinite(total) else f"{what} is {total:g}: above {LARGEST:g}")
    return total


def shown(value: Any) -> str:
    """Return a value's `repr` for an error message: one line of at most `SHOWN` characters, or its type if `repr` fails."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _parts(name: str, value: Any, number: int) -> Parts:
    """Return the named parts in what reward `name` returned for completion `number`; empty if it is a plain number."""
    if not isinstance(value, Mapping):
        return {}
    if len(value) > MOST_PARTS or not all(isinstance(part, str) for part in value):
        raise RewardError(f"reward {name} returned {shown(value)} for completion {number}, expected up to {MOST_PARTS} names with numbers")
    return {part: _number(f"reward {name} returned", item, f"{part!r} of completion {number}") for part, item in value.items()}


def _sum(name: str, parts: Parts, number: int) -> float | None:
    values = [value for value in parts.values() if value is not None]
    return bounded(sum(values), f"the sum of the parts of reward {name} for completion {number}") if values else None


def _number(prefix: str, value: Any, what: str) -> float | None:
    """Convert a Python, NumPy or torch number, or an array of one, to a float; None stays None. Raises `RewardError` for anything else."""
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


NAMES = ("log_extra", "log_metric")
MOST_NAMES = 32
MOST_CHARACTERS = 4096
"""Limit of a logged value that is not a number, as JSON."""


class Logged:
    """Collects what reward functions log for one group of `count` completions: columns with a value per completion, and metrics."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def functions(self, reward: str) -> dict[str, Callable[..., None]]:
        """Return the functions that the reward function `reward` receives as arguments `log_extra` and `log_metric`."""
        return dict(zip(NAMES, (partial(self._log_extra, reward), partial(self._log_metric, reward)), strict=True))

    def parts(self, reward: str, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Record the named parts of a reward as columns and metrics `reward/part`."""
        for part in dict.fromkeys(part for row in rows for part in row):
            values, name = [row.get(part) for row in rows], f"{reward}/{part}"
            self._log_extra(reward, name, values)
            for value in values:
                if value is not None:
                    self._log_metric(reward, name, value)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Logged column -> value, for each completion; an empty tuple if nothing was logged."""
        if not self._extra:
            return ()
        columns = self._extra.items()
        return tuple({name: values[row] for name, values in columns if values[row] is not None} for row in range(self._count))

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each metric over its finite values; metrics without one are omitted."""
        return {name: fmean(values) for name, values in self._metrics.items() if values}

    def _log_extra(self, reward: str, column: str, values: Sequence[Any]) -> None:
        items = _plain(values)
        if not isinstance(items, (list, tuple)) or len(items) != self._count:
            what = f"{len(items)} values" if isinstance(items, (list, tuple)) else f"a {type(values).__name__}"
            raise RewardError(f"reward {reward}: log_extra({shown(column)}, …) got {what}, not a list of {self._count}, one per completion")
        self._extra[_name(reward, column, self._extra)] = [_as_json(value) for value in items]

    def _log_metric(self, reward: str, name: str, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"reward {reward}: log_metric({shown(name)}, {shown(value)}): expected a number") from error
        numbers = self._metrics.setdefault(_name(reward, name, self._metrics), [])
        if isfinite(number):
            numbers.append(number)


def _name(reward: str, name: Any, logged: Mapping[str, Any]) -> str:
    """Return the name under which `reward` logs. Raises `RewardError` if it is invalid, or one too many in addition to `logged`."""
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise RewardError(f"reward {reward} logged under {shown(name)}, expected a name of 1 to 128 characters")
    if name not in logged and len(logged) >= MOST_NAMES:
        raise RewardError(f"reward {reward} logged {name!r} after {MOST_NAMES} other names; log at most {MOST_NAMES}")
    return name


def _as_json(value: Any) -> Any:
    """Return a logged value as JSON; a value that JSON cannot represent becomes text, and a long one is truncated."""
    value = _plain(value)
    if value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and abs(value) < 1 << 53):
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False, default=str)
        plain = text if isinstance(value, str) else json.loads(text)
    except Exception:  # the boundary to a user's object: NaN, a circle, a key that is no text, a `__str__` that raises
        plain = text = shown(value)
    return plain if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
