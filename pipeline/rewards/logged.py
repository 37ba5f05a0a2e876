"""Values that reward functions log, as in TRL: `log_extra(column, values)` and `log_metric(name, value)`.

Columns and named reward parts are recorded per sample, metrics per group; both are limited in number and length.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from statistics import fmean
from typing import Any

from penstock.pipeline.rewards.faults import RewardError
from penstock.pipeline.rewards.values import shown

NAMES = ("log_extra", "log_metric")
MOST_NAMES = 32
MOST_CHARACTERS = 4096
"""Limit of a logged value that is not a number, as JSON."""


class Logged:
    """Logged columns and metrics of one group with `count` completions."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def functions(self, reward: str) -> dict[str, Callable[..., None]]:
        """The arguments `log_extra` and `log_metric` for the function `reward`."""
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
        """The logged values of each completion by column; empty if nothing was logged."""
        if not self._extra:
            return ()
        columns = self._extra.items()
        return tuple({name: values[row] for name, values in columns if values[row] is not None} for row in range(self._count))

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each metric over its finite values; metrics without one are omitted."""
        return {name: fmean(values) for name, values in self._metrics.items() if values}

    def _log_extra(self, reward: str, column: str, values: Sequence[Any]) -> None:
        items = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(items, (list, tuple)) or len(items) != self._count:
            what = f"{len(items)} values" if isinstance(items, (list, tuple)) else f"a {type(values).__name__}"
            raise RewardError(f"reward {reward}: log_extra({shown(column)}, …) got {what}, expected a list of {self._count}")
        self._extra[_name(reward, column, self._extra)] = [_plain(value) for value in items]

    def _log_metric(self, reward: str, name: str, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"reward {reward}: log_metric({shown(name)}, {shown(value)}): expected a number") from error
        numbers = self._metrics.setdefault(_name(reward, name, self._metrics), [])
        if isfinite(number):
            numbers.append(number)


def _name(reward: str, name: Any, logged: Mapping[str, Any]) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise RewardError(f"reward {reward} logged under {shown(name)}, expected a name of 1 to 128 characters")
    if name not in logged and len(logged) >= MOST_NAMES:
        raise RewardError(f"reward {reward} logged {name!r} after {MOST_NAMES} other names: the limit is {MOST_NAMES}")
    return name


def _plain(value: Any) -> Any:
    """A value as JSON: values that JSON cannot represent as text, long ones cut."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and abs(value) < 1 << 53):
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False, default=str)
        plain = text if isinstance(value, str) else json.loads(text)
    except Exception:  # the boundary to a user's object: NaN, a circle, a key that is no text, a `__str__` that raises
        plain = text = shown(value)
    return plain if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
