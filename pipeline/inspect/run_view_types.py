"""Parts of a run view: groups, steps, workers, tallies and working time."""

import functools
import itertools
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics.groups import lacks_rewards
from penstock.topics.metrics import Measurement

PAUSE_S = 60.0
"""If no worker has reported for longer than this, the run is paused. Workers report every second, though not during long computations."""
SILENCE_S = 2.0
"""Reports that are at most this far apart form one span. A stop that is read later can only be in a longer gap."""
RATE_WINDOW = 30
"""Number of recent statuses of a worker, one per second, from which its rates are computed."""


class GroupFacts(NamedTuple):
    """A group's outcome according to its headers: counts of samples and completion tokens, mean reward, oldest policy version."""

    outcome: str
    samples: int
    tokens: int
    reward_mean: float | None
    version_min: int | None
    no_reward: int = 0

    @property
    def lacks_rewards(self) -> bool:
        """True if fewer than two samples have a reward because others lack one."""
        return lacks_rewards(self.samples, self.no_reward)


class Opened(NamedTuple):
    """A group that was admitted and has no outcome yet."""

    partition: int
    time_s: float


class Tally(NamedTuple):
    """Scored samples, and the sum of their rewards."""

    samples: int = 0
    total: float = 0.0

    def plus(self, other: "Tally") -> "Tally":
        return Tally(self.samples + other.samples, self.total + other.total)

    @property
    def mean(self) -> float | None:
        """Mean reward; None without samples. Rounded, so that it does not depend on the order in which groups were read."""
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
    """What a run view counts of the finished steps, versions and groups that it has dropped from memory."""

    steps: int = 0
    versions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcome -> number of groups that are no longer stored."""
    groups: IdSet = field(default_factory=IdSet)
    statuses: Counter[str] = field(default_factory=Counter)
    """Final status -> number of groups, some of which are still stored."""
    settled: IdSet = field(default_factory=IdSet)
    below: int = 0
    """First group whose final status may be unknown."""
    counted_steps: int = 0
    """First step whose groups are not counted in `statuses`."""

    def settle(self, group: int, status: str) -> None:
        """Count the final status of a group, unless it is counted already."""
        if group in self.settled:
            return
        self.settled.add(group)
        self.statuses[status] += 1
        while self.below in self.settled:
            self.below += 1


@dataclass(slots=True, kw_only=True)
class WorkerView:
    """State of one worker according to its measurements. A restarted worker has the same name and a new incarnation."""

    worker: str
    role: str
    incarnation: str = ""
    time_ns: int = 0
    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    since_ns: int = 0
    """Time of the first report of the current activity. Texts are compared up to the first comma: all micro-batches of a step are one."""
    ended: bool = False
    incarnations: dict[str, dict[str, float]] = field(default_factory=dict)
    recent: deque[tuple[int, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))

    def add(self, measurement: Measurement) -> None:
        """Apply a measurement; one of an earlier process (incarnation) of this worker changes only the totals.

        The newest process is the one whose first report is last in the log: clocks of two machines cannot be compared.
        """
        known_incarnation = measurement.incarnation in self.incarnations
        self.incarnations.setdefault(measurement.incarnation, {}).update(measurement.values)
        if measurement.incarnation != self.incarnation:
            if known_incarnation:
                return
            self.incarnation, self.ended = measurement.incarnation, False
            self.labels = {}  # labels describe one incarnation
            self.recent.clear()
        if _activity(measurement.labels) != _activity(self.labels) and "doing" in measurement.labels:
            self.since_ns = measurement.time_ns
        self.time_ns, self.values = measurement.time_ns, self.incarnations[measurement.incarnation]
        self.labels = {**self.labels, **measurement.labels}
        self.ended = self.ended or measurement.kind == "final"
        if measurement.kind == "status":
            self.recent.append((measurement.time_ns, measurement.values))

    def total(self, name: str) -> float:
        """Return a cumulative value summed over all processes of this worker; 0.0 if none reported it."""
        return sum(values.get(name, 0.0) for values in self.incarnations.values())

    def rate(self, name: str) -> float | None:
        """Return the rate per second of a cumulative value over the last statuses; None if there are fewer than two."""
        having = [(time_ns, values[name]) for time_ns, values in self.recent if name in values]
        if self.ended or len(having) < 2 or having[-1][0] <= having[0][0]:
            return None
        return (having[-1][1] - having[0][1]) / (having[-1][0] - having[0][0]) * 1e9


def _activity(labels: Mapping[str, str]) -> str:
    return labels.get("doing", "").partition(",")[0]


@dataclass(slots=True)
class WorkingTime:
    """The periods in which a run was active, computed from the times of its workers' reports, so that pauses are not counted.

    Times are Unix seconds, in any order. Between two reports at most `PAUSE_S` apart the run was active, unless it was stopped between
    them or the later one is the first report of a restarted worker.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    """(first, last) report of each period without a gap of more than `SILENCE_S`, in order."""
    stops: list[float] = field(default_factory=list)

    def add(self, moment_s: float) -> None:
        """Add the time of a report."""
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
        """Add the time at which the run was stopped: the gap after it is a pause, however short."""
        if moment_s not in self.stops:
            insort(self.stops, moment_s)

    def between(self, first_s: float | None, last_s: float | None) -> float | None:
        """Return the active seconds between two times; None if either is None."""
        if first_s is None or last_s is None:
            return None
        return sum(max(0.0, min(high, last_s) - max(low, first_s)) for low, high in self._active_periods())

    def until(self, now_s: float) -> float:
        """Return all active seconds, including the time from the last report to `now_s` if that is short enough."""
        last = self.spans[-1][1] if self.spans else now_s
        more = now_s - last if now_s > last and self._active_between(last, now_s) else 0.0
        return sum(high - low for low, high in self._active_periods()) + more

    def pauses(self) -> list[tuple[float, float]]:
        """Return (start, end) of each time between two active periods, in which the run was stopped."""
        return [(before[1], after[0]) for before, after in itertools.pairwise(self._active_periods())]

    def _active_periods(self) -> list[tuple[float, float]]:
        """Return (start, end) of each period in which the run was active, in order: the spans, joined across short gaps."""
        joined: list[tuple[float, float]] = []
        for low, high in self.spans:
            if joined and self._active_between(joined[-1][1], low):
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        return joined

    def _active_between(self, last_s: float, next_s: float) -> bool:
        """True if the run was active between two consecutive reports."""
        stop = bisect_left(self.stops, last_s)
        return next_s - last_s <= PAUSE_S and not (stop < len(self.stops) and self.stops[stop] < next_s)


def together(tallies: Iterable[Tally]) -> Tally:
    """Return the sum of tallies."""
    return functools.reduce(Tally.plus, tallies, Tally())
