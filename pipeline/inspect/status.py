"""Progress, speed, silent workers and bottleneck of a run, computed from its view and the time."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.pipeline.inspect.report import headline
from penstock.pipeline.inspect.report.figures import trainer_time
from penstock.pipeline.inspect.run_status import (
    closing,
    config_of,
    has_ended,
    info_of,
    last_reward,
    status_counts,
    status_of,
    steps_planned,
)
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import StepFacts
from penstock.pipeline.runtime.reporting.reporter import OUTSIDE
from penstock.pipeline.runtime.roles import generating_roles
from penstock.pipeline.scheduling.rules import MODES
from penstock.topics.metrics import Activity, activity_of

WATCHED = ("ledger", "metrics", "groups", "prompts", "dead-letters")
"""Topics that `status` and the live view read. Most of a run's records are in `rollouts`, which they do not read."""
SPEED_STEPS = 20
RECENT_STEPS, RECENT_S = 10, 30.0
"""The bottleneck is computed over the last `RECENT_STEPS` steps or the last `RECENT_S` seconds, whichever has more steps."""
LEAST_STEPS = 3
"""No bottleneck is named before this many steps since the start or a resumption, because the pipeline is filling."""
HELD_S = 10.0
"""A changed bottleneck is shown when it has lasted this long."""
SELDOM, MOSTLY = 0.2, 0.6
"""A role that waits for less than the first share of time seldom waits; one that works for more than the second is busy."""
SLOW_REWARD_S = 0.3
"""Reward functions that take fewer seconds per group are never reported as the bottleneck."""


class Bottleneck(NamedTuple):
    """Bottleneck of a run: a role, or "turns" if rollout and training wait for each other; the reason; and what to change."""

    who: str
    why: str
    advice: str


ADVICE = {
    "trainer": "give it more accelerators or threads, or larger micro-batches; more rollout workers gain nothing",
    "scorer": "raise scorer.workers or scorer.processes, or make the reward faster",
    "rollout": "start more rollout workers or raise rollout.concurrency",
    "feeder": "see the feeder's activity in `penstock status`",
    "turns": "overlap them with schedule.mode = pipelined and steps_per_version > 1, or a mode with max_lag > 0",
}
"""Bottleneck -> what to change; `penstock plan --from-run` estimates the effect of another split."""
OVERLAPPING = "raise rollout.slots, schedule.prompts_per_step or schedule.max_lag"
"""What to change if rollout and training already overlap and neither is busy."""


def recent_steps(view: RunView) -> list[StepFacts]:
    """Return the steps since the run, or one of its workers, was last started, which show the present speed."""
    since = max(view.worked.stops, default=0.0)
    return [view.steps[number] for number in sorted(view.steps) if view.steps[number].time_s > since]


def trainer_waiting_ratio(view: RunView, steps: Sequence[StepFacts] | None = None) -> float | None:
    """Return the share of time (0 to 1) that the trainer waited, in the last of `steps` or in the whole run; None if unknown."""
    if steps is None:
        lasted_s, waited_s = trainer_time(view)
        return waited_s / lasted_s if lasted_s else None
    if not steps:
        return None
    early = sum(step.time_s < steps[-1].time_s - RECENT_S for step in steps)
    steps = steps[max(0, min(early, len(steps) - RECENT_STEPS) - 1) :]
    begun, recent = (steps[0].time_s, steps[1:]) if len(steps) > 1 else (steps[0].metrics.get("started_at"), steps)
    lasted = view.worked.between(begun, recent[-1].time_s)
    return min(1.0, sum(step.metrics.get("wait_s", 0.0) for step in recent) / lasted) if lasted else None


def busy(view: RunView, role: str, name: str, *, whole: bool = False) -> float | None:
    """Return the mean share of time that a role's workers spent on what the metric `name` counts; None if unknown.

    The share is over the last seconds or, if `whole`, since the workers were ready.
    """
    workers = [worker for worker in view.workers.values() if worker.role == role]
    if whole:
        at_work = sum(worker.total("uptime_s") - sum(worker.total(f"time_{use}_s") for use in OUTSIDE) for worker in workers)
        return min(1.0, sum(worker.total(name) for worker in workers) / at_work) if at_work > 0 else None
    rates = [worker.rate(name) for worker in workers if not worker.ended]
    reported = [rate for rate in rates if rate is not None]
    return min(1.0, sum(reported) / len(reported)) if reported else None


def bottleneck(view: RunView, *, whole: bool = False) -> Bottleneck | None:
    """Return the bottleneck now, or of the `whole` run; None if there are too few figures.

    A trainer that seldom waits is the bottleneck. Otherwise it is the busier of scorers (by their reward functions) and rollout workers (by
    generation), if one of them is busy. If neither is, rollout and training wait for each other, unless rollout workers wait for prompts
    that the feeder could admit.
    """
    steps = None if whole else recent_steps(view)
    waiting = trainer_waiting_ratio(view, steps)
    if waiting is None or (steps is not None and (has_ended(view) or len(steps) < LEAST_STEPS)):
        return None
    if waiting < SELDOM:
        return _named("trainer", f"it waits {waiting:.0%} of its time")
    generating, scoring = (busy(view, role, name, whole=whole) for role, name in (("rollout", "generate_s"), ("scorer", "reward_busy_s")))
    if scoring is not None and scoring >= MOSTLY and scoring > (generating or 0.0) and _slow_rewards(view):
        return _named("scorer", f"busy {scoring:.0%}; the trainer waits {waiting:.0%}")
    if generating is None:
        return None
    if generating >= MOSTLY:
        return _named("rollout", f"busy {generating:.0%}; the trainer waits {waiting:.0%}")
    if waiting >= MOSTLY and not whole and _lacks_prompts(view):
        return _named("feeder", f"rollout workers wait for prompts; the trainer waits {waiting:.0%}")
    alternating = _named("turns", f"rollout works {generating:.0%}, the trainer {1 - waiting:.0%} of the time")
    return alternating._replace(advice=OVERLAPPING) if _overlap(view) else alternating


@dataclass(slots=True)
class SteadyBottleneck:
    """The bottleneck as a live view shows it: a change is shown when it has lasted for `HELD_S`."""

    shown: Bottleneck | None = None
    _other: str | None = None
    _since_s: float = 0.0

    def update(self, current: Bottleneck | None, *, now_s: float) -> Bottleneck | None:
        """Return the bottleneck to show after `current` was computed: another role is shown only once it has lasted."""
        if current is None or self.shown is None or current.who == self.shown.who:
            self.shown, self._other = current, None
        elif current.who != self._other:
            self._other, self._since_s = current.who, now_s
        elif now_s - self._since_s >= HELD_S:
            self.shown, self._other = current, None
        return self.shown


def _overlap(view: RunView) -> bool:
    """True if the schedule lets generation and training overlap, because it allows a lag above 0."""
    schedule = config_of(view).get("schedule", {})
    allowed = schedule.get("max_lag")
    return bool(MODES[schedule["mode"]].max_lag if allowed is None else allowed) if schedule.get("mode") in MODES else False


def _slow_rewards(view: RunView) -> bool:
    """True if reward functions are slow. For fast ones, most of the measured time is communication with a child process."""
    scorers = [worker for worker in view.workers.values() if worker.role == "scorer"]
    groups = sum(worker.total("groups") for worker in scorers)
    return not groups or sum(worker.total("reward_s") for worker in scorers) / groups >= SLOW_REWARD_S


def _lacks_prompts(view: RunView) -> bool:
    """True if rollout workers wait for prompts that the feeder could admit."""
    activities = {(worker.role, activity_of(worker.labels)) for worker in view.workers.values() if not worker.ended}
    feeder_works = all(role != "feeder" or activity.kind != "wait" for role, activity in activities)
    return feeder_works and any((role, Activity.NO_PROMPTS) in activities for role in generating_roles())


def _named(who: str, why: str) -> Bottleneck:
    return Bottleneck(who, why, ADVICE[who])


def elapsed_s(view: RunView, *, now_s: float) -> float | None:
    """Return the active seconds from the creation of the run to its end or now; pauses between a stop and a resumption are excluded."""
    if view.record is None:
        return None
    if view.closed is not None:  # the tracker still reports after the run is closed
        return view.worked.between(view.record.created_ns / 1e9, view.closed.time_ns / 1e9)
    return view.worked.until(0.0 if has_ended(view) else now_s)


def to_go_s(view: RunView) -> float | None:
    """Estimate the remaining seconds from the last steps, without the longest of three or more, a possible pause; None if unknown."""
    recent = [view.steps[number] for number in sorted(view.steps)[-SPEED_STEPS - 1 :]]
    planned = steps_planned(view)
    if planned is None or len(recent) < 2 or has_ended(view):
        return None
    times = sorted(later.time_s - earlier.time_s for earlier, later in itertools.pairwise(recent))
    counted = times[:-1] if len(times) > 2 else times
    return max(0.0, statistics.fmean(counted) * (planned - view.steps_done))


def silences(view: RunView, *, now_s: float) -> dict[str, float]:
    """Return worker -> seconds from its last report to `now_s`, for all workers that have not ended."""
    return {worker.worker: max(0.0, now_s - worker.time_ns / 1e9) for worker in view.workers.values() if not worker.ended}


def standstill_s(view: RunView, *, now_s: float) -> float | None:
    """Return the seconds since the last progress; None if the run has ended or has progressed within `run.stall_s`."""
    limit_s = float(config_of(view).get("run", {}).get("stall_s", math.inf))
    still_s = max(0.0, now_s - view.moved_ms / 1000)
    return still_s if still_s >= limit_s and not has_ended(view) and status_of(view) != "created" else None


def standing(view: RunView, *, now_s: float) -> dict[str, Any]:
    """Return what `penstock status --json` prints: progress, speed and bottleneck of the run, and the state of each worker."""
    counted = status_counts(view)
    slowest = bottleneck(view)
    silent = silences(view, now_s=now_s)
    last = view.steps[max(view.steps)].metrics if view.steps else {}
    return {
        "run": view.run,
        "status": status_of(view),
        "reason": closing(view).get("reason"),
        "steps_done": view.steps_done,
        "steps": info_of(view).get("steps"),
        "version": view.version,
        "reward": last_reward(view),
        "lag_mean": last.get("lag_mean"),
        "elapsed_s": elapsed_s(view, now_s=now_s),
        "to_go_s": to_go_s(view),
        "groups": dict(sorted(counted.items())),
        "dead_letters": len(view.dead_letters),
        "missing_rewards": headline.missing_rewards(view),
        "bottleneck": slowest and slowest._asdict(),
        "waste": [waste._asdict() for waste in headline.wastes(view, last=headline.RECENT_GROUPS)],
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
