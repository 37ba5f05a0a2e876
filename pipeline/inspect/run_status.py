"""Status, configuration, group statuses and last reward of a run view; the ledger takes precedence over the run record."""

import json
import math
from collections import Counter
from typing import Any

from penstock.pipeline.algorithms.advantages import RewardScale
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import together
from penstock.pipeline.scheduling import rules
from penstock.topics.ledger import ALL_DONE
from penstock.topics.runs import ENDED


def closing(view: RunView) -> dict[str, Any]:
    """Status and reason of the run's end in the ledger."""
    return _object(view.closed.details if view.closed else None)


def status_of(view: RunView) -> str:
    """finished, stopped or failed by the ledger or the run record, otherwise created or running."""
    if view.closed is not None:
        return str(closing(view).get("status", "finished"))
    status = view.record.status if view.record else "created"
    since = view.record.updated_ns if view.record and status == "stopped" else 0
    # A stopped run that is resumed is known by the workers that report again.
    resumed = status == "stopped" and any(worker.time_ns > since and not worker.ended for worker in view.workers.values())
    return "running" if resumed or (status == "created" and view.opened is not None) else status


def has_ended(view: RunView) -> bool:
    """True if no more records will follow."""
    return status_of(view) in ENDED


def resumptions(view: RunView) -> int:
    """Number of resumptions: of restarts that every worker has made."""
    workers = [worker for worker in view.workers.values() if not worker.ended] or view.workers.values()
    return min((len(worker.incarnations) - 1 for worker in workers), default=0)


def config_of(view: RunView) -> dict[str, Any]:
    """The run's configuration as a plain table, {} before it is known."""
    return _about(view, "config")


def reward_scale(view: RunView) -> RewardScale:
    """The range of the run's rewards, from the known ranges of its functions or the means of its groups."""
    rewards = config_of(view).get("reward", {})
    scale = RewardScale.of(
        rewards.get("functions") or (), rewards.get("weights"), by_source=config_of(view).get("data", {}).get("rewards") or ()
    )
    scale.see(facts.reward_mean for facts in view.groups.values() if facts.reward_mean is not None)
    return scale


def end_reason(reason: str | None) -> str | None:
    """The reason of a run that has ended before all its steps were done; None for any other: `end_reason("all steps done")` is None."""
    return None if reason == ALL_DONE else reason


def info_of(view: RunView) -> dict[str, Any]:
    """Facts determined at the creation of the run: rows, steps, digests; {} before they are known."""
    return _about(view, "info")


def steps_planned(view: RunView) -> int | None:
    return info_of(view).get("steps")


def steps_per_version(view: RunView) -> int:
    """S"""
    return int(config_of(view).get("schedule", {}).get("steps_per_version") or 1)


def last_reward(view: RunView) -> float | None:
    """Mean reward of all scored samples of the last tenth of the steps, by oldest version; of the newest version if none is so new."""
    versions, steps, per_version = sorted(view.rewards), view.steps_done, steps_per_version(view)
    late = [version for version in versions if (version + 1) * per_version > steps - tenth(steps)] or versions[-1:]
    return together(view.rewards[version] for version in late).mean


def tenth(steps: int) -> int:
    """Number of steps over which the first and the last reward are averaged: `tenth(41)` is 5."""
    return math.ceil(steps / 10)


def group_statuses(view: RunView) -> dict[int, str]:
    """Group -> status, for every admitted or trained group that the view has not forgotten."""
    statuses = rules.group_statuses(
        view.admitted,
        {group: outcome.outcome for group, outcome in view.groups.items()},
        trained=(group for step in view.steps.values() for group in step.groups),
        stale=view.stale,
        ended=has_ended(view),
        since=view.past.below,
    )
    return {group: status for group, status in statuses.items() if group not in view.past.settled} if view.past.statuses else statuses


def status_counts(view: RunView) -> Counter[str]:
    """Status -> number of groups."""
    return Counter(group_statuses(view).values()) + view.past.statuses


def _about(view: RunView, part: str) -> dict[str, Any]:
    if view.record is not None:
        return _object(view.record.config if part == "config" else view.record.info)
    return dict(_object(view.opened.details if view.opened else None).get(part, {}))


def _object(text: str | None) -> dict[str, Any]:
    parsed = json.loads(text) if text else {}
    return parsed if isinstance(parsed, dict) else {}
