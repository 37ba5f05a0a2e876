"""Batches for losses: of a mask alone, with everything else the same in all rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from penstock.infra.backends.base import TokenBatch


def batch_of(mask: ArrayLike, *, behaviour: float = 0.0, advantages: Sequence[float] | None = None) -> TokenBatch:
    """Rows whose completions are where the mask [B, T-1] is true; every behaviour logprob is `behaviour`, advantages are 1 unless given."""
    mask = np.array(mask, bool)
    rows, width = mask.shape
    return TokenBatch(
        input_ids=np.zeros((rows, width + 1), np.int64),
        attention_mask=np.ones((rows, width + 1), bool),
        completion_mask=mask,
        behaviour_logprobs=np.full(mask.shape, behaviour, np.float32) * mask,
        advantages=np.ones(rows, np.float32) if advantages is None else np.array(advantages, np.float32),
        temperatures=np.ones(rows, np.float32),
        groups=np.zeros(rows, np.int64),
        samples=np.arange(rows),
    )
