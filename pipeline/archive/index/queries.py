"""Filters, sorts and pages the groups of a run index in memory; rows are ready for JSON.

`GroupList` is a snapshot of `RunIndex.groups()`: build a new one when the index has grown.

Example:
    rows = GroupList(index.groups(ended=ended), dead_letters=index.dead_letters)
    first = rows.page(Filters(statuses=("trained",), reward=(0.0, 0.2)), order="worst", limit=100)
    second = rows.page(Filters(statuses=("trained",), reward=(0.0, 0.2)), order="worst", limit=100, after=first["next"])
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.pipeline.data.references import reference_text
from penstock.topics.wire.columns import column_of

MOST_ROWS = 1_000
EXCERPT = 400
"""Characters of a prompt in a row. The end of the prompt is shown, because the start is often a template."""
_TIMES = ("admitted", "scored")
BINS = 24

Range = tuple[float | None, float | None]
"""(smallest, largest) value; None for no limit. A row without a value is outside every range."""

ORDERS: Mapping[str, tuple[str, bool]] = {
    "newest": ("group", True),
    "oldest": ("group", False),
    "worst": ("reward_mean", False),
    "best": ("reward_mean", True),
    "spread": ("spread", True),
    "longest": ("tokens", True),
    "shortest": ("tokens", False),
    "step": ("step", True),
    "lag": ("lag", True),
    "slowest": ("seconds", True),
}
"""Order -> (column, True for descending). Rows without a value come last; rows with equal values are sorted by group, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions on groups, joined by AND. A field that is not set is no condition."""

    statuses: Sequence[str] = ()
    group: Range | None = None
    reward: Range | None = None
    step: Range | None = None
    version: Range | None = None
    row: int | None = None


@dataclass(slots=True)
class GroupList:
    """Snapshot of the groups of a run."""

    table: pa.Table
    dead_letters: Mapping[int, str] = field(default_factory=dict)
    """Group -> kind of its first dead letter."""
    _numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    _orders: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    def page(self, where: Filters = Filters(), *, order: str = "newest", after: str | None = None, limit: int = 100) -> dict[str, Any]:
        """Return `rows`, `next` (cursor of the next page, or None), and the numbers of `matching` and of all `groups`.

        Raises `ValueError` for an unknown order or an invalid cursor `after`.
        """
        numbers, ranked = self.numbers("group"), self._ranked(order)
        if where != Filters():
            ranked = ranked[self.matching(where)[ranked]]
        start = self._position(ranked, order, after) if after else 0
        shown = ranked[start : start + max(1, min(limit, MOST_ROWS))]
        more = start + len(shown) < len(ranked)
        rows = self.rows(shown)
        return {
            "rows": rows,
            "next": f"{float(self.numbers(ORDERS[order][0])[shown[-1]])!r}:{int(numbers[shown[-1]])}" if more and len(shown) else None,
            "matching": len(ranked),
            "groups": len(self.table),
        }

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Return [G] values of a numeric column, or of `spread` (of rewards), `seconds` (to scoring) or `length` (tokens per sample).

        Missing values are NaN. Raises `ValueError` for a name that is not numeric.
        """
        if name not in self._numbers:
            if name == "spread":
                self._numbers[name] = self.numbers("reward_max") - self.numbers("reward_min")
            elif name == "seconds":
                self._numbers[name] = (self.numbers("scored") - self.numbers("admitted")) / 1e9
            elif name == "length":
                self._numbers[name] = self.numbers("tokens") / np.maximum(self.numbers("samples"), 1)
            else:
                self._numbers[name] = _numbers(self.table, name)
        return self._numbers[name]

    def histogram(self, name: str, where: Filters = Filters()) -> dict[str, list[float]]:
        """Return the histogram of `numbers(name)` over the matching groups: `counts` of `BINS` ranges, and their `edges`."""
        values = self.numbers(name)[self.matching(where)]
        counts, edges = np.histogram(values[np.isfinite(values)], BINS)
        return {"counts": counts.tolist(), "edges": edges.tolist()}

    def matching(self, where: Filters) -> NDArray[np.bool_]:
        """[G] True for the groups for which all conditions hold."""
        mask = np.ones(len(self.table), np.bool_)
        columns = {"group": "group", "reward": "reward_mean", "step": "step", "version": "policy_version_min"}
        for condition, column in columns.items():
            if (limits := getattr(where, condition)) is not None:
                values, (low, high) = self.numbers(column), limits
                mask &= (values >= (-np.inf if low is None else low)) & (values <= (np.inf if high is None else high))
        if where.row is not None:
            mask &= self.numbers("row") == where.row
        if where.statuses:
            mask &= _bools(pc.is_in(self.table["status"], _array(pa.string(), list(where.statuses))))
        return mask

    def rows(self, indices: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return the rows at these indices of the table, for JSON, with the end of the prompt."""
        names = [name for name in self.table.column_names if name not in ("prompt_ids", "sha256", "outcome", *_TIMES)]
        rows = self.table.select(names).take(_array(pa.int64(), indices.tolist())).to_pylist()
        times = {name: self.numbers(name)[indices].tolist() for name in _TIMES}
        return [self._row(row, {name: values[number] for name, values in times.items()}) for number, row in enumerate(rows)]

    def _row(self, row: dict[str, Any], times: Mapping[str, float]) -> dict[str, Any]:
        prompt, columns = row.pop("prompt") or "", row.pop("columns")
        reference = reference_text(columns)
        return {
            **row,
            "rewards": [None if reward != reward else reward for reward in row["rewards"] or ()],  # noqa: PLR0124
            "prompt": prompt[-EXCERPT:],
            "prompt_length": len(prompt),
            "answer": None if reference is None else reference[:EXCERPT],
            "dead_letter": self.dead_letters.get(row["group"]),
            **{f"{name}_ms": None if math.isnan(time_ns) else int(time_ns // 1e6) for name, time_ns in times.items()},
        }

    def _ranked(self, order: str) -> NDArray[np.int64]:
        if order not in ORDERS:
            raise ValueError(f"order {order!r}: expected one of {', '.join(ORDERS)}")
        if order not in self._orders:
            name, descending = ORDERS[order]
            values = self.numbers(name)
            newest = np.argsort(-self.numbers("group"), kind="stable")
            # NumPy sorts NaN last in both directions.
            self._orders[order] = newest[np.argsort(-values[newest] if descending else values[newest], kind="stable")]
        return self._orders[order]

    def _position(self, ranked: NDArray[np.int64], order: str, after: str) -> int:
        """Return the position in `ranked` after the cursor `after`; its group may have left the list."""
        name, descending = ORDERS[order]
        value_text, _, group_text = after.rpartition(":")
        try:
            value, group = float(value_text), int(group_text)
        except ValueError:
            raise ValueError(f"cursor {after[:60]!r}: expected the value of `next` from a page") from None
        numbers = self.numbers("group")[ranked]
        if len(same := np.flatnonzero(numbers == group)):
            return int(same[0]) + 1
        values = self.numbers(name)[ranked]  # the group has left the list
        if descending:
            values, value = -values, -value
        missing = np.isnan(values)
        same, before = (missing, ~missing) if np.isnan(value) else (values == value, values < value)
        return int(np.count_nonzero(before | (same & (numbers >= group))))


def _array(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Convert values to an Arrow array. `pyarrow.array` and `pyarrow.scalar` would import pandas."""
    return column_of(pa.field("values", kind)).to_arrow(values)


_NAN, _ZERO = _array(pa.float64(), [math.nan])[0], _array(pa.int64(), [0])[0]


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    if name not in table.column_names:
        raise ValueError(f"column {name!r} does not exist; columns: {', '.join(table.column_names)}")
    column = table[name]
    if pa.types.is_timestamp(column.type):
        column = pc.cast(column, pa.int64())
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"column {name!r} is not numeric ({column.type})")
    parts = [np.from_dlpack(pc.fill_null(pc.cast(chunk, pa.float64(), safe=False), _NAN)) for chunk in column.chunks]
    return np.concatenate([np.empty(0), *parts])


def _bools(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    parts = [np.from_dlpack(pc.fill_null(pc.cast(chunk, pa.int64()), _ZERO)) for chunk in column.chunks]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.bool_)
