"""History of a run that a `RunView` does not hold: activities of workers, steps and versions over time, dead letters; bounded."""

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.pipeline.inspect.run_view import Folded
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
"""Characters of a reason."""

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
        """Add the facts of a folded record that a page shows."""
        match folded:
            case Entry(kind="step" | "version" | "checkpoint"):
                self.entries.append(replace(folded, plan=(), boundaries=(), details=None))
            case DeadLetter() if len(self.dead_letters) < MAX_DEAD_LETTERS:
                self.dead_letters.append(replace(folded, value=b"", headers=(), reason=folded.reason[:MAX_TEXT]))
            case Measurement():
                values = {name: folded.values[name] for name in TIMED if name in folded.values}
                self.measured.append(
                    replace(folded, values=values, labels={name: folded.labels[name] for name in LABELS if name in folded.labels})
                )
                if folded.kind in ("status", "final"):
                    self._status(folded)
            case Headers(group=int(group)) if record.topic.endswith(".rollouts"):
                self.written_ns[group] = max(self.written_ns.get(group, 0), record.timestamp_ms * 1_000_000)

    def finish(self) -> None:
        """End the activities in progress: no more records follow."""
        self.activities += self._open.values()
        self._open.clear()

    def _status(self, status: Measurement) -> None:
        previous = self._last.get(status.worker)
        doing = status.labels.get("doing") or (previous[2] if previous else "")
        self._last[status.worker] = status, activity_of(status.labels), doing
        if previous is None or previous[0].incarnation != status.incarnation or status.time_ns <= previous[0].time_ns:
            return
        previous_status, activity, label = previous[0], previous[1], generic(previous[2])
        open_span = self._open.get(status.worker)
        if open_span is not None and (open_span.activity, open_span.label, open_span.ended_ns) == (
            activity,
            label,
            previous_status.time_ns,
        ):
            self._open[status.worker] = open_span._replace(ended_ns=status.time_ns)
        else:
            if open_span is not None:
                self.activities.append(open_span)
            self._open[status.worker] = ActivitySpan(status.worker, activity, label, previous_status.time_ns, status.time_ns)


def generic(doing: str) -> str:
    """A worker's activity with every number as N, so that its repetitions have one text.

    Example:
        generic("step 12: 3 of 8 groups are here")  # -> "step N: N of N groups are here"
    """
    return _NUMBERS.sub("N", doing) or "starting"
