"""The row of each group: a pure function of (seed, group number), so that a restarted feeder makes the same prompts."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def order(seed: int, n: int, size: int, *, shuffle: bool = True) -> tuple[int, int]:
    """Epoch and row of group `n` over a data set of `size` rows; each epoch visits every row once.

    Example:
        order(0, 7, 3, shuffle=False)  # -> (2, 1)
    """
    if n < 0 or size < 1:
        raise ValueError(f"group {n} of a data set with {size} rows: expected n >= 0 and size >= 1")
    epoch, position = divmod(n, size)
    return epoch, int(_permutation(seed, epoch, size)[position]) if shuffle else position


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    # Sort Philox's raw stream: numpy keeps bit generators' streams stable across releases, but not Generator.permutation.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
