"""`penstock topics delete`: the one thing that wipes what a run has written.

The rule: never a run at work; its record goes last, so that a deletion that was interrupted can be done again.
"""

import shutil
import time
from dataclasses import dataclass

from penstock.infra.kafka.bulk import BulkWriter
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.paths import run_directory
from penstock.pipeline.observe.run_status import has_ended
from penstock.pipeline.observe.run_view import load
from penstock.pipeline.runtime.run_registry import find
from penstock.topics.catalogue import RUNS_TOPIC

SILENT_S = 30.0
"""A worker reports each second; one that has not for so long does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What would be deleted."""

    run: str
    registered: bool
    offsets: dict[str, int]
    """By Kafka name, offsets in use."""
    directory: str | None
    """The run's logs, measurements, checkpoints and final model on this machine."""


def plan_deletion(log: Log, run: str) -> Deletion:
    """What there is of a run. Raises `ValueError` for one at work, and where there is nothing."""
    topics, directory = log.topics(f"{run}."), run_directory(run)
    record = find(log, run)
    if record is None and not topics:
        raise ValueError(f"no run {run!r} on this broker; see `penstock runs`")
    if record is not None and f"{run}.metrics" in topics and f"{run}.ledger" in topics:
        view, now_s = load(log, run, topics=("ledger", "metrics")), time.time()
        at_work = sorted(w.worker for w in view.workers.values() if not w.ended and now_s - w.time_ns / 1e9 < SILENT_S)
        if at_work and not has_ended(view):
            raise ValueError(f"run {run} is running, {', '.join(at_work[:6])} at work: stop it first")
    offsets = {}
    for topic in topics:
        places = [(topic, partition) for partition in range(log.partitions(topic) or 0)]
        begins, ends = log.begin_offsets(places), log.end_offsets(places)
        offsets[topic] = sum(ends[place] - begins[place] for place in places)
    return Deletion(run=run, registered=record is not None, offsets=offsets, directory=str(directory) if directory.is_dir() else None)


def delete(log: KafkaLog, deletion: Deletion) -> None:
    """Delete the topics and the run's folder, then its record. Raises `LogError`, `OSError`."""
    log.delete_topics(deletion.offsets)
    if deletion.directory is not None:
        shutil.rmtree(deletion.directory)
    if deletion.registered:
        writer = BulkWriter(log.connection)
        writer.tombstone(RUNS_TOPIC, deletion.run.encode())
        writer.flush()
