"""Where a group's time went, stage by stage, and what it waits for while it is under way.

The rule: pure; moments are seconds since 1970 by the clocks of the workers that noted them; a stage whose ends are not both known is
left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.schedule import Schedule
from penstock.topics.rollouts import Rollout

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
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
    """When the step it was trained in began its first backward pass, or the group was scored, whichever came later."""
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
    """A stretch of a group's life."""

    name: str
    begins_s: float
    """After its admission."""
    seconds: float


def moments_of(drawn: Iterable[Rollout], *, complete: bool, **known: float | None) -> Moments:
    """The moments of a group from its samples that count and from what else is known."""
    samples = list(drawn)
    return Moments(
        begun=min(sample.started_ns for sample in samples) / NS if samples else None,
        first_ended=min(sample.ended_ns for sample in samples) / NS if samples else None,
        last_ended=max(sample.ended_ns for sample in samples) / NS if samples and complete else None,
        **known,
    )


def stages(moments: Moments) -> list[Stage]:
    """The stages whose ends are both known, in order; a negative one is a difference between two machines' clocks."""
    zero, rows = moments.admitted, []
    known = [stage for stage in STAGES if stage[0] != "scoring" or moments.judged is None]
    for name, first, last in known:
        begins, ends = getattr(moments, first), getattr(moments, last)
        if zero is not None and begins is not None and ends is not None:
            rows.append(Stage(name=name, begins_s=begins - zero, seconds=ends - begins))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a group has come that has no fate yet, and how far its run."""

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


def waits_for(standing: Standing, schedule: Schedule) -> str:
    """What a group without a fate waits for, in one clause."""
    if not standing.readable:
        return "its prompt cannot be read: the scorer ends the group, or its deadline does"
    if standing.scored:
        old = rules.lag(learner_version=standing.newest_version, policy_version_min=standing.policy_version_min or 0)
        behind = f"{old} version{'' if old == 1 else 's'}"
        first = "takes the lowest numbers first" if schedule.order == "submission" else "takes what was scored first"
        return (
            f"the trainer, which {first} and has {standing.steps} steps done; the group is {behind} behind the newest, "
            f"{schedule.max_lag} are allowed"
        )
    if standing.samples >= standing.wanted:
        return "the scorer that owns its partition: all its samples are there"
    if standing.samples:
        return f"samples: {standing.samples} of {standing.wanted} are there"
    if standing.min_version > standing.newest_version:
        newest = f"the newest is {standing.newest_version}" if standing.newest_version >= 0 else "none is published"
        return f"weights: it may be drawn under version {standing.min_version} or newer, {newest}"
    return "a rollout worker: none of its samples is there"
