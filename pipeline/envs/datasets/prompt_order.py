"""In which order the rows of a run's sources are asked: shuffled, mixed by weight, or rising by a column.

The rule: a pure function of the place, so that a restarted feeder makes the same prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.pipeline.envs.datasets.rows import DataError, Dataset

SOURCE_COLUMN = "data_source"
"""The column that a mixture adds to each row: the name of its source."""


class Turn(NamedTuple):
    """What stands at one place of the order."""

    source: int
    epoch: int
    """Of its source."""
    row: int
    """In its source."""


@dataclass(slots=True)
class PromptOrder:
    """The order of the rows of several sources.

    Every beginning of the order holds the sources by their weights, each to within one row; a source begins anew when all its rows have
    had their turn. `ranks` has for each source the places of its rows in the order of a column, or nothing.
    """

    sizes: Sequence[int]
    weights: Sequence[float]
    seed: int = 0
    shuffle: bool = True
    first: int = 0
    """What is added to every place."""
    ranks: Sequence[NDArray[np.int64] | None] = ()
    _turns: list[tuple[int, int]] = field(default_factory=list)
    """Place -> source, and how often it had its turn before."""
    _taken: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights) or not all(weight > 0 for weight in self.weights):
            raise ValueError(f"{len(self.sizes)} sources need as many weights above 0, not {list(self.weights)}")
        self._taken = [0] * len(self.sizes)

    def at(self, place: int) -> Turn:
        """What stands at this place, counted from 0.

        Example:
            PromptOrder(sizes=(2, 2), weights=(2, 1), shuffle=False).at(4)  # -> Turn(source=1, epoch=0, row=1)
        """
        place += self.first
        source, before = (0, place) if len(self.sizes) == 1 else self._turn(place)
        size = self.sizes[source]
        epoch, index = order(self.seed, before, size, shuffle=self.shuffle)
        if self.ranks and (ranks := self.ranks[source]) is not None:
            index = int(ranks[before % size])
        return Turn(source, epoch, index)

    def _turn(self, place: int) -> tuple[int, int]:
        while len(self._turns) <= place:  # the source whose next turn would come first, at even distances for each
            due = [(taken + 0.5) / weight for taken, weight in zip(self._taken, self.weights, strict=True)]
            source = due.index(min(due))
            self._turns.append((source, self._taken[source]))
            self._taken[source] += 1
        return self._turns[place]


def order(seed: int, n: int, size: int, *, shuffle: bool = True) -> tuple[int, int]:
    """Epoch and row of group `n` over a data set of `size` rows; each epoch visits every row once.

    A pure function, so that a restarted feeder makes the same prompts.

    Example:
        order(0, 7, 3, shuffle=False)  # -> (2, 1)
    """
    if n < 0 or size < 1:
        raise ValueError(f"group {n} of a data set with {size} rows: expected n >= 0 and size >= 1")
    epoch, place = divmod(n, size)
    return epoch, int(_permutation(seed, epoch, size)[place]) if shuffle else place


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    # Sorting Philox's raw stream: numpy keeps a bit generator's stream over its releases, but not Generator.permutation's.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")


def rising(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Row numbers in rising order of a column, equal ones as they stand. Raises `DataError` for a row whose value is no number."""
    values = []
    for row in dataset:
        value = row.columns.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{row.origin}: data.sort_by = {column!r} needs a number there, not {value!r}")
        values.append(value)
    ranked: NDArray[np.int64] = np.argsort(np.array(values, np.float64), kind="stable")
    return ranked
