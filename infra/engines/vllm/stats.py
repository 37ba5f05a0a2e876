"""Counters of an engine on vLLM: a few additions a step.

The rule: sums and extremes only, nothing that grows with the run.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """Sums since the engine was made; takes the place of vLLM's own loggers, which cost more than a small model's step."""

    concurrency: int
    groups: float = 0.0
    tokens: float = 0.0
    aborted_tokens: float = 0.0
    decode_steps: float = 0.0
    decode_s: float = 0.0
    loads: float = 0.0
    load_s: float = 0.0
    swaps: float = 0.0
    swap_stall_s: float = 0.0
    swap_stall_last_s: float = 0.0
    swap_stall_max_s: float = 0.0
    _observed: float = 0.0
    _running: float = 0.0
    _cache: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "preemptions", "kv_cache_usage"), 0.0)
    )

    def record(self, scheduler_stats: Any = None, **_: Any) -> None:
        """vLLM calls it with its scheduler's figures of a step."""
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
        """vLLM calls it now and then."""

    def loaded(self, load_s: float, *, in_flight: bool) -> None:
        """One version was loaded, under way or between groups."""
        self.loads += 1
        self.load_s += load_s
        if in_flight:
            self.swaps += 1
            self.swap_stall_s += load_s
            self.swap_stall_last_s = load_s
            self.swap_stall_max_s = max(self.swap_stall_max_s, load_s)

    def all(self) -> dict[str, float]:
        """Every figure by name."""
        plain = (
            "groups", "tokens", "aborted_tokens", "decode_steps", "decode_s", "loads", "load_s",
            "swaps", "swap_stall_s", "swap_stall_last_s", "swap_stall_max_s",
        )  # fmt: skip
        occupancy = self._running / self._observed / self.concurrency if self._observed else 0.0
        return {name: float(getattr(self, name)) for name in plain} | {"occupancy": occupancy} | self._cache
