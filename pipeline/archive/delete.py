"""`penstock topics delete`: deletes a run that is not active.

The registration is deleted last, so that an interrupted deletion can be repeated.
"""

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
"""A run is not active if none of its workers sends a status record for this long; workers send one per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What deleting a run removes."""

    run: str
    registered: bool
    offsets: dict[str, int]
    directory: str | None
    """The run's directory on this machine, with logs, checkpoints and the final model; None if there is none."""
    bytes: int
    """Bytes freed on this machine, by the embedded broker and in the run's directory."""
    keep_model: bool = False


def plan_deletion(log: Log, run: str, *, keep_model: bool = False) -> Deletion:
    """List what deleting a run removes. Raises `ValueError` for an active or unknown run or a directory that must not be removed."""
    topics, directory = log.topics(f"{run}."), run_directory(run)
    _require_own(directory)
    record = find(log, run)
    if record is None and not topics:
        raise RunNotFound(run)
    if record is not None and f"{run}.metrics" in topics and f"{run}.ledger" in topics:
        view = load(log, run, topics=("ledger", "metrics"))
        if not has_ended(view) and not all(worker.ended for worker in view.workers.values()) and (worker := _active_worker(log, run)):
            raise ValueError(f"run {run} cannot be deleted while {worker} is running: stop the run first")
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
    """Return the runs, except those in `busy`, without a status and without a record in their own topics since `limit_s` (Unix time)."""
    old = [record.run for record in all_runs(log) if record.updated_ns / 1e9 < limit_s and record.run not in busy]
    return [run for run in old if not _written_since(log, run, limit_s)]


def _written_since(log: Log, run: str, limit_s: float) -> bool:
    topics = [topic for name in ("run", "ledger") if log.partitions(topic := topic_name(run, name))]
    partitions = [(topic, 0) for topic in topics]
    first, ends = log.offsets_at(partitions, max(0, int(limit_s * 1000))), log.end_offsets(partitions)
    return any(first[partition] < ends[partition] for partition in partitions)


def _active_worker(log: Log, run: str) -> str | None:
    """Return a worker that sends a status record within `WATCHED_S`; None if none does. Clocks of other machines do not matter."""
    with contextlib.closing(log.tail({(topic_name(run, "metrics"), 0): "latest"})) as tail:
        end = time.monotonic() + WATCHED_S
        while time.monotonic() < end:
            for record in tail.poll(0.5):
                with contextlib.suppress(Unusable):
                    headers = metrics.check(record, run=run)
                    if headers.outcome != "final":
                        return headers.worker
    return None


def delete(log: KafkaLog, deletion: Deletion) -> None:
    """Delete a run's topics and directory, then its registration. Raises `LogError`, `OSError`."""
    log.delete_topics(deletion.offsets)
    if deletion.directory is not None:
        _remove(Path(deletion.directory), keep=MODEL if deletion.keep_model else None)
    if deletion.registered:
        writer = BulkWriter(log.connection)
        writer.tombstone(RUNS_TOPIC, deletion.run.encode())
        writer.flush()


def _remove(directory: Path, *, keep: str | None) -> None:
    """Remove a run's directory, or everything in it except the subdirectory `keep`. Symbolic links are removed, not followed.

    Raises `ValueError` if the directory is not in `runs`, is a link, or has another file system mounted in it.
    """
    _require_own(directory)  # checked again, because the directory may have changed since the deletion was planned
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
        raise ValueError(f"{directory} is not removed, because it is a link or not a run's directory in {runs}; remove it by hand")
    inside = Path(os.path.realpath(directory))
    if mounted := [point for point in _mount_points() if point.is_relative_to(inside)]:
        raise ValueError(f"{directory} is not removed, because a file system is mounted at {mounted[0]}; unmount it first")


def _mount_points() -> list[Path]:
    """Return the mount points in /proc/self/mountinfo; empty if the file does not exist."""
    try:
        fields = [line.split()[4] for line in MOUNTS.read_bytes().splitlines()]
    except OSError:
        return []
    return [Path(os.fsdecode(field.decode("unicode_escape").encode("latin-1"))) for field in fields]
