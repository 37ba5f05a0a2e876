"""Input of a trainer backend: one micro-batch as numpy arrays, padded on the right so that causal attention ignores the padding."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """B sequences of at most L tokens; values per token are aligned to *next-token positions*: column t belongs to token t + 1."""

    input_ids: npt.NDArray[np.int64]
    """[B, L] prompt, completion, zero padding."""
    attention_mask: npt.NDArray[np.bool_]
    """[B, L] True on real tokens."""
    completion_mask: npt.NDArray[np.bool_]
    """[B, L-1] True where token t + 1 is a completion token that is trained."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[B, L-1] logprob with which token t + 1 was sampled; 0 outside `completion_mask`."""
    advantages: npt.NDArray[np.float32]
    """[B] one advantage per sequence."""
    temperatures: npt.NDArray[np.float32]
    """[B] sampling temperatures, by which the learner's logits are divided."""
    groups: npt.NDArray[np.int64]
    """[B] group number of each row."""
    samples: npt.NDArray[np.int64]
    """[B] sample number of each row within its group."""
    sample_tokens: npt.NDArray[np.int64] | None = None
    """[B] trained tokens of the full sample of each row; None if every row is a full sample."""
    support: npt.NDArray[np.int32] | None = None
    """[B, L-1, k] ids that token t + 1 was sampled from, itself included, padded with -1; None: the full vocabulary."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.completion_mask.sum())

    def logit_columns(self) -> npt.NDArray[np.int64]:
        """Columns of the L-1 next-token positions that any row trains; at least one, so that each batch has a loss."""
        columns: npt.NDArray[Any] = np.flatnonzero(self.completion_mask.any(axis=0))
        return columns if len(columns) else np.zeros(1, np.int64)
