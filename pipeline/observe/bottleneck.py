"""Who holds the run up, told from what the workers measured.

The rule: a name is given only where the shares of busy time bear it out; where two roles take turns, that is said.
"""

from typing import NamedTuple

from penstock.pipeline.observe.run_view import RunView

RECENT_STEPS = 10
SELDOM, MOSTLY = 0.2, 0.6
"""Shares of time below which a role is said to wait seldom, and above which it is said to be busy."""


class Bottleneck(NamedTuple):
    """A role, or "turns" when rollout and training wait for each other; and why."""

    who: str
    why: str


def waiting_ratio(view: RunView, *, steps: int = RECENT_STEPS) -> float | None:
    """Share of its time in which the trainer waited for groups, over the last steps; None before the first."""
    recent = [view.steps[number].metrics for number in sorted(view.steps)[-steps:]]
    waited, computed = (sum(metrics.get(name, 0.0) for metrics in recent) for name in ("wait_s", "compute_s"))
    return waited / (waited + computed) if waited + computed else None


def busy(view: RunView, role: str, name: str) -> float | None:
    """Mean share of the last seconds that the workers of a role spent in what `name` counts."""
    rates = [worker.rate(name) for worker in view.workers.values() if worker.role == role and not worker.ended]
    known = [rate for rate in rates if rate is not None]
    return min(1.0, sum(known) / len(known)) if known else None


def find(view: RunView) -> Bottleneck | None:
    """The role to give more to, or None while there is nothing to tell it from.

    A trainer that seldom waits is the bottleneck itself. Otherwise the busier of the roles before it is, if it is busy at all:
    scorers by their reward functions, rollout workers by generation. If neither is, rollout and training wait for each other.
    """
    waiting = waiting_ratio(view)
    if waiting is None or view.ended:
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
