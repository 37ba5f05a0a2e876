"""Records for the page of a run: on an in-memory log, and groups with contents that must not become markup."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.topics import groups, runs
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import CREATED_S, RUN, RecordBuilder, outgoing, with_group

EVIL = "</script><img src=x onerror=alert(1)> \u2028 <!-- <script>"


def log_with(records: Iterable[Outgoing] = (), run: str = RUN) -> MemoryLog:
    """An in-memory log that holds these records of a run."""
    log = MemoryLog()
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(run, partitions=1)})
    write(log, records)
    return log


def write(log: Log, records: Iterable[Outgoing]) -> None:
    """Send these records."""
    producer = log.producer()
    for record in records:
        producer.send(record)
    producer.flush(60.0)
    producer.close()


def register(log: Log, record: RunRecord, *, topic: str = RUNS_TOPIC, key: bytes | None = None) -> None:
    """Write what a run is as anybody may, with no signature but what the record has."""
    write(log, [replace(outgoing(runs, record, run=record.run, key=record.run.encode() if key is None else key), topic=topic)])


OTHER = "demo-2"


def two_runs(**options: Any) -> MemoryLog:
    """A log with two runs of four steps that differ in their seeds; the first has a dead letter."""
    first = RecordBuilder(steps=4, **options)
    log = log_with([*first.whole(), first.letter()])
    other = RecordBuilder(OTHER, steps=4, created_s=CREATED_S + 100, config={"run": {"name": "demo", "steps": 4, "seed": 1}}, **options)
    log.create_topics(topics_of(OTHER, partitions=1))
    write(log, other.whole())
    return log


def rewritten(record: Outgoing, **changes: Any) -> list[Outgoing]:
    """A group's record with other contents; `samples` is a function of its samples."""
    group = groups.decode(bytes(record.value))
    samples = changes.pop("samples", lambda samples: samples)(group.samples)
    return with_group(record, replace(group, samples=samples, **changes))
