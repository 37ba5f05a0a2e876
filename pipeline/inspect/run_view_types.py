"""Parts of a run view: groups, steps, workers, tallies and working time."""

import functools
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics.groups import lacks_rewards
from penstock.topics.metrics import Measurement

PAUSE_S = 60.0
"""Workers report each second, and in long computations somebody still does: a longer silence of all is a pause."""
SILENCE_S = 5.0
"""Signs of life no farther apart than this form one span: a stop that is read later can only be in a longer silence."""
RATE_WINDOW = 30
"""Statuses of a worker, one a second, from which its rates are computed."""


class GroupFacts(NamedTuple):
    """Facts from the headers of a group's outcome."""

    outcome: str
    samples: int
    tokens: int
    reward_mean: float | None
    version_min: int | None
    no_reward: int = 0

    @property
    def lacks_rewards(self) -> bool:
        """True if samples without a reward leave fewer than two that have one."""
        return lacks_rewards(self.samples, self.no_reward)


class Opened(NamedTuple):
    """A group with a prompt and no outcome yet."""

    partition: int
    time_s: float


class Tally(NamedTuple):
    """Scored samples, and the sum of their rewards."""

    samples: int = 0
    total: float = 0.0

    def plus(self, other: "Tally") -> "Tally":
        """Both together."""
        return Tally(self.samples + other.samples, self.total + other.total)

    @property
    def mean(self) -> float | None:
        """Mean reward, None without samples; rounded, so that it does not depend on the order in which groups were read."""
        return round(self.total / self.samples, 12) if self.samples else None


class StepFacts(NamedTuple):
    """A committed optimizer step, without the offsets of its groups."""

    step: int
    version: int
    time_s: float
    groups: tuple[int, ...]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Ended:
    """Counts of what a view no longer stores."""

    steps: int = 0
    versions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the groups that are not held any more."""
    groups: IdSet = field(default_factory=IdSet)
    """Those groups."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Of the settled groups, of which some are still held."""
    settled: IdSet = field(default_factory=IdSet)
    below: int = 0
    """Every group with a lower number is settled."""
    counted_steps: int = 0
    """The groups of the steps before this one are settled."""

    def settle(self, group: int, status: str) -> None:
        """Count a group's status, once."""
        if group in self.settled:
            return
        self.settled.add(group)
        self.statuses[status] += 1
        while self.below in self.settled:
            self.below += 1


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """One worker as its measurements describe it; a restarted one keeps its name and gets a new incarnation."""

    worker: str
    role: str
    incarnation: str = ""
    time_ns: int = 0
    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    since_ns: int = 0
    """First report of the current activity, compared up to the first comma: a step is one activity, its micro-batches are not."""
    ended: bool = False
    incarnations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Last cumulative values of each incarnation."""
    recent: deque[tuple[int, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))

    def add(self, measurement: Measurement) -> None:
        """Fold a measurement; one of an earlier incarnation counts for the totals only.

        The order in the log determines the newest: a worker restarted on another machine has another clock.
        """
        known_incarnation = measurement.incarnation in self.incarnations
        self.incarnations.setdefault(measurement.incarnation, {}).update(measurement.values)
        if measurement.incarnation != self.incarnation:
            if known_incarnation:
                return
            self.incarnation, self.ended = measurement.incarnation, False
            self.labels = {}  # labels of the previous incarnation do not apply
            self.recent.clear()
        if _activity(measurement.labels) != _activity(self.labels) and "doing" in measurement.labels:
            self.since_ns = measurement.time_ns
        self.time_ns, self.values = measurement.time_ns, self.incarnations[measurement.incarnation]
        self.labels = {**self.labels, **measurement.labels}
        self.ended = self.ended or measurement.kind == "final"
        if measurement.kind == "status":
            self.recent.append((measurement.time_ns, measurement.values))

    def total(self, name: str) -> float:
        """A cumulative value over all incarnations."""
        return sum(values.get(name, 0.0) for values in self.incarnations.values())

    def rate(self, name: str) -> float | None:
        """A cumulative value per second over the last few statuses, None before there are two."""
        having = [(time_ns, values[name]) for time_ns, values in self.recent if name in values]
        if self.ended or len(having) < 2 or having[-1][0] <= having[0][0]:
            return None
        return (having[-1][1] - having[0][1]) / (having[-1][0] - having[0][0]) * 1e9


def _activity(labels: Mapping[str, str]) -> str:
    return labels.get("doing", "").partition(",")[0]


@dataclass(slots=True)
class WorkingTime:
    """The stretches in which a run was worked on, so that no clock counts a pause.

    Made of signs of life, in seconds since 1970 and in any order: between two of them at most `PAUSE_S` apart there was work, unless
    the run was stopped between them, or the later one is the first of a restarted worker.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    """First and last moment of each stretch without a silence of more than `SILENCE_S`, in order."""
    stops: list[float] = field(default_factory=list)

    def add(self, moment_s: float) -> None:
        """Add a sign of life."""
        index = bisect_right(self.spans, (moment_s, float("inf")))
        if index and moment_s <= self.spans[index - 1][1]:
            return
        low = high = moment_s
        if index < len(self.spans) and self.spans[index][0] - moment_s <= SILENCE_S:
            high = self.spans.pop(index)[1]
        if index and moment_s - self.spans[index - 1][1] <= SILENCE_S:
            low = self.spans.pop(index - 1)[0]
        insort(self.spans, (low, high))

    def stop(self, moment_s: float) -> None:
        """Add a stop of the run: the silence after it is a pause, however short."""
        if moment_s not in self.stops:
            insort(self.stops, moment_s)

    def begin_again(self, moment_s: float) -> None:
        """Add the first sign of a restarted worker: a silence that it ends is a pause, as after a killed launcher."""
        self.stop(moment_s - 1e-3)

    def between(self, first_s: float | None, last_s: float | None) -> float | None:
        """Seconds of work from one moment to another; None if a moment is None."""
        if first_s is None or last_s is None:
            return None
        return sum(max(0.0, min(high, last_s) - max(low, first_s)) for low, high in self._stretches())

    def until(self, now_s: float) -> float:
        """All seconds of work; up to `now_s`, if that is so soon after the last sign of life that there may still be some."""
        last = self.spans[-1][1] if self.spans else now_s
        more = now_s - last if now_s > last and self._went_on(last, now_s) else 0.0
        return sum(high - low for low, high in self._stretches()) + more

    def _stretches(self) -> list[tuple[float, float]]:
        """The spans, as one where there was work between them."""
        joined: list[tuple[float, float]] = []
        for low, high in self.spans:
            if joined and self._went_on(joined[-1][1], low):
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        return joined

    def _went_on(self, last_s: float, next_s: float) -> bool:
        """True if there was work between one sign of life and the next."""
        stop = bisect_left(self.stops, last_s)
        return next_s - last_s <= PAUSE_S and not (stop < len(self.stops) and self.stops[stop] < next_s)


def together(tallies: Iterable[Tally]) -> Tally:
    """Their sum."""
    return functools.reduce(Tally.plus, tallies, Tally())
