"""The order in which the rows of a run's sources become prompts: shuffled, mixed by weight, or sorted by a column.

The order is a pure function of the index, so that a restarted feeder makes the same prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.pipeline.data.rows import DataError, Dataset

SOURCE_COLUMN = "data_source"
"""Column with the name of a row's source, added in a mixture."""


class RowId(NamedTuple):
    """A row and the epoch in which it is used."""

    source: int
    epoch: int
    row: int


@dataclass(slots=True)
class PromptOrder:
    """The order of the rows of several sources.

    Every prefix of the order contains the sources in proportion to their weights, to within one row each. A source starts its next epoch
    when all its rows have been used. `ranks` has for each source its row numbers sorted by a column, or None.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    seed: int = 0
    shuffle: bool = True
    first: int = 0
    """Offset added to every index."""
    ranks: Sequence[NDArray[np.int64] | None] = ()
    _turns: list[tuple[int, int]] = field(default_factory=list)
    """Index -> source, and the number of earlier rows of that source."""
    _taken: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights) or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"{len(self.sizes)} sources need as many weights above 0, not {list(self.weights)}")
        self._taken = [0] * len(self.sizes)

    def at(self, index: int) -> RowId:
        """The row at an index of the order, counted from 0.

        Example:
            PromptOrder(sizes=(2, 2), weights=(2, 1), shuffle=False).at(4)  # -> RowId(source=1, epoch=0, row=1)
        """
        index += self.first
        source, before = (0, index) if len(self.sizes) == 1 else self._turn(index)
        size = self.sizes[source]
        epoch, row = order(self.seed, before, size, shuffle=self.shuffle)
        if self.ranks and (ranks := self.ranks[source]) is not None:
            row = int(ranks[before % size])
        return RowId(source, epoch, row)

    def _turn(self, index: int) -> tuple[int, int]:
        while len(self._turns) <= index:  # the source whose next row is due first, if the rows of each are evenly spaced
            due = [(taken + 0.5) / weight for taken, weight in zip(self._taken, self.weights, strict=True)]
            source = due.index(min(due))
            self._turns.append((source, self._taken[source]))
            self._taken[source] += 1
        return self._turns[index]


def order(seed: int, n: int, size: int, *, shuffle: bool = True) -> tuple[int, int]:
    """Epoch and row of group `n` over a data set of `size` rows; each epoch visits every row once.

    Example:
        order(0, 7, 3, shuffle=False)  # -> (2, 1)
    """
    if n < 0 or size < 1:
        raise ValueError(f"group {n} of a data set with {size} rows: expected n >= 0 and size >= 1")
    epoch, index = divmod(n, size)
    return epoch, int(_permutation(seed, epoch, size)[index]) if shuffle else index


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    # Sorts Philox's raw stream: numpy guarantees the stream of a bit generator over its releases, but not Generator.permutation's.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def ascending(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Row numbers in ascending order of a column (stable). Raises `DataError` for a value that is not a number."""
    values = []
    for row in dataset:
        value = row.columns.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{row.origin}: data.sort_by = {column!r} needs a number there, not {value!r}")
        values.append(value)
    ranked: NDArray[np.int64] = np.argsort(np.array(values, np.float64), kind="stable")
    return ranked
