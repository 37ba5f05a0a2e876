"""A group in work as the engine on vLLM keeps it, and how a sample of it is asked of vLLM.

The rule: everything that decides a draw is given, so that neither the model's generation config nor another sample has a say.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from penstock.infra.engines.base import GroupRequest, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A request and how far it is: samples not yet given to vLLM, the last first, and what the ended ones had."""

    request: GroupRequest
    prompt: list[int]
    waiting: list[int]
    left: int
    tokens: int = 0
    oldest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A sample that vLLM has, with the names by which it knows it."""

    name: str
    internal: str
    group: Group
    sample: int
    started_ns: int


def sample_seed(seed: int, group: int, sample: int) -> int:
    """The seed of one sample's random generator: of this run's, group's and sample's numbers alone, below 2^63."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{group}:{sample}".encode(), digest_size=8).digest(), "big") >> 1


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    drawn = {"temperature": 0.0} if sampling.greedy else {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
    }  # fmt: skip
    return drawn | {
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # the ids that end a sample are given, all of them
        "logprobs": 0,  # of the drawn token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def partial_output(state: Any) -> Any:
    """The unfinished request's tokens so far, in the form in which vLLM returns a finished one."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
