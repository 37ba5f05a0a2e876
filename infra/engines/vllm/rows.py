"""A group in work as the engine on vLLM keeps it, and how a sample of it is asked of vLLM.

The rule: everything that decides a draw is given, so that neither the model's generation config nor another sample has a say.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import GroupRequest, Sampling

MASS_ERROR = 1e-3
"""By how much the probabilities of a whole support may differ from 1."""


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
        "logprobs": requested_logprobs(sampling.top_k) if sampling.limited else 0,  # of the drawn token alone
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
    }


def requested_logprobs(top_k: int) -> int:
    """How many of the likeliest tokens vLLM reports: more than k, as its top-k keeps every token that ties with the k-th."""
    return 2 * top_k + 16


def logprobs_and_support(logprobs: Any, tokens: int, *, limited: bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None]:
    """([T] logprobs, [T, k] ids of each token's distribution if that is `limited`) from vLLM's flat logprobs, the drawn token first.

    Ids that stand for less than the whole distribution are none: then so many tie with the k-th that vLLM did not report all.
    """
    values = np.array(logprobs.logprobs if tokens else (), dtype=np.float32)
    if not limited:
        return values, None
    if not tokens:
        return values, np.zeros((0, 0), np.int32)
    reported = values.reshape(tokens, -1)
    ids = np.array(logprobs.token_ids, dtype=np.int32).reshape(tokens, -1)
    drawn, others = ids[:, :1], ids[:, 1:]
    kept = np.isfinite(reported[:, 1:]) & (others != drawn)
    support = np.concatenate([drawn, np.where(kept, others, -1)], axis=1)
    mass = np.exp(reported[:, 0], dtype=np.float64) + np.where(kept, np.exp(reported[:, 1:], dtype=np.float64), 0.0).sum(1)
    support[np.abs(mass - 1.0) > MASS_ERROR] = -1
    ordered = np.take_along_axis(support, np.argsort(support < 0, axis=1, kind="stable"), axis=1)
    return reported[:, 0].copy(), ordered[:, : max(1, int((support >= 0).sum(1).max()))]


def partial_output(state: Any) -> Any:
    """The unfinished request's tokens so far, in the form in which vLLM returns a finished one."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
