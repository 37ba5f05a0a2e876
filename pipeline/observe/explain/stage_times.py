"""Times of a group by stage, and what an unfinished group waits for.

Timestamps are seconds since 1970 by the clocks of the workers. A stage with an unknown end is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.schedule import Schedule
from penstock.topics.rollouts import Rollout

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimestamps:
    """When what happened to a group; None where it did not, or not yet."""

    admitted: float | None = None
    begun: float | None = None
    """The first sample's beginning."""
    first_ended: float | None = None
    last_ended: float | None = None
    """Known once the group is complete."""
    judged: float | None = None
    """When its reward functions were called."""
    scored: float | None = None
    taken: float | None = None
    """First backward pass of its step, or the time when the group was scored if that is later."""
    committed: float | None = None
    published: float | None = None
    """When the version came out that its step led to."""


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
"""Name, and the moments between which it lies; the first sample's end is when the slowest one begins to be waited for.

`scoring` is of records that do not say how long the reward functions took.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Time a group spent in one stage."""

    name: str
    begins_s: float
    """After its admission."""
    seconds: float


def timestamps_of(drawn: Iterable[Rollout], *, complete: bool, **known: float | None) -> GroupTimestamps:
    """Timestamps of a group from its counted samples and its other records."""
    samples = list(drawn)
    return GroupTimestamps(
        begun=min(sample.started_ns for sample in samples) / NS if samples else None,
        first_ended=min(sample.ended_ns for sample in samples) / NS if samples else None,
        last_ended=max(sample.ended_ns for sample in samples) / NS if samples and complete else None,
        **known,
    )


def stages(timestamps: GroupTimestamps) -> list[Stage]:
    """The stages with two known ends, in order; a negative duration is a difference between two machines' clocks."""
    zero, rows = timestamps.admitted, []
    shown = [stage for stage in STAGES if stage[0] != "scoring" or timestamps.judged is None]
    for name, first, last in shown:
        start, end = getattr(timestamps, first), getattr(timestamps, last)
        if zero is not None and start is not None and end is not None:
            rows.append(Stage(name=name, begins_s=start - zero, seconds=end - start))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """How far an unfinished group has come, and how far its run."""

    samples: int
    wanted: int
    scored: bool
    readable: bool
    """True if its prompt can be decoded."""
    min_version: int
    policy_version_min: int | None
    newest_version: int
    steps: int
    """Committed ones."""


def waits_for(progress: GroupProgress, schedule: Schedule) -> str:
    """What an unfinished group waits for, in one clause."""
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
    if progress.samples >= progress.wanted:
        return "the scorer that owns its partition: all its samples are there"
    if progress.samples:
        return f"samples: {progress.samples} of {progress.wanted} are there"
    if progress.min_version > progress.newest_version:
        newest = f"the newest is {progress.newest_version}" if progress.newest_version >= 0 else "none is published"
        return f"weights: it may be drawn under version {progress.min_version} or newer, {newest}"
    return "a rollout worker: none of its samples is there"
