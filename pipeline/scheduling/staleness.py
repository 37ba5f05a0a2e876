"""How old tokens and groups are, as numbers for a report.

The rule: a lag is the learner's version minus the version something was drawn under, an integer; of no lags there is no summary.
"""

import numpy as np
import numpy.typing as npt


def lag_summary(lags: npt.ArrayLike) -> dict[str, float]:
    """`lag_min`, `lag_mean`, `lag_max` and `lag_p95` (the smallest lag that 95 % do not exceed), in versions; empty when there are none.

    Example:
        lag_summary([0, 0, 1, 3])  # -> {"lag_min": 0.0, "lag_mean": 1.0, "lag_max": 3.0, "lag_p95": 3.0}
    """
    values = np.asarray(lags, np.float64)
    if not values.size:
        return {}
    return {
        "lag_min": float(values.min()),
        "lag_mean": float(values.mean()),
        "lag_max": float(values.max()),
        "lag_p95": float(np.quantile(values, 0.95, method="inverted_cdf")),
    }


def fractions_by_lag(lags: npt.ArrayLike) -> dict[int, float]:
    """Which share has which lag, for the lags that occur, in rising order.

    Example:
        fractions_by_lag([2, 0, 0, 0])  # -> {0: 0.75, 2: 0.25}
    """
    found, counts = np.unique(np.asarray(lags, np.int64), return_counts=True)
    return {int(lag): int(count) / int(counts.sum()) for lag, count in zip(found, counts, strict=True)}
