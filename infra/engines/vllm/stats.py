"""Counters of the vLLM engine."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counts:
    """Sums since the engine was created; replaces vLLM's own loggers, which take longer than a step of a small model."""

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

    def loaded(self, load_s: float, *, in_flight: bool) -> None:
        """Count a loaded version; `in_flight` if samples were running."""
        self.loads += 1
        self.load_s += load_s
        if in_flight:
            self.swaps += 1
            self.swap_stall_s += load_s
            self.swap_stall_last_s = load_s
            self.swap_stall_max_s = max(self.swap_stall_max_s, load_s)

    def all(self) -> dict[str, float]:
        """Every counter by name."""
        names = (
            "groups", "tokens", "aborted_tokens", "decode_steps", "decode_s", "loads", "load_s",
            "swaps", "swap_stall_s", "swap_stall_last_s", "swap_stall_max_s",
        )  # fmt: skip
        occupancy = self._running / self._observed / self.concurrency if self._observed else 0.0
        return {name: float(getattr(self, name)) for name in names} | {"occupancy": occupancy} | self._cache
