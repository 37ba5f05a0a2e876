"""How token losses become one number: what a step is divided by, and what each token counts; the part that needs no torch.

The rule: pure functions of masks and counts, the same for the learner and for `explain`; counts add up over any cut of a step.
"""

from typing import Any

import numpy as np

AGGREGATES = ("token_mean", "sequence_mean", "constant")


def denominator(mask: np.ndarray[Any, Any], *, aggregate: str) -> float:
    """What a mask [B, L] of trained tokens adds to a step's denominator: counts add up over any cut of the step.

    Tokens under `token_mean`, sequences with a trained token under `sequence_mean` and `constant`.
    """
    if aggregate == "token_mean":
        return float(mask.sum())
    if aggregate in AGGREGATES:
        return float(mask.any(axis=1).sum())
    raise ValueError(f"unknown loss aggregation {aggregate!r}: choose one of {', '.join(AGGREGATES)}")


def token_share(tokens: int, *, aggregate: str, max_tokens: int) -> float:
    """What each of a sequence's `tokens` trained tokens counts in the step's sum, before its division: 1, 1/tokens or 1/max_tokens.

    Example:
        token_share(4, aggregate="sequence_mean", max_tokens=16)  # -> 0.25
    """
    if aggregate == "token_mean":
        return 1.0
    return 1.0 / (max_tokens if aggregate == "constant" else max(tokens, 1))
