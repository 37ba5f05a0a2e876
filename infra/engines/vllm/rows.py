"""Groups and samples in vLLM, the arguments of their requests, and counters."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.infra.engines.base import GroupRequest, Sampling

MASS_ERROR = 1e-3
"""Largest difference from 1 of the probabilities of a complete support."""


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A request and its progress."""

    request: GroupRequest
    prompt: list[int]
    waiting: list[int]
    """Samples that are not in vLLM yet, the last first."""
    unended: int
    """Number of samples that have not ended."""
    tokens: int = 0
    """Tokens of ended samples."""
    oldest: int | None = None
    """Oldest version of ended samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A sample in vLLM, with its external and internal request ids."""

    name: str
    internal: str
    group: Group
    sample: int
    started_ns: int


def sample_seed(seed: int, group: int, sample: int) -> int:
    """Seed of one sample's random generator, below 2^63, from the run's seed, the group and the sample."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{group}:{sample}".encode(), digest_size=8).digest(), "big") >> 1


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for this sampling."""
    distribution = {"temperature": 0.0} if sampling.greedy else {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
    }  # fmt: skip
    return distribution | {
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,  # `stop_token_ids` has all ids that end a sample
        "logprobs": requested_logprobs(sampling.top_k) if sampling.limited else 0,  # 0: of the sampled token only
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
    }


def requested_logprobs(top_k: int) -> int:
    """Return how many most likely tokens vLLM has to report: more than k, because its top-k keeps every tie with the k-th."""
    return 2 * top_k + 16


def logprobs_and_support(logprobs: Any, tokens: int, *, limited: bool) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None]:
    """Convert vLLM's flat logprobs: ([T] logprobs, [T, k] support if the sampling is `limited`), the sampled token first.

    A row whose ids have less than the full probability is -1: more tokens tie with the k-th than vLLM reports.
    """
    values = np.array(logprobs.logprobs if tokens else (), dtype=np.float32)
    if not limited:
        return values, None
    if not tokens:
        return values, np.zeros((0, 0), np.int32)
    reported = values.reshape(tokens, -1)
    ids = np.array(logprobs.token_ids, dtype=np.int32).reshape(tokens, -1)
    sampled, others = ids[:, :1], ids[:, 1:]
    possible = np.isfinite(reported[:, 1:]) & (others != sampled)
    support = np.concatenate([sampled, np.where(possible, others, -1)], axis=1)
    mass = np.exp(reported[:, 0], dtype=np.float64) + np.where(possible, np.exp(reported[:, 1:], dtype=np.float64), 0.0).sum(1)
    support[np.abs(mass - 1.0) > MASS_ERROR] = -1
    ordered = np.take_along_axis(support, np.argsort(support < 0, axis=1, kind="stable"), axis=1)
    return reported[:, 0].copy(), ordered[:, : max(1, int((support >= 0).sum(1).max()))]


def partial_output(state: Any) -> Any:
    """Return the tokens of an unfinished request, in the form of vLLM's finished output."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]


_COUNTED = (
    "groups", "tokens", "aborted_tokens", "decode_steps", "decode_s", "loads", "load_s",
    "swaps", "swap_stall_s", "swap_stall_last_s", "swap_stall_max_s",
)  # fmt: skip


@dataclass(slots=True)
class Counts:
    """Sums since the engine was created; replaces vLLM's own loggers, which take longer than a step of a small model."""

    concurrency: int
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))
    _observed: float = 0.0
    _running: float = 0.0
    _cache: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "preemptions", "kv_cache_usage"), 0.0)
    )

    def record(self, scheduler_stats: Any = None, **_: Any) -> None:
        """Called by vLLM with its scheduler's statistics of a step."""
        if scheduler_stats is None:
            return
        self._observed += 1
        self._running += scheduler_stats.num_running_reqs
        prefix, cache = scheduler_stats.prefix_cache_stats, self._cache
        cache["kv_cache_usage"] = scheduler_stats.kv_cache_usage
        if prefix is not None:
            cache["prefix_cache_queries"] += prefix.queries
            cache["prefix_cache_hits"] += prefix.hits
            cache["preemptions"] += prefix.preempted_requests

    def log(self) -> None:
        """Called by vLLM periodically; has no effect."""

    def loaded(self, load_s: float, *, stall_s: float | None) -> None:
        """Count a loaded version; `stall_s` is the time for which samples in flight waited, None without any."""
        self.sums["loads"] += 1
        self.sums["load_s"] += load_s
        if stall_s is not None:
            self.sums["swaps"] += 1
            self.sums["swap_stall_s"] += stall_s
            self.sums |= {"swap_stall_last_s": stall_s, "swap_stall_max_s": max(self.sums["swap_stall_max_s"], stall_s)}

    def all(self) -> dict[str, float]:
        """Return every metric by name: sums, the last and longest stall, mean `occupancy` (0 to 1) and the KV cache's values."""
        occupancy = self._running / self._observed / self.concurrency if self._observed else 0.0
        return self.sums | {"occupancy": occupancy} | self._cache
