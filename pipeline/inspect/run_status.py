"""Status, configuration, group statuses and reward of a run, from its view. The ledger takes precedence over the registration."""

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
    """Return `status` and `reason` from the ledger entry that closed the run; {} while the run is active."""
    return _object(view.closed.details if view.closed else None)


def status_of(view: RunView) -> str:
    """Return the run's status: created, running, finished, stopped or failed."""
    if view.closed is not None:
        return str(closing(view).get("status", "finished"))
    status = view.record.status if view.record else "created"
    since = view.record.updated_ns if view.record and status == "stopped" else 0
    # A stopped run is resumed if workers report again.
    resumed = status == "stopped" and any(worker.time_ns > since and not worker.ended for worker in view.workers.values())
    return "running" if resumed or (status == "created" and view.opened is not None) else status


def has_ended(view: RunView) -> bool:
    """True if no more records follow."""
    return status_of(view) in ENDED


def resumptions(view: RunView) -> int:
    """Return how often the whole run was resumed: the smallest number of restarts of a worker."""
    workers = [worker for worker in view.workers.values() if not worker.ended] or view.workers.values()
    return min((len(worker.incarnations) - 1 for worker in workers), default=0)


def config_of(view: RunView) -> dict[str, Any]:
    """Return the run's configuration as nested dicts; {} before the registration is read."""
    return _about(view, "config")


def reward_scale(view: RunView) -> RewardScale:
    """Return the range of the run's rewards, from the declared ranges of its functions, else from the means of its groups."""
    rewards = config_of(view).get("reward", {})
    scale = RewardScale.of(
        rewards.get("functions") or (), rewards.get("weights"), by_source=config_of(view).get("data", {}).get("rewards") or ()
    )
    scale.see(facts.reward_mean for facts in view.groups.values() if facts.reward_mean is not None)
    return scale


def end_reason(reason: str | None) -> str | None:
    """Return the reason for which a run ended early; None if it ended because all steps are done."""
    return None if reason == ALL_DONE else reason


def info_of(view: RunView) -> dict[str, Any]:
    """Return the facts determined when the run was created, such as rows, steps and digests; {} before the registration is read."""
    return _about(view, "info")


def steps_planned(view: RunView) -> int | None:
    return info_of(view).get("steps")


def steps_per_version(view: RunView) -> int:
    """Return the number of optimizer steps per published policy version; 1 if the configuration is unknown."""
    return int(config_of(view).get("schedule", {}).get("steps_per_version") or 1)


def last_reward(view: RunView) -> float | None:
    """Return the mean reward of samples generated under versions of the last tenth of the steps, or of the newest scored version."""
    versions, steps, per_version = sorted(view.rewards), view.steps_done, steps_per_version(view)
    late = [version for version in versions if (version + 1) * per_version > steps - tenth(steps)] or versions[-1:]
    return together(view.rewards[version] for version in late).mean


def tenth(steps: int) -> int:
    """Return the number of steps over which the first and last reward are averaged, a tenth rounded up: `tenth(41)` is 5."""
    return math.ceil(steps / 10)


def group_statuses(view: RunView) -> dict[int, str]:
    """Return group -> status, for every admitted or trained group that the view still has."""
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
    """Return final status, or `open` -> number of groups, also of those that the view has dropped."""
    return Counter(group_statuses(view).values()) + view.past.statuses


def _about(view: RunView, part: str) -> dict[str, Any]:
    """Return `config` or `info` from the registration, else from the first ledger entry; {} before either is read."""
    if view.record is not None:
        return _object(view.record.config if part == "config" else view.record.info)
    return dict(_object(view.opened.details if view.opened else None).get(part, {}))


def _object(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; {} for None or another value."""
    parsed = json.loads(text) if text else {}
    return parsed if isinstance(parsed, dict) else {}
