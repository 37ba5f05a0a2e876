"""One turn as an engine drew it, and how a driver asks for one: the same in a rollout worker's own process and through the log."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """T tokens, the stop id included, with their logprobs (nats) and policy versions."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish: Literal["stop", "length", "abort"]
    started_ns: int = 0
    ended_ns: int = 0


class Drawing(Protocol):
    """Asks for one turn after a context."""

    def __call__(self, token_ids: npt.NDArray[np.int32], *, turn: int, max_new_tokens: int) -> Awaitable[Draw]:
        """What is drawn after `token_ids`, at most `max_new_tokens`."""
        ...
