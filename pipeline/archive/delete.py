"""`penstock topics delete`: the one thing that wipes what a run has written.

The rule: never a run at work; its record goes last, so that a deletion that was interrupted can be done again.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, Producer

from penstock.infra.errors import LogError
from penstock.infra.log import Log
from penstock.pipeline.audit.kafka_reader import client_settings
from penstock.pipeline.observe.report.summary import load
from penstock.pipeline.runtime.run_registry import find
from penstock.topics.catalogue import RUNS_TOPIC

SILENT_S = 30.0
"""A worker reports each second; one that has not for so long does not run."""
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """What would be deleted."""

    run: str
    registered: bool
    offsets: dict[str, int]
    """By Kafka name, offsets in use."""


def doomed(log: Log, run: str) -> Doomed:
    """What there is of a run. Raises `ValueError` for one at work, and where there is nothing."""
    topics = log.topics(f"{run}.")
    record = find(log, run)
    if record is None and not topics:
        raise ValueError(f"no run {run!r} on this broker; see `penstock runs`")
    if record is not None and f"{run}.metrics" in topics and f"{run}.ledger" in topics:
        view, now_s = load(log, run, topics=("ledger", "metrics")), time.time()
        at_work = sorted(w.worker for w in view.workers.values() if not w.ended and now_s - w.time_ns / 1e9 < SILENT_S)
        if at_work and not view.ended:
            raise ValueError(f"run {run} is running, {', '.join(at_work[:6])} at work: stop it first")
    offsets = {}
    for topic in topics:
        places = [(topic, partition) for partition in range(log.partitions(topic) or 0)]
        begins, ends = log.begin_offsets(places), log.end_offsets(places)
        offsets[topic] = sum(ends[place] - begins[place] for place in places)
    return Doomed(run=run, registered=record is not None, offsets=offsets)


def delete(log: Log, found: Doomed, *, bootstrap: str, security: Mapping[str, str] | None = None) -> None:
    """Delete the topics, then the run's record. Raises `LogError`."""
    log.delete_topics(found.offsets)
    if not found.registered:
        return
    problems: list[str] = []

    def note(error: Any, _: Any) -> None:
        if error is not None:
            problems.append(error.str())

    try:
        producer = Producer({**client_settings(bootstrap, security or {}), "acks": "all"})
        producer.produce(RUNS_TOPIC, partition=0, key=found.run, value=None, on_delivery=note)
        left = producer.flush(ANSWER_S)
    except KafkaException as error:
        raise LogError(f"the record of run {found.run} was not removed: {error.args[0].str()}") from error
    if left or problems:
        raise LogError(f"the record of run {found.run} was not removed: {problems[0] if problems else 'the broker does not answer'}")
