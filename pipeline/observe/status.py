"""Where a run stands at this moment: progress, pace, silent workers and the bottleneck, as plain data for `penstock status --json`.

The rule: pure functions of what the topics say and of the time. A worker that is not heard of is said to be silent, not dead; a bottleneck
is named only where the shares of busy time bear it out.
"""

import itertools
import math
import statistics
from collections import Counter
from typing import Any, NamedTuple

from penstock.pipeline.observe import waste
from penstock.pipeline.observe.run_status import closing, config_of, fates, has_ended, info_of, last_reward, status_of, steps_planned
from penstock.pipeline.observe.run_view import RunView

WATCHED = ("ledger", "metrics", "groups", "prompts", "dead-letters")
"""Topics that `status` and the live view read: not the rollouts, which are most of a run's records."""
SPEED_STEPS = 20
"""Steps over which speed and time to go are taken."""
RECENT_STEPS = 10
"""Steps over which the trainer's waiting is taken."""
SELDOM, MOSTLY = 0.2, 0.6
"""Shares of time below which a role is said to wait seldom, and above which it is said to be busy."""


class Bottleneck(NamedTuple):
    """A role, or "turns" when rollout and training wait for each other; and why."""

    who: str
    why: str


def trainer_waiting_ratio(view: RunView, *, steps: int = RECENT_STEPS) -> float | None:
    """Share of its time in which the trainer waited for groups, over the last steps; None before the first."""
    recent = [view.steps[number].metrics for number in sorted(view.steps)[-steps:]]
    waited, computed = (sum(metrics.get(name, 0.0) for metrics in recent) for name in ("wait_s", "compute_s"))
    return waited / (waited + computed) if waited + computed else None


def busy(view: RunView, role: str, name: str) -> float | None:
    """Mean share of the last seconds that the workers of a role spent in what `name` counts."""
    rates = [worker.rate(name) for worker in view.workers.values() if worker.role == role and not worker.ended]
    known = [rate for rate in rates if rate is not None]
    return min(1.0, sum(known) / len(known)) if known else None


def bottleneck(view: RunView) -> Bottleneck | None:
    """The role to give more to, or None while there is nothing to tell it from.

    A trainer that seldom waits is the bottleneck itself. Otherwise the busier of the roles before it is, if it is busy at all:
    scorers by their reward functions, rollout workers by generation. If neither is, rollout and training wait for each other.
    """
    waiting = trainer_waiting_ratio(view)
    if waiting is None or has_ended(view):
        return None
    if waiting < SELDOM:
        return Bottleneck("trainer", f"it waits {waiting:.0%} of its time")
    generating, scoring = busy(view, "rollout", "generate_s"), busy(view, "scorer", "reward_s")
    if scoring is not None and scoring >= MOSTLY and scoring > (generating or 0.0):
        return Bottleneck("scorer", f"busy {scoring:.0%}; the trainer waits {waiting:.0%}")
    if generating is None:
        return None
    if generating >= MOSTLY:
        return Bottleneck("rollout", f"busy {generating:.0%}; the trainer waits {waiting:.0%}")
    doing = [worker.labels.get("doing") for worker in view.workers.values() if worker.role == "rollout" and not worker.ended]
    if waiting >= MOSTLY and "waiting for prompts" in doing:
        return Bottleneck("feeder", f"rollout workers wait for prompts; the trainer waits {waiting:.0%}")
    return Bottleneck("turns", f"rollout works {generating:.0%}, the trainer {1 - waiting:.0%} of the time")


def elapsed_s(view: RunView, *, now_s: float) -> float | None:
    """Seconds since the run was created, up to its end."""
    if view.record is None:
        return None
    end = view.closed.time_ns / 1e9 if view.closed else now_s
    return max(0.0, end - view.record.created_ns / 1e9)


def to_go_s(view: RunView) -> float | None:
    """Seconds that the remaining steps take at the pace of the last ones; None before there is a pace.

    The longest of three or more times between steps does not count: a run that was stopped and resumed has one that was no step.
    """
    recent = [view.steps[number] for number in sorted(view.steps)[-SPEED_STEPS - 1 :]]
    planned = steps_planned(view)
    if planned is None or len(recent) < 2 or has_ended(view):
        return None
    times = sorted(later.time_s - earlier.time_s for earlier, later in itertools.pairwise(recent))
    counted = times[:-1] if len(times) > 2 else times
    return max(0.0, statistics.fmean(counted) * (planned - len(view.steps)))


def silences(view: RunView, *, now_s: float) -> dict[str, float]:
    """Seconds since each worker's last report, for those that have not ended."""
    return {worker.worker: max(0.0, now_s - worker.time_ns / 1e9) for worker in view.workers.values() if not worker.ended}


def standstill_s(view: RunView, *, now_s: float) -> float | None:
    """Seconds for which nothing has moved, None for a run that is over or has moved within its `run.stall_s`."""
    limit_s = float(config_of(view).get("run", {}).get("stall_s", math.inf))
    still_s = max(0.0, now_s - view.moved_ms / 1000)
    return still_s if still_s >= limit_s and not has_ended(view) and status_of(view) != "created" else None


def standing(view: RunView, *, now_s: float) -> dict[str, Any]:
    """The run's state and each worker's, ready for JSON."""
    counted = Counter(fates(view).values())
    slowest = bottleneck(view)
    silent = silences(view, now_s=now_s)
    last = view.steps[max(view.steps)].metrics if view.steps else {}
    return {
        "run": view.run,
        "status": status_of(view),
        "reason": closing(view).get("reason"),
        "steps_done": len(view.steps),
        "steps": info_of(view).get("steps"),
        "version": view.version,
        "reward": last_reward(view),
        "lag_mean": last.get("lag_mean"),
        "elapsed_s": elapsed_s(view, now_s=now_s),
        "to_go_s": to_go_s(view),
        "groups": dict(sorted(counted.items())),
        "dead_letters": len(view.dead_letters),
        "bottleneck": None if slowest is None else {"who": slowest.who, "why": slowest.why},
        "waste": waste.as_json(waste.wastes(view, last=waste.RECENT_GROUPS)),
        "workers": [
            {
                "worker": worker.worker,
                "role": worker.role,
                "doing": "ended" if worker.ended else worker.labels.get("doing"),
                "error": worker.labels.get("error"),
                "starts": len(worker.incarnations),
                "host": worker.labels.get("host"),
                "pid": worker.labels.get("pid"),
                "silent_s": silent.get(worker.worker),
                "values": worker.values,
            }
            for worker in view.workers.values()
        ],
    }
