"""How busy the reward functions were, from the scorers' own figures."""

from typing import Any

from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.observe.status import busy


def scoring(view: RunView) -> dict[str, Any] | None:
    """What rewards took; None where no group has been judged.

    `utilisation`: the share of the time in which the places for groups at the reward functions were taken; a child process has one place,
    or `reward.concurrency` where a function is async or a service. `wait_s_mean`: from a group's call to its rewards, in the attempt that
    succeeded. `groups_per_s`: over the scorers' time.
    """
    scorers = [worker for worker in view.workers.values() if worker.role == "scorer"]
    groups = sum(worker.total("groups") for worker in scorers)
    at_work = sum(worker.total("uptime_s") - worker.total("time_start_s") for worker in scorers)
    if not groups or at_work <= 0:
        return None
    return {
        "groups": int(groups),
        "utilisation": busy(view, "scorer", "reward_busy_s", whole=True),
        "wait_s_mean": sum(worker.total("reward_s") for worker in scorers) / groups,
        "groups_per_s": groups / at_work,
    }


def scoring_line(found: dict[str, Any]) -> str:
    """The same for a person."""
    return f"{found['groups']:,} groups, {found['wait_s_mean']:.2f} s each, places for them taken {found['utilisation']:.0%} of the time"
