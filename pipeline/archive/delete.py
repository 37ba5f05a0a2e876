"""`penstock topics delete`: deletes a run that is not active; its registration last, so that an interrupted deletion can be repeated."""

import contextlib
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.broker import embedded
from penstock.infra.errors import RunNotFound
from penstock.infra.kafka.bulk import BulkWriter
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, state_path
from penstock.pipeline.inspect.records.runs import folder_bytes, log_bytes
from penstock.pipeline.inspect.run_status import has_ended
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.runtime.registration.run_registry import all_runs, find
from penstock.topics import metrics
from penstock.topics.catalogue import RUNS_TOPIC, is_run_id, topic_name
from penstock.topics.wire.errors import Unusable

MOUNTS = Path("/proc/self/mountinfo")
MODEL = "model"
WATCHED_S = 10.0
"""A run without a status record of its workers for this long is not active; they send one each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Contents of a deletion."""

    run: str
    registered: bool
    offsets: dict[str, int]
    """Kafka topic -> number of offsets in use."""
    directory: str | None
    """The run's logs, measurements, checkpoints and final model on this machine."""
    bytes: int
    """Bytes freed on this machine: in the embedded broker's folder and the run's."""
    keep_model: bool = False


def plan_deletion(log: Log, run: str, *, keep_model: bool = False) -> Deletion:
    """The contents to delete of a run. Raises `ValueError` for an active or unknown run, and for a folder that may not be removed."""
    topics, directory = log.topics(f"{run}."), run_directory(run)
    _require_own(directory)
    record = find(log, run)
    if record is None and not topics:
        raise RunNotFound(run)
    if record is not None and f"{run}.metrics" in topics and f"{run}.ledger" in topics:
        view = load(log, run, topics=("ledger", "metrics"))
        if not has_ended(view) and not all(worker.ended for worker in view.workers.values()) and (worker := _active_worker(log, run)):
            raise ValueError(f"run {run} is running, {worker} at work: stop it first")
    offsets = {}
    for topic in topics:
        partitions = [(topic, partition) for partition in range(log.partitions(topic) or 0)]
        starts, ends = log.beginning_offsets(partitions), log.end_offsets(partitions)
        offsets[topic] = sum(ends[partition] - starts[partition] for partition in partitions)
    freed = log_bytes(embedded.topic_bytes(), run) + folder_bytes(directory, without=MODEL if keep_model else None)
    return Deletion(
        run=run,
        registered=record is not None,
        offsets=offsets,
        directory=str(directory) if directory.is_dir() else None,
        bytes=freed,
        keep_model=keep_model,
    )


def ended_before(log: Log, limit_s: float, *, busy: Collection[str]) -> list[str]:
    """Runs without a record since `limit_s` (Unix time): neither a status nor one in their own topics, as any client may write a status."""
    old = [record.run for record in all_runs(log) if record.updated_ns / 1e9 < limit_s and record.run not in busy]
    return [run for run in old if not _written_since(log, run, limit_s)]


def _written_since(log: Log, run: str, limit_s: float) -> bool:
    topics = [topic for name in ("run", "ledger") if log.partitions(topic := topic_name(run, name))]
    partitions = [(topic, 0) for topic in topics]
    first, ends = log.offsets_at(partitions, max(0, int(limit_s * 1000))), log.end_offsets(partitions)
    return any(first[partition] < ends[partition] for partition in partitions)


def _active_worker(log: Log, run: str) -> str | None:
    """A worker that reports now; None if none does for `WATCHED_S`. Independent of the clocks of other machines."""
    tail, end = log.tail({(topic_name(run, "metrics"), 0): "latest"}), time.monotonic() + WATCHED_S
    try:
        while time.monotonic() < end:
            for record in tail.poll(0.5):
                with contextlib.suppress(Unusable):
                    headers = metrics.check(record, run=run)
                    if headers.outcome != "final":
                        return headers.worker
    finally:
        tail.close()
    return None


def delete(log: KafkaLog, deletion: Deletion) -> None:
    """Delete the topics and the run's folder, then its record. Raises `LogError`, `OSError`."""
    log.delete_topics(deletion.offsets)
    if deletion.directory is not None:
        _remove(Path(deletion.directory), keep=MODEL if deletion.keep_model else None)
    if deletion.registered:
        writer = BulkWriter(log.connection)
        writer.tombstone(RUNS_TOPIC, deletion.run.encode())
        writer.flush()


def _remove(directory: Path, *, keep: str | None) -> None:
    """Remove a run's folder, or its contents except the folder `keep` if that exists; links are removed and not followed.

    Raises `ValueError` if it is not a folder in `runs`, if it or `runs` is a link, or if another file system is mounted in it.
    """
    _require_own(directory)  # again: it may have changed since the deletion was planned
    if keep is None or not (directory / keep).exists():
        shutil.rmtree(directory)
        return
    for path in directory.iterdir():
        if path.name == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_own(directory: Path) -> None:
    runs = state_path() / "runs"
    if directory.parent != runs or not is_run_id(directory.name) or any(path.is_symlink() for path in (runs, directory)):
        raise ValueError(f"{directory} is not removed: it is a link or no folder of a run in {runs}")
    inside = Path(os.path.realpath(directory))
    if mounted := [point for point in _mount_points() if point.is_relative_to(inside)]:
        raise ValueError(f"{directory} is not removed: {mounted[0]} is mounted in it; unmount it first")


def _mount_points() -> list[Path]:
    """Mount points, from the fifth field of each line; empty on a machine without that file."""
    try:
        fields = [line.split()[4] for line in MOUNTS.read_bytes().splitlines()]
    except OSError:
        return []
    return [Path(os.fsdecode(field.decode("unicode_escape").encode("latin-1"))) for field in fields]
