"""One pass over a run's headers and small topics: the view of the run, and what the view does not keep.

The rule: records are taken in one by one and let go; what stays is bounded, or a few numbers for each step and group.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from penstock.infra.log import Log
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

Alive = Callable[[], None]
"""Called every few hundred records; whatever it raises ends the reading."""

EVERY = 200
MAX_LETTERS = 300
MAX_STATUSES = 200_000
"""The newest ones: of five workers, eleven hours."""
TIMED = ("startup_s", "load_s", "version", "eval_s")
MAX_TEXT = 500
"""Characters of a reason."""

Doing = Literal["work", "wait", "load"]
_NUMBERS = re.compile(r"\d+")
_LOADING = ("starting", "loading", "reading", "repeating")
_WAITING = ("wait", "step N:", "all prompts", "done")


class Activity(NamedTuple):
    """What a worker said it did from one of its statuses to the next."""

    worker: str
    label: str
    started_ns: int
    ended_ns: int


@dataclass(slots=True, kw_only=True)
class Story:
    """What the view does not keep of the small topics."""

    entries: list[Entry] = field(default_factory=list)
    """Steps, versions and checkpoints, without plans."""
    measured: deque[Measurement] = field(default_factory=lambda: deque(maxlen=MAX_STATUSES))
    """With the values and labels that `penstock.pipeline.observe.tables.timeline` looks at."""
    written_ns: dict[int, int] = field(default_factory=dict)
    """When the last sample of each group was written."""
    letters: list[DeadLetter] = field(default_factory=list)
    """The first `MAX_LETTERS`, without the records themselves."""
    activities: list[Activity] = field(default_factory=list)
    _last: dict[str, tuple[Measurement, str]] = field(default_factory=dict)
    _open: dict[str, Activity] = field(default_factory=dict)

    def take(self, found: object, record: Record) -> None:
        """Keep what is of use of a folded record."""
        if isinstance(found, Entry):
            if found.kind in ("step", "version", "checkpoint"):
                self.entries.append(replace(found, plan=(), boundaries=(), details=None))
        elif isinstance(found, DeadLetter):
            if len(self.letters) < MAX_LETTERS:
                self.letters.append(replace(found, value=b"", headers=(), reason=found.reason[:MAX_TEXT]))
        elif isinstance(found, Measurement):
            values = {name: found.values[name] for name in TIMED if name in found.values}
            self.measured.append(replace(found, values=values, labels={"doing": found.labels.get("doing", "")}))
            if found.kind in ("status", "final"):
                self._status(found)
        elif isinstance(found, Headers) and found.sample is not None and found.group is not None:
            self.written_ns[found.group] = max(self.written_ns.get(found.group, 0), record.timestamp_ms * 1_000_000)

    def close(self) -> None:
        """Nothing more is to come."""
        self.activities += self._open.values()
        self._open.clear()

    def _status(self, found: Measurement) -> None:
        before = self._last.get(found.worker)
        said = found.labels.get("doing") or (before[1] if before else "")
        self._last[found.worker] = found, said
        if before is None or before[0].incarnation != found.incarnation or found.time_ns <= before[0].time_ns:
            return
        last, label = before[0], generic(before[1])
        running = self._open.get(found.worker)
        if running is not None and (running.label, running.ended_ns) == (label, last.time_ns):
            self._open[found.worker] = running._replace(ended_ns=found.time_ns)
        else:
            if running is not None:
                self.activities.append(running)
            self._open[found.worker] = Activity(found.worker, label, last.time_ns, found.time_ns)


def read(log: Log, run: str, *, alive: Alive) -> tuple[RunView, Story]:
    """Fold all topics of a run but the weights up to their ends; records nobody can use are passed over."""
    view, story = RunView(run=run), Story()
    rest = [f"{run}.{topic}" for topic in TOPICS if topic not in ("weights", "dead-letters")]
    for name in (f"{run}.dead-letters", RUNS_TOPIC, *rest):  # first what has killed those who decoded it
        for record in watched(scan(log, name), alive):
            try:
                story.take(view.fold(record), record)
            except Unusable:
                continue
    story.close()
    return view, story


def watched(records: Iterable[Record], alive: Alive) -> Iterator[Record]:
    """The same records, with a call of `alive` before the first and then every few hundred."""
    for place, record in enumerate(records):
        if place % EVERY == 0:
            alive()
        yield record


def generic(doing: str) -> str:
    """What a worker does without which one it does it to.

    Example:
        generic("step 12: 3 of 8 groups are here")  # -> "step N: N of N groups are here"
    """
    return _NUMBERS.sub("N", doing) or "starting"


def kind_of(label: str) -> Doing:
    """Whether a worker that says so works, waits for others, or loads something.

    Example:
        kind_of("waiting for prompts")  # -> "wait"
    """
    if label.startswith(_WAITING) or " waits for " in label:
        return "wait"
    return "load" if label.startswith(_LOADING) else "work"
