"""An own loss, here GRPO in which mistakes weigh less than successes: `algorithm.loss = "own_loss.py:forgiving"`."""

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.pipeline.algorithms.losses import batch_loss


def forgiving(logprobs: Any, batch: Any, **settings: Any) -> tuple[Any, dict[str, float]]:
    """The summed loss and statistics of a micro-batch, negative advantages halved. `logprobs` [B, L-1] are the learner's."""
    advantages = np.where(batch.advantages < 0, batch.advantages / 2, batch.advantages)
    return batch_loss(logprobs, replace(batch, advantages=advantages), **settings)
