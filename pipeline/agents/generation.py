"""One generated turn and the function that generates it, in the same process or through the topics `calls` and `replies`."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One generated turn: T tokens, the stop id included, with logprobs (nats) and policy versions."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish: Literal["stop", "length", "abort"]
    started_ns: int = 0
    ended_ns: int = 0


class Generate(Protocol):
    """Generates one turn of a trajectory."""

    def __call__(self, token_ids: npt.NDArray[np.int32], *, turn: int, max_new_tokens: int) -> Awaitable[Generation]:
        """Generate at most `max_new_tokens` tokens after the context `token_ids`."""
        ...
