"""Staleness of trained samples, effective sample size, and figures of the engines.

Means over steps are weighted by samples or tokens; a figure that no worker reported is None.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts

AT_LAG = "tokens_at_lag_"


def weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Weighted mean of the values that are not None; None if there are none."""
    pairs = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


def mean(steps: Sequence[StepFacts], name: str, *, by: str = "samples") -> float | None:
    """A metric's mean over steps, weighted by another."""
    return weighted((step.metrics.get(name), step.metrics.get(by, 1.0)) for step in steps)


def most(steps: Sequence[StepFacts], name: str) -> float | None:
    """The largest value of a metric."""
    return max((step.metrics[name] for step in steps if name in step.metrics), default=None)


def lag(steps: Sequence[StepFacts]) -> dict[str, Any]:
    """In versions, under `steps` in optimizer steps.

    `mean`, `p95` and `max`: groups by their oldest trained token; p95 is the mean of the steps' own. `tokens`: each trained token by its
    own version, with the share of them at each lag; `spans`: policy versions in a sample.
    """
    lags = sorted({int(name.removeprefix(AT_LAG)) for step in steps for name in step.metrics if name.startswith(AT_LAG)})
    shares = {
        str(number): weighted((step.metrics.get(f"{AT_LAG}{number}", 0.0), step.metrics.get("tokens", 1.0)) for step in steps)
        for number in lags
    }
    return {
        "mean": mean(steps, "lag_mean"),
        "p95": mean(steps, "lag_p95"),
        "max": most(steps, "lag_max"),
        "steps": {"mean": mean(steps, "lag_steps_mean"), "p95": mean(steps, "lag_steps_p95"), "max": most(steps, "lag_steps_max")},
        "tokens": {
            "mean": mean(steps, "token_lag_mean", by="tokens"),
            "p95": mean(steps, "token_lag_p95", by="tokens"),
            "max": most(steps, "token_lag_max"),
            "shares": shares,
        },
        "spans": mean(steps, "spans_mean"),
    }


def ess(steps: Sequence[StepFacts]) -> dict[str, float | None]:
    """Effective sample size, 1 where behaviour policy and learner are one: its mean over steps, and the step where it was least."""
    least = min((step.metrics["ess"] for step in steps if "ess" in step.metrics), default=None)
    return {"mean": mean(steps, "ess"), "min": least}


def practice(steps: Sequence[StepFacts]) -> dict[str, float | None]:
    """Metrics to steer a run by: means over steps, the maximum for memory; None if no step has them."""
    means = ("entropy", "truncated_share", "reward_std", "reward_group_std", "update_norm", "train_tokens_per_s")
    return {
        **{name: mean(steps, name) for name in means},
        "entropy_first": steps[0].metrics.get("entropy") if steps else None,
        "entropy_last": steps[-1].metrics.get("entropy") if steps else None,
        **{name: most(steps, name) for name in ("peak_rss_bytes", "peak_gpu_bytes")},
    }


def engines(view: RunView) -> dict[str, float | None]:
    """The rollout workers' engines: weights loaded while samples were in flight, how long those waited, how full the batch was.

    `occupancy`: samples in a decode step by those that fit. `prefix_cache_hits`: the share of prompt tokens that were not computed.
    """
    workers = [worker for worker in view.workers.values() if worker.role == "rollout"]

    def total(name: str) -> float:
        return sum(worker.total(f"engine_{name}") for worker in workers)

    swaps, queries = total("swaps"), total("prefix_cache_queries")
    values_of: Mapping[str, Iterable[float]] = {
        name: [worker.values[f"engine_{name}"] for worker in workers if f"engine_{name}" in worker.values]
        for name in ("occupancy", "swap_stall_max_s")
    }
    return {
        "swaps": swaps,
        "swap_stall_ms_mean": 1000 * total("swap_stall_s") / swaps if swaps else None,
        "swap_stall_ms_max": 1000 * max(values_of["swap_stall_max_s"], default=0.0) if swaps else None,
        "occupancy": weighted((value, 1.0) for value in values_of["occupancy"]),
        "prefix_cache_hits": total("prefix_cache_hits") / queries if queries else None,
        "aborted_groups": sum(worker.total("aborted_groups") for worker in workers),
    }
