"""Timeline of a run as columns for the page; times are whole ticks since the run was created."""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from penstock.pipeline.inspect.run_view import Folded
from penstock.pipeline.inspect.tables.timeline import Ended, Facts, Interval, intervals
from penstock.pipeline.inspect.web.chunks import Column
from penstock.pipeline.inspect.web.groups import Row
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity, Measurement, activity_of
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

MAX_DEAD_LETTERS = 300
MAX_STATUSES = 200_000
"""The newest ones; eleven hours of five workers."""
TIMED = ("startup_s", "load_s", "version", "eval_s")
LABELS = ("doing", "activity")
MAX_TEXT = 500

_NUMBERS = re.compile(r"\d+")


class ActivitySpan(NamedTuple):
    """Time in which all statuses of a worker have the same activity and text."""

    worker: str
    activity: Activity
    label: str
    """The text, with N for each number."""
    started_ns: int
    ended_ns: int


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """Facts that a `RunView` does not hold, collected while records are folded into it."""

    entries: list[Entry] = field(default_factory=list)
    """Steps, versions and checkpoints, without plans."""
    measured: deque[Measurement] = field(default_factory=lambda: deque(maxlen=MAX_STATUSES))
    """With the values and labels that `penstock.pipeline.inspect.tables.timeline` reads."""
    written_ns: dict[int, int] = field(default_factory=dict)
    """Time of the last sample of each group."""
    dead_letters: list[DeadLetter] = field(default_factory=list)
    """The first `MAX_DEAD_LETTERS`, without the records themselves."""
    activities: list[ActivitySpan] = field(default_factory=list)
    _last: dict[str, tuple[Measurement, Activity, str]] = field(default_factory=dict)
    _open: dict[str, ActivitySpan] = field(default_factory=dict)

    def apply(self, folded: Folded | None, record: Record) -> None:
        """Add the facts that a page shows of a record; `folded` is what `RunView.fold` returned for it."""
        match folded:
            case Entry(kind="step" | "version" | "checkpoint"):
                self.entries.append(replace(folded, plan=(), boundaries=(), details=None))
            case DeadLetter() if len(self.dead_letters) < MAX_DEAD_LETTERS:
                self.dead_letters.append(replace(folded, value=b"", headers=(), reason=folded.reason[:MAX_TEXT]))
            case Measurement():
                values = {name: folded.values[name] for name in TIMED if name in folded.values}
                labels = {name: folded.labels[name] for name in LABELS if name in folded.labels}
                self.measured.append(replace(folded, values=values, labels=labels))
                if folded.kind in ("status", "final"):
                    self._status(folded)
            case Headers(group=int(group)) if record.topic.endswith(".rollouts"):
                self.written_ns[group] = max(self.written_ns.get(group, 0), record.timestamp_ms * 1_000_000)

    def finish(self, *, live: bool) -> None:
        """End the activities in progress: no more records follow. Workers of a live run that load or compute do so until now."""
        newest_ns = max((status.time_ns for status, _, _ in self._last.values()), default=0)
        for status, activity, _ in [*self._last.values()] if live else ():
            if status.kind != "final" and not activity.reports:
                self._status(replace(status, time_ns=newest_ns))
        self.activities += self._open.values()
        self._open.clear()

    def _status(self, status: Measurement) -> None:
        """Count the time since a worker's previous status as that status's activity: in the span in progress, or in a new one."""
        previous = self._last.get(status.worker)
        doing = status.labels.get("doing") or (previous[2] if previous else "")
        self._last[status.worker] = status, activity_of(status.labels), doing
        if previous is None or previous[0].incarnation != status.incarnation or status.time_ns <= previous[0].time_ns:
            return
        previous_status, activity, label = previous[0], previous[1], generic(previous[2])
        open_span = self._open.get(status.worker)
        continued = activity, label, previous_status.time_ns
        if open_span is not None and (open_span.activity, open_span.label, open_span.ended_ns) == continued:
            self._open[status.worker] = open_span._replace(ended_ns=status.time_ns)
        else:
            if open_span is not None:
                self.activities.append(open_span)
            self._open[status.worker] = ActivitySpan(status.worker, activity, label, previous_status.time_ns, status.time_ns)


def generic(doing: str) -> str:
    """Return a worker's activity with every number as N, so that its repetitions have one text: "step N: N of N groups are here"."""
    return _NUMBERS.sub("N", doing) or "starting"


KINDS = ("rollout", "score", "train", "wait", "publish", "load", "checkpoint", "eval", "start")
TICKS_MS = (0.1, 1.0, 10.0, 100.0)
NEVER = -(1 << 31) + 1
MAX_INTERVALS = 60_000
"""Largest number of intervals in a page, the newest ones; the same for activities."""


class Clock(NamedTuple):
    """Converts moments to whole numbers of ticks."""

    zero_ns: int
    tick_ms: float

    @classmethod
    def of(cls, *, zero_ns: int, last_ns: int) -> "Clock":
        """Return the clock with the finest tick in which the time to `last_ns` fits into 31 bits: 0.1 ms for an hour."""
        span_ms = (last_ns - zero_ns) / 1e6
        return cls(zero_ns, next((tick for tick in TICKS_MS if span_ms / tick < 1 << 30), TICKS_MS[-1]))

    def ticks(self, moments_ns: Any) -> Column:
        """Convert moments [N] in nanoseconds to ticks, int32; `NEVER` for an unknown one (0)."""
        moments = np.asarray(moments_ns, np.int64)
        since = np.clip(np.rint((moments - self.zero_ns) / (self.tick_ms * 1e6)), NEVER + 1, (1 << 31) - 1)
        return np.where(moments == 0, NEVER, since).astype(np.int32)


def timeline(rows: Iterable[Row], history: RunHistory) -> list[Interval]:
    """Return the intervals of work and waiting of all workers, with those of the listed groups and their samples."""
    facts = Facts(entries=history.entries)
    for row in rows:
        if row.scorer:
            facts.ended[row.group] = Ended(row.scorer, row.scored_ns, row.reward_ns)
        for sample in row.rollouts:
            written_ns = history.written_ns.get(row.group, sample.ended_ns)
            facts.samples[row.group, sample.sample] = sample._replace(written_ns=written_ns)
    for measured in history.measured:
        facts.add_measurement(measured)
    return list(intervals(facts))


def interval_columns(spans: Iterable[Interval], *, workers: Mapping[str, int], clock: Clock) -> tuple[list[str], dict[str, Column]]:
    """Return the causes of waiting, and the newest intervals as columns [N] by start: worker and cause by index, times in ticks.

    Generation and scoring have columns of their own.
    """
    other_spans = sorted((span for span in spans if span.what not in ("rollout", "score")), key=lambda span: span.started)[-MAX_INTERVALS:]
    causes = ["", *sorted({span.cause for span in other_spans if span.cause})]
    number = {cause: index for index, cause in enumerate(causes)}
    return causes, {
        "i_kind": np.array([KINDS.index(span.what) for span in other_spans], np.uint8),
        "i_worker": np.array([workers[span.worker] for span in other_spans], np.uint16),
        "i_start": clock.ticks([span.started for span in other_spans]),
        "i_end": clock.ticks([span.ended for span in other_spans]),
        "i_step": np.array([-1 if span.step is None else span.step for span in other_spans], np.int32),
        "i_version": np.array([-1 if span.version is None else span.version for span in other_spans], np.int32),
        "i_cause": np.array([number[span.cause or ""] for span in other_spans], np.uint16),
    }


def scoring_columns(rows: Sequence[Row], spans: Iterable[Interval], *, clock: Clock) -> dict[str, Column]:
    """Return start and end of the scoring of each group as columns [G] in ticks."""
    scoring = {span.group: (span.started, span.ended) for span in spans if span.what == "score"}
    return {
        "g_scoring": clock.ticks([scoring.get(row.group, (0, 0))[0] for row in rows]),
        "g_scored": clock.ticks([row.scored_ns for row in rows]),
    }


def activity_columns(history: RunHistory, *, workers: Mapping[str, int], clock: Clock) -> tuple[list[tuple[str, str]], dict[str, Column]]:
    """Return (text, kind) of each activity, and the newest spans of all workers as columns [N] by start: activity by index."""
    activities = sorted(history.activities, key=lambda span: span.started_ns)[-MAX_INTERVALS:]
    labels = sorted({(span.label, span.activity.kind) for span in activities})
    number = {label: index for index, label in enumerate(labels)}
    columns = {
        "a_worker": np.array([workers[span.worker] for span in activities], np.uint16),
        "a_label": np.array([number[span.label, span.activity.kind] for span in activities], np.uint16),
        "a_start": clock.ticks([span.started_ns for span in activities]),
        "a_end": clock.ticks([span.ended_ns for span in activities]),
    }
    return list(labels), columns
