"""Timeline of a run's workers as a table with a row per interval of work or waiting, computed from the log alone."""

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from penstock.infra.log import Log
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import metrics
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity, Measurement, activity_of
from penstock.topics.rollouts import Rollout, generated
from penstock.topics.wire.errors import Unusable

TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "time": pa.timestamp("ns", tz="UTC"),
    "ints": pa.list_(pa.int64()),
    "int32s": pa.list_(pa.int32()),
    "floats": pa.list_(pa.float64()),
    "float32s": pa.list_(pa.float32()),
    "bools": pa.list_(pa.bool_()),
}


def schema(columns: str) -> pa.Schema:
    """Parse a schema written like SQL: `schema("step int, committed time")` has an int64 and a timestamp in nanoseconds."""
    return pa.schema([(name, TYPES[kind]) for name, kind in (column.split() for column in columns.split(","))])


TIMELINE = schema("role text, worker text, what text, started time, ended time, group int, sample int, step int, version int, cause text")
SHORTEST_WAIT_NS = 1_000_000
CAUSES = {
    Activity.NO_PROMPTS: "prompts",
    Activity.NO_CALLS: "calls",
    Activity.NO_SAMPLES: "samples",
    Activity.NO_WEIGHTS: "weights",
    Activity.NO_DEVICE: "the device",
}
"""Activity of a waiting rollout worker or scorer -> cause of waiting."""
TRAINER = "trainer"


class Interval(NamedTuple):
    """One row of the timeline. Times are Unix nanoseconds."""

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


class SampleNumbers(NamedTuple):
    """The numbers of a sample that stay in memory."""

    group: int
    sample: int
    worker: str
    tokens: int
    finish: str
    version_min: int
    version_max: int
    started_ns: int
    ended_ns: int
    written_ns: int
    """Time of its record; 0 if unknown."""

    @classmethod
    def of(cls, rollout: Rollout, *, written_ns: int = 0) -> "SampleNumbers":
        versions, times = (rollout.version_min, rollout.version_max), (rollout.started_ns, rollout.ended_ns)
        counts = len(generated(rollout)), rollout.finish
        return cls(rollout.group, rollout.sample, rollout.worker, *counts, *versions, *times, written_ns)


class Ended(NamedTuple):
    """Time at which a group was scored."""

    worker: str
    scored_ns: int
    reward_ns: int | None = None


@dataclass(slots=True)
class Facts:
    """Deduplicated facts from which the intervals are computed."""

    samples: dict[tuple[int, int], SampleNumbers] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    measured: dict[tuple[str, str], dict[int, Measurement]] = field(default_factory=dict)
    """(worker, process) -> sequence number -> measurement."""

    def add_measurement(self, measured: Measurement) -> None:
        """Add a worker's report; of two with the same sequence number the first one is used."""
        self.measured.setdefault((measured.worker, measured.incarnation), {}).setdefault(measured.seq, measured)


def timeline(log: Log, run: str) -> pa.Table:
    """Return a run's timeline up to the current end offsets: a row of `TIMELINE` per interval in which a worker worked or waited."""
    reader, facts = RunReader(log, run), Facts()
    for record in reader.records("metrics"):
        with contextlib.suppress(Unusable):
            facts.add_measurement(metrics.read(record, run=run)[1])
    facts.entries += reader.entries()
    for outcome in reader.groups():
        if outcome.payload is not None and outcome.headers is not None:
            worker = outcome.headers.worker or "scorer"
            facts.ended[outcome.payload.group] = Ended(worker, outcome.payload.scored_ns, outcome.payload.reward_ns)
    for read in reader.samples():
        if (sample := read.payload) is not None:
            numbers = SampleNumbers.of(sample, written_ns=read.record.timestamp_ms * 1_000_000)
            facts.samples[sample.group, sample.sample] = numbers
    return as_table(intervals(facts))


def as_table(spans: Iterable[Interval]) -> pa.Table:
    """Return the intervals as `TIMELINE`, sorted by role, worker and time."""
    rows = sorted(spans, key=lambda span: (span.role, span.worker, span.started, span.ended, span.what))
    columns = list(zip(*rows, strict=True)) or [()] * len(TIMELINE)
    return pa.table([pa.array(list(column), kind.type) for column, kind in zip(columns, TIMELINE, strict=True)], schema=TIMELINE)


def intervals(facts: Facts) -> Iterator[Interval]:
    """Yield the intervals of work from the records of the work, then those in which rollout workers and scorers waited."""
    roles = {worker: next(iter(reports.values())).role for (worker, _), reports in facts.measured.items()}
    by_worker: dict[str, list[Interval]] = {}
    work = [*_generations(facts, roles), *_scores(facts, roles), *_trainer(facts, roles), *_measured(facts)]
    for span in work:
        by_worker.setdefault(span.worker, []).append(span)
    yield from work
    for (worker, _), reports in facts.measured.items():
        if roles[worker] in ("rollout", "scorer"):
            yield from _waits(worker, roles[worker], _in_order(reports), by_worker.get(worker, []))


def _generations(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    """Yield the interval in which each sample was generated."""
    for sample in facts.samples.values():
        role = roles.get(sample.worker, "rollout")
        yield Interval(
            role, sample.worker, "rollout", sample.started_ns, sample.ended_ns, sample.group, sample.sample, version=sample.version_min
        )


def _scores(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    """Yield the time of each group's reward functions; for records of earlier releases, from the last sample to the outcome."""
    written: dict[int, int] = {}
    for sample in facts.samples.values():
        outcome = facts.ended.get(sample.group)
        if outcome is not None and sample.written_ns <= outcome.scored_ns:
            written[sample.group] = max(written.get(sample.group, 0), sample.written_ns)
    for group, outcome in facts.ended.items():
        started = written.get(group, outcome.scored_ns) if outcome.reward_ns is None else outcome.scored_ns - outcome.reward_ns
        yield Interval(roles.get(outcome.worker, "scorer"), outcome.worker, "score", started, outcome.scored_ns, group)


def _trainer(facts: Facts, roles: dict[str, str]) -> Iterator[Interval]:
    """Yield the intervals of each step: waiting from its start to its first backward pass, then training until it is committed."""
    worker = next((name for name, role in roles.items() if role == TRAINER), TRAINER)
    for entry in facts.entries:
        end, measured = entry.time_ns, entry.metrics
        if entry.kind == "step":
            backward = _ns(measured.get("first_backward_at")) or end - _ns(measured.get("compute_s", 0.0))
            started = min(_ns(measured.get("started_at")) or backward - _ns(measured.get("wait_s", 0.0)), backward)
            yield Interval(TRAINER, worker, "wait", started, backward, step=entry.step, version=entry.version, cause="groups")
            yield Interval(TRAINER, worker, "train", backward, end, step=entry.step, version=entry.version)
        elif entry.kind in ("version", "checkpoint"):
            took = _ns(measured.get("publish_s" if entry.kind == "version" else "write_s", 0.0))
            what = "publish" if entry.kind == "version" else "checkpoint"
            yield Interval(TRAINER, worker, what, end - took, end, step=entry.step, version=entry.version)


def _measured(facts: Facts) -> Iterator[Interval]:
    """Yield the starts, evaluations and loads that workers measured; a load ends before the first sample of its version starts."""
    first_started: dict[tuple[str, int], int] = {}
    for sample in facts.samples.values():
        key = (sample.worker, sample.version_min)
        first_started[key] = min(first_started.get(key, sample.started_ns), sample.started_ns)
    for reports in facts.measured.values():
        loaded, started = 0.0, False
        for report in _in_order(reports):
            startup = report.values.get("startup_s")
            if startup is not None and not started:
                started = True
                yield Interval(report.role, report.worker, "start", report.time_ns - _ns(startup), report.time_ns)
            if report.kind == "eval":
                took = _ns(report.values.get("eval_s", 0.0))
                yield Interval(report.role, report.worker, "eval", report.time_ns - took, report.time_ns, version=report.version)
            took_s = report.values.get("load_s", loaded) - loaded
            if took_s > 0.0 and "version" in report.values:
                version, loaded = int(report.values["version"]), loaded + took_s
                ended = min(first_started.get((report.worker, version), report.time_ns), report.time_ns)
                yield Interval(report.role, report.worker, "load", ended - _ns(took_s), ended, version=version)


def _waits(worker: str, role: str, reports: Sequence[Measurement], work: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the intervals in which one process of a worker had no work, from its startup to its last report."""
    ready = next((report.time_ns for report in reports if "startup_s" in report.values), None)
    if ready is None:
        return
    last, times = reports[-1].time_ns, [report.time_ns for report in reports]
    busy_until = ready
    spans = sorted((span.started, span.ended) for span in work if span.ended > ready and span.started < last)
    for started, ended in [*spans, (last, last)]:
        if started - busy_until >= SHORTEST_WAIT_NS:
            yield Interval(role, worker, "wait", busy_until, started, cause=_cause(reports, times, busy_until, started))
        busy_until = max(busy_until, ended)


def _cause(reports: Sequence[Measurement], times: Sequence[int], started: int, ended: int) -> str | None:
    """Return the cause of waiting in the newest status within the interval; None if no status has one."""
    within = reports[: bisect_right(times, ended)][bisect_right(times, started) :]
    return next((CAUSES[activity] for report in reversed(within) if (activity := activity_of(report.labels)) in CAUSES), None)


def _in_order(reports: dict[int, Measurement]) -> list[Measurement]:
    return [reports[seq] for seq in sorted(reports)]


def _ns(seconds: float | None) -> int:
    return round((seconds or 0.0) * 1e9)
