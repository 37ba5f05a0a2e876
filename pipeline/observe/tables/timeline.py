"""What every worker was doing when: one row per interval of work or waiting, from the log alone.

The rule: an interval begins and ends where a record says so; `load`, of which workers report only how long they took, ends with the
first sample of the version or with the status that reports it, and a worker waits where none of its work is under way.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from penstock.infra.log import Log
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups, ledger, metrics, rollouts
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

_TIME = pa.timestamp("ns", tz="UTC")
TIMELINE = pa.schema(
    [
        ("role", pa.string()),
        ("worker", pa.string()),
        ("what", pa.string()),
        ("started", _TIME),
        ("ended", _TIME),
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("cause", pa.string()),
    ]
)
WHATS = ("start", "rollout", "score", "train", "wait", "publish", "load", "checkpoint", "eval")
"""What a worker does in an interval; `cause` says of `wait` for what, as far as the worker has said it."""
SHORTEST_WAIT_NS = 1_000_000
TRAINER = "trainer"


class Interval(NamedTuple):
    """One row; nanoseconds since 1970."""

    role: str
    worker: str
    what: str
    started: int
    ended: int
    group: int | None = None
    sample: int | None = None
    step: int | None = None
    version: int | None = None
    cause: str | None = None


class Drawn(NamedTuple):
    """When a sample was drawn, and when it was written."""

    group: int
    sample: int
    worker: str
    version: int
    started_ns: int
    ended_ns: int
    written_ns: int


class Ended(NamedTuple):
    """When the outcome of a group was known."""

    group: int
    worker: str
    scored_ns: int


@dataclass(slots=True)
class Facts:
    """What the intervals follow from, each told once."""

    drawn: dict[tuple[int, int], Drawn] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    measured: dict[tuple[str, str], dict[int, Measurement]] = field(default_factory=dict)
    """By worker and incarnation, by number."""


def timeline(log: Log, run: str) -> pa.Table:
    """`TIMELINE`: every interval the run's topics tell of, by role, worker and time; complete up to the ends the topics have now."""
    facts = Facts()
    readers = (("metrics", _measurement), ("ledger", _entry), ("groups", _outcome), ("rollouts", _sample))
    for topic, read in readers:  # from the effect to the cause: what a record refers to is there as well
        for record in scan(log, f"{run}.{topic}"):
            try:
                read(facts, record, run)
            except Unusable:
                continue
    return as_table(intervals(facts))


def as_table(found: Iterable[Interval]) -> pa.Table:
    """Intervals as `TIMELINE`, by role, worker and time."""
    rows = sorted(found, key=lambda one: (one.role, one.worker, one.started, one.ended, one.what))
    columns = list(zip(*rows, strict=True)) or [()] * len(TIMELINE)
    return pa.table([pa.array(list(column), kind.type) for column, kind in zip(columns, TIMELINE, strict=True)], schema=TIMELINE)


def intervals(facts: Facts) -> Iterator[Interval]:
    """All intervals of a run, in no order."""
    roles = {worker: next(iter(found.values())).role for (worker, _), found in facts.measured.items()}
    by_worker: dict[str, list[Interval]] = {}
    work = [*_draws(facts, roles), *_scores(facts, roles), *_trainer(facts, roles), *_measured(facts)]
    for one in work:
        by_worker.setdefault(one.worker, []).append(one)
    yield from work
    for (worker, _), found in facts.measured.items():
        if roles[worker] in ("rollout", "scorer"):
            yield from _waits(worker, roles[worker], _in_order(found), by_worker.get(worker, []))


def _draws(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    for one in facts.drawn.values():
        role = roles.get(one.worker, "rollout")
        yield Interval(role, one.worker, "rollout", one.started_ns, one.ended_ns, one.group, one.sample, version=one.version)


def _scores(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    """From the last of a group's samples to be written to its outcome."""
    written: dict[int, int] = {}
    for one in facts.drawn.values():
        outcome = facts.ended.get(one.group)
        if outcome is not None and one.written_ns <= outcome.scored_ns:
            written[one.group] = max(written.get(one.group, 0), one.written_ns)
    for group, outcome in facts.ended.items():
        began = written.get(group, outcome.scored_ns)
        yield Interval(roles.get(outcome.worker, "scorer"), outcome.worker, "score", began, outcome.scored_ns, group)


def _trainer(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    """A step waits from its begin to its first backward pass, and trains from there until it is committed."""
    worker = next((name for name, role in roles.items() if role == TRAINER), TRAINER)
    for entry in facts.entries:
        end, told = entry.time_ns, entry.metrics
        if entry.kind == "step":
            backward = _ns(told.get("first_backward_at")) or end - _ns(told.get("compute_s", 0.0))
            began = min(_ns(told.get("started_at")) or backward - _ns(told.get("wait_s", 0.0)), backward)
            yield Interval(TRAINER, worker, "wait", began, backward, step=entry.step, version=entry.version, cause="groups")
            yield Interval(TRAINER, worker, "train", backward, end, step=entry.step, version=entry.version)
        elif entry.kind in ("version", "checkpoint"):
            took = _ns(told.get("publish_s" if entry.kind == "version" else "write_s", 0.0))
            what = "publish" if entry.kind == "version" else "checkpoint"
            yield Interval(TRAINER, worker, what, end - took, end, step=entry.step, version=entry.version)


def _measured(facts: Facts) -> Iterator[Interval]:
    """What only measurements tell: starts, evaluations, and the loading of versions."""
    begun: dict[tuple[str, int], int] = {}
    for drawn in facts.drawn.values():
        key = (drawn.worker, drawn.version)
        begun[key] = min(begun.get(key, drawn.started_ns), drawn.started_ns)
    for found in facts.measured.values():
        loaded, started = 0.0, False
        for one in _in_order(found):
            startup = one.values.get("startup_s")
            if startup is not None and not started:
                started = True
                yield Interval(one.role, one.worker, "start", one.time_ns - _ns(startup), one.time_ns)
            if one.kind == "eval":
                took = _ns(one.values.get("eval_s", 0.0))
                yield Interval(one.role, one.worker, "eval", one.time_ns - took, one.time_ns, version=one.version)
            took_s = one.values.get("load_s", loaded) - loaded
            if took_s > 0.0 and "version" in one.values:
                version, loaded = int(one.values["version"]), loaded + took_s
                ended = min(begun.get((one.worker, version), one.time_ns), one.time_ns)
                yield Interval(one.role, one.worker, "load", ended - _ns(took_s), ended, version=version)


def _waits(worker: str, role: str, told: Sequence[Measurement], work: Sequence[Interval]) -> Iterator[Interval]:
    """What one process of a worker left between its work, from when it was ready to its last word."""
    ready = next((one.time_ns for one in told if "startup_s" in one.values), None)
    if ready is None:
        return
    last, times = told[-1].time_ns, [one.time_ns for one in told]
    busy_until = ready
    for started, ended in [*sorted((one.started, one.ended) for one in work if one.ended > ready and one.started < last), (last, last)]:
        if started - busy_until >= SHORTEST_WAIT_NS:
            yield Interval(role, worker, "wait", busy_until, started, cause=_cause(told, times, busy_until, started))
        busy_until = max(busy_until, ended)


def _cause(told: Sequence[Measurement], times: Sequence[int], started: int, ended: int) -> str | None:
    """What the worker said it waited for, in the last status within the interval."""
    said = told[: bisect_right(times, ended)][bisect_right(times, started) :]
    causes = [doing.removeprefix("waiting for ") for one in said if (doing := one.labels.get("doing", "")).startswith("waiting for ")]
    return causes[-1] if causes else None


def _sample(facts: Facts, record: Record, run: str) -> None:
    found = rollouts.read(record, run=run)[1]
    drawn = Drawn(
        found.group, found.sample, found.worker, found.version_min, found.started_ns, found.ended_ns, record.timestamp_ms * 1_000_000
    )
    facts.drawn.setdefault((found.group, found.sample), drawn)


def _outcome(facts: Facts, record: Record, run: str) -> None:
    headers = groups.check(record, run=run)
    if headers.part == 0 and headers.group is not None and headers.group not in facts.ended:
        found = groups.decode_part(record.value).group
        facts.ended[found.group] = Ended(found.group, headers.worker or "scorer", found.scored_ns)


def _entry(facts: Facts, record: Record, run: str) -> None:
    entry = ledger.read(record, run=run)[1]
    if ledger.continues(entry, after=len(facts.entries) - 1):
        facts.entries.append(entry)


def _measurement(facts: Facts, record: Record, run: str) -> None:
    found = metrics.read(record, run=run)[1]
    facts.measured.setdefault((found.worker, found.incarnation), {}).setdefault(found.seq, found)


def _in_order(found: dict[int, Measurement]) -> list[Measurement]:
    return [found[seq] for seq in sorted(found)]


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)
