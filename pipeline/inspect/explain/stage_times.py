"""Times of a group by stage, and what an unfinished group waits for.

Timestamps are seconds since 1970 by the clocks of the workers. A stage with an unknown end is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import Schedule
from penstock.topics.rollouts import Rollout

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimestamps:
    """Times of a group's events; None for an event that has not happened."""

    admitted: float | None = None
    begun: float | None = None
    """Start of the first sample."""
    first_ended: float | None = None
    last_ended: float | None = None
    """None until the group is complete."""
    judged: float | None = None
    """Call of its reward functions."""
    scored: float | None = None
    taken: float | None = None
    """First backward pass of its step, or the time when the group was scored if that is later."""
    committed: float | None = None
    published: float | None = None
    """Publication of the policy version that its step produced."""


STAGES: Sequence[tuple[str, str, str]] = (
    ("waited for a worker", "admitted", "begun"),
    ("drawing", "begun", "last_ended"),
    ("of it waiting for the slowest sample", "first_ended", "last_ended"),
    ("scoring", "last_ended", "scored"),
    ("waited for the scorer", "last_ended", "judged"),
    ("reward functions", "judged", "scored"),
    ("waiting for the trainer", "scored", "taken"),
    ("training", "taken", "committed"),
    ("publishing", "committed", "published"),
)
"""Name of a stage, and the timestamps at its start and end. The wait for the slowest sample starts at the first sample's end.

`scoring` is used for records without the duration of the reward functions.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Time a group spent in one stage."""

    name: str
    begins_s: float
    """Start of the stage, after the group's admission."""
    seconds: float


def timestamps_of(rollouts: Iterable[Rollout], *, complete: bool, **other_times: float | None) -> GroupTimestamps:
    """Timestamps of a group from its counted samples and its other records."""
    samples = list(rollouts)
    return GroupTimestamps(
        begun=min(sample.started_ns for sample in samples) / NS if samples else None,
        first_ended=min(sample.ended_ns for sample in samples) / NS if samples else None,
        last_ended=max(sample.ended_ns for sample in samples) / NS if samples and complete else None,
        **other_times,
    )


def stages(timestamps: GroupTimestamps) -> list[Stage]:
    """The stages whose start and end are known, in order; a negative duration is a difference between two machines' clocks."""
    zero, rows = timestamps.admitted, []
    shown = [stage for stage in STAGES if stage[0] != "scoring" or timestamps.judged is None]
    for name, first, last in shown:
        start, end = getattr(timestamps, first), getattr(timestamps, last)
        if zero is not None and start is not None and end is not None:
            rows.append(Stage(name=name, begins_s=start - zero, seconds=end - start))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """Progress of an unfinished group and of its run."""

    samples: int
    samples_requested: int
    scored: bool
    readable: bool
    """True if its prompt can be decoded."""
    min_version: int
    policy_version_min: int | None
    newest_version: int
    steps: int
    """Number of committed steps."""


def waits_for(progress: GroupProgress, schedule: Schedule) -> str:
    """The event that an unfinished group waits for, in one clause."""
    if not progress.readable:
        return "its prompt cannot be read: the scorer ends the group, or its deadline does"
    if progress.scored:
        old = rules.lag(learner_version=progress.newest_version, policy_version_min=progress.policy_version_min or 0)
        behind = f"{old} version{'' if old == 1 else 's'}"
        first = "takes the lowest numbers first" if schedule.order == "submission" else "takes what was scored first"
        return (
            f"the trainer, which {first} and has {progress.steps} steps done; the group is {behind} behind the newest, "
            f"{schedule.max_lag} are allowed"
        )
    if progress.samples >= progress.samples_requested:
        return "the scorer that owns its partition: all its samples are there"
    if progress.samples:
        return f"samples: {progress.samples} of {progress.samples_requested} are there"
    if progress.min_version > progress.newest_version:
        newest = f"the newest is {progress.newest_version}" if progress.newest_version >= 0 else "none is published"
        return f"weights: it may be drawn under version {progress.min_version} or newer, {newest}"
    return "a rollout worker: none of its samples is there"
