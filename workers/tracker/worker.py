"""The tracker: turns `ledger` and `metrics` into points of one MLflow run and lines of `metrics.jsonl`, and writes report, page and index.

A point has its record's time, is written to `metrics.jsonl` first and sent to MLflow from there. A restarted tracker reads ledger and
metrics from their beginning and adds missing points, so that both hold the same points, each once.
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Partition
from penstock.infra.mlflow.tracking import ModelVersion, RegisteredCheckpoints
from penstock.infra.mlflow.uploader import Uploader
from penstock.infra.paths import run_directory, write_complete
from penstock.pipeline.archive.index.run_index import RunIndex
from penstock.pipeline.archive.index.segments import FOLDER
from penstock.pipeline.inspect.live import saved_view
from penstock.pipeline.inspect.live.saved_view import Saved, ViewWriter
from penstock.pipeline.inspect.metrics import Line, Points, lineage, target_of
from penstock.pipeline.inspect.report.summary import REPORTS, collect, remove_reports
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.inspect.run_status import closing, status_of
from penstock.pipeline.inspect.run_view import Folded, RunView
from penstock.pipeline.inspect.web.build import Limits, build
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import between, deleted
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Activity, Measurement, activity_of
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.secrets import without_password
from penstock.workers.tracker.metrics_file import MetricsFile, sinks
from penstock.workers.tracker.retention import Retention

PAGE_S, PAGE_STOPPED_S = 20.0, 5.0
"""Time to make the run's page, normally and after a stop request."""
PAGE_TOKENS, PAGE_BYTES = 1_000_000, 10_000_000
"""Limits of the page sent to MLflow, smaller than those of `penstock report --html`."""


def write_report(session: Session, report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the files of a report; returns their paths. Raises `OSError`."""
    files = _write_texts(session, report, directory)
    if pages := _write_page(session, report, directory / "report.html"):
        files = _write_texts(session, report, directory) + pages  # again: the text names the page
    return files


def _write_texts(session: Session, report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write the configuration and the report as text and JSON, each file at once; returns their paths."""
    config = json.loads(session.record.config)
    as_lines, as_data = REPORTS
    contents = {
        "config.json": json.dumps(config, indent=2),
        as_data: json.dumps(report, indent=2),
        as_lines: as_text(report, directory=directory, full=True),
    }
    for name, text in contents.items():
        write_complete(directory / name, text.removesuffix("\n") + "\n")
    return [directory / name for name in contents]


def _write_page(session: Session, report: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the run's page within a time limit; returns its path, or nothing after logging why it failed."""
    limits = Limits(tokens=PAGE_TOKENS, max_bytes=PAGE_BYTES, seconds=PAGE_STOPPED_S if session.stop.is_set() else PAGE_S)
    mlflow = {name: report[name] for name in ("mlflow_run_id", "mlflow_uri")}
    try:
        write_complete(path, build(session.log, session.run, limits=limits, mlflow=mlflow, alive=session.reporter.status).html)
    except Exception as error:  # the page is optional: no error changes the end of the run
        cause = " ".join(str(error).split()) or type(error).__name__
        session.reporter.notify(f"the report page was not written: {cause}; write it with `penstock report {session.run} --html {path}`")
        return []
    return [path]


MODEL = "model"


@dataclass(slots=True)
class CheckpointHistory:
    """Ledger entries of the checkpoints, for MLflow's model registry."""

    session: Session
    _tags: dict[int, dict[str, str]] = field(default_factory=dict)

    def note(self, entry: Entry, *, offset: int) -> None:
        """Record the tags of a checkpoint, from its ledger entry at `offset`."""
        if entry.step is not None:
            self._tags[entry.step] = {
                "penstock.run": self.session.run,
                "penstock.version": str(entry.version),
                "penstock.ledger_offset": str(offset),
                "penstock.digest": str(entry.digest),
            }

    def existing(self) -> RegisteredCheckpoints:
        """The checkpoints that exist now, each with its Hugging Face model if the run exports one."""
        store = open_store(self.session.config, self.session.run, to_read=True) if self._tags else None
        if store is None:
            return RegisteredCheckpoints()
        steps = sorted(step for step in store.steps() if step in self._tags)
        folders = {step: store.path(step) / MODEL for step in steps}
        versions = tuple(
            ModelVersion(step=step, directory=folder if folder.is_dir() else folder.parent, tags=self._tags[step])
            for step, folder in folders.items()
        )
        best = store.best.steps if store.best is not None and store.best.steps in folders else None
        return RegisteredCheckpoints(versions=versions, best=best)


def saved_start(log: Log, run: str) -> Saved:
    """The saved view, which sums up the deleted records, and the offsets from which to read on; an empty view and no offsets if none is."""
    if not deleted(log, f"{run}.prompts", f"{run}.groups"):
        return RunView(run=run), {}
    view, since = saved_view.newest(log, run)
    return view, {partition: offset for partition, offset in since.items() if partition[0] not in (RUNS_TOPIC, f"{run}.run")}


def entries_before(log: Log, run: str, since: Mapping[Partition, int]) -> Iterator[tuple[Folded, Record]]:
    """Yield the ledger entries and measurements before the offsets in `since`, each once, because `metrics.jsonl` may lack them."""
    view = RunView(run=run)
    for topic in ("ledger", "metrics"):
        at = (f"{run}.{topic}", 0)
        for record in between(log, at, log.beginning_offsets([at])[at], since.get(at, 0)):
            try:
                payload = view.fold(record)
            except Unusable:
                continue  # the tracker that read it first wrote a dead letter
            if payload is not None:
                yield payload, record
            view.forget()


POLL_S = 0.5
LOOK_S = 0.05
"""Longest wait for records while existing ones are read: a transaction's marker at the end of a partition is passed without a record."""
QUIET_S = 10.0
"""A live worker reports each second; after this much silence it will not send its last measurement."""
LOADING_S = 120.0
"""Silence after which a worker that imports libraries or loads a model, and cannot report meanwhile, will not send any more."""
CLOSED_S = 3.0
"""Minimum wait after the run was closed while a worker of the configuration is missing: it may not have reported yet."""
SETTLE_S = 2.0
"""Time for groups scored before a version was published to arrive, before that version's reward is called final."""
MLFLOW_END_S = 60.0
"""Time to deliver MLflow's missing points when the run is over."""
STOPPED_S = 15.0
"""Time for all remaining work after a stop request: half of the launcher's limit."""
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def main(session: Session) -> None:
    """Follow the run until it is closed and its workers have exited, or a stop is requested; write a report either way."""
    directory = run_directory(session.run)
    directory.mkdir(parents=True, exist_ok=True)
    tracker = Tracker(session, directory=directory)
    session.ready(finishing=lambda: f"writes the report and brings MLflow up to date (at most {STOPPED_S + PAGE_STOPPED_S:.0f} s)")
    try:
        tracker.follow()
        tracker.end()
    finally:
        tracker.close()


class _OutOfTime(Exception):
    """The time limit after a stop request has passed."""


class Tracker:
    """Reads a run's topics, writes its metrics, and sends them to MLflow."""

    def __init__(self, session: Session, *, directory: Path) -> None:
        """Open the topics, the files in the run's `directory` and the uploader. Raises `Fenced` if another tracker of the run is active."""
        self.session, self.directory = session, directory
        self._owned = {RUNS_TOPIC, session.topic("run"), session.topic("ledger"), session.topic("metrics")}
        names = [*sorted(self._owned), *map(session.topic, ("groups", "prompts", "dead-letters"))]
        counts = {name: session.log.partitions(name) or 0 for name in names}
        self._partitions = [(name, number) for name, count in counts.items() for number in range(count)]
        self.view, self._since = saved_start(session.log, session.run)
        self.points = Points(created_ms=session.record.created_ns // 1_000_000, schedule=session.schedule)
        self.file = MetricsFile(directory / "metrics.jsonl")
        self.uploader = _uploader(session, self.file)
        self.sinks = sinks(session.config, session.run, directory, notify=session.reporter.notify)
        self._checkpoints = CheckpointHistory(session)
        self._retention = Retention(session)
        self._tail = session.log.tail({partition: self._since.get(partition, "earliest") for partition in self._partitions})
        self._configured = {role.worker(slot) for role in ROLES.values() for slot in range(role.workers(session.config))} - {session.worker}
        created_ns, folder = session.record.created_ns, directory / FOLDER
        self._index = RunIndex(session.run, directory=folder, created_ns=created_ns, write=True)
        self._views = ViewWriter(session.log, session.producer, session.worker)
        self._last_report: dict[str, float] = {}
        self._published: deque[tuple[float, int]] = deque()
        self._due: int | None = None
        self._awaited: Mapping[Partition, int] | None = None
        self._complete = False
        self._closed_at: float | None = None
        self._stopped_at: float | None = None
        self._announced: str | None = None

    def follow(self) -> None:
        """Process existing and new records until no more are expected."""
        session = self.session
        session.reporter.doing(Activity.START, "reading the log")
        for payload, record in entries_before(session.log, session.run, self._since):
            self._pass_on(payload, record)
        self._index.catch_up(session.log, decoding=session.dead_letters.decoding)
        self._read_to_end()
        while not session.stop.is_set() and not self._over():
            self._take(self._tail.poll(POLL_S))
            self._announce()
            self._save()
            session.reporter.doing(*self._state())
            session.reporter.status()
        self._complete = self._read_to_end()
        self._save(now=True)

    def end(self) -> None:
        """Write the report and bring MLflow up to date; an unreachable server costs a limited time and one line."""
        session, uploader = self.session, self.uploader
        session.reporter.doing(Activity.SAVE, "writing the report", now=True)
        if self._ended() and self._complete:  # otherwise the newest versions' rewards are not final yet: the next tracker writes them
            self._write_down(self.points.rewards(self.view, before=(self.view.version or 0) + 1))
            self._flush()
        if uploader is not None:  # a run id may be late if MLflow is only slow
            limit_s = STOPPED_S if uploader.failing else MLFLOW_END_S
            self._patiently(lambda seconds: uploader.wait_for_run(seconds) is not None, limit_s=limit_s)
        self._announce()
        files = self._report(None if uploader is None else uploader.run_id)
        if uploader is None:
            return
        closed = self.view.closed
        end_ms, reason = closed.time_ns // 1_000_000 if closed else None, closing(self.view).get("reason")
        uploader.finish(self._mlflow_status(), end_ms=end_ms, artifacts=files, reason=reason)
        if not self._patiently(uploader.wait, limit_s=MLFLOW_END_S):
            session.reporter.notify(
                f"MLflow at {uploader.shown_uri} lacks {uploader.queued} metric points and the report, which are in {self.directory}; "
                f"once the server responds, send them with `penstock worker tracker --run {session.run}`"
            )

    def _report(self, mlflow_run_id: str | None) -> list[Path]:
        """Write the report and return its files; none if the log cannot be read within `STOPPED_S` after a stop request."""
        session = self.session
        try:
            report = collect(session.log, session.run, mlflow_run_id=mlflow_run_id, alive=self._check_time)
        except _OutOfTime:
            remove_reports(self.directory)
            session.reporter.notify(f"no report was written: the log is too long for the tracker; run `penstock report {session.run}`")
            return []
        if self.uploader is not None:
            report["mlflow_uri"] = self.uploader.shown_uri
        return write_report(session, report, self.directory)

    def close(self) -> None:
        self._retention.close()
        self._index.close()
        self._tail.close()
        self.file.close()
        self.sinks.close()

    def _read_to_end(self) -> bool:
        """Apply all records up to the current end offsets; False if the time after a stop request ends first."""
        ends = self.session.log.end_offsets(self._partitions)
        while not self._reached(ends):
            if self._out_of_time():
                return False
            self._take(self._tail.poll(LOOK_S))
            self.session.reporter.status()
        return True

    def _take(self, records: Iterable[Record]) -> None:
        """Apply records, write their metrics, and send unusable ones of the tracker's own topics to the dead letters."""
        now = time.monotonic()
        for record in records:
            owned = record.topic in self._owned
            duplicates = sum(self.view.duplicates.values())
            try:
                with self.session.dead_letters.decoding(record):
                    payload = self.view.fold(record)
                    with contextlib.suppress(Unusable):  # its owner sends it to the dead-letter topic
                        self._index.add(record)
            except Unusable as error:
                if owned:
                    self.session.dead_letters.write(record, error)
                continue
            if owned and sum(self.view.duplicates.values()) > duplicates:
                self.session.reporter.duplicate(str(record.id))
            if payload is None:
                continue
            self._pass_on(payload, record)
        self.view.forget()
        self._reward(now)
        self._flush()

    def _pass_on(self, payload: Folded, record: Record) -> None:
        """Write the metrics in a record's payload, and record versions, checkpoints and what the deletion of old records needs."""
        now = time.monotonic()
        self._write_down(self.points.of(payload, record, source=record.topic.removeprefix(f"{self.session.run}.")))
        if isinstance(payload, Measurement):
            self._last_report[payload.worker] = now
        if isinstance(payload, Entry):
            self._retention.note(payload)
            if payload.kind == "version" and payload.version is not None:
                self._published.append((now, payload.version))
            if payload.kind == "checkpoint":
                self._checkpoints.note(payload, offset=record.offset)

    def _reward(self, now: float) -> None:
        """Write the mean reward of each version whose samples are all stale by now, once the groups scored before that have been read."""
        while self._published and self._published[0][0] <= now - SETTLE_S:
            self._due, self._awaited = self._published.popleft()[1], None
        if self._due is None:
            return
        try:
            self._awaited = self._awaited or self.session.log.end_offsets(self._partitions)
        except LogError:  # broker unreachable: try later
            return
        if self._reached(self._awaited):
            self._write_down(self.points.rewards(self.view, before=self._due - self.session.schedule.max_lag))
            self._due = None

    def _reached(self, ends: Mapping[Partition, int]) -> bool:
        return all(self._tail.position(partition) >= end for partition, end in ends.items())

    def _write_down(self, lines: Iterable[Line]) -> None:
        """Write lines to `metrics.jsonl` and to the other sinks."""
        for line in lines:
            new = self.file.write(line)
            self.sinks.write(line, new=new)
            if line.kind in ("step", "eval", "reward"):
                self.session.reporter.points.update(line.values)
            if new:
                self.session.reporter.add("points", len(line.values))

    def _flush(self) -> None:
        """Write the queued lines to the file, and wake the uploader, which sends them to MLflow."""
        self.file.flush()
        if self.uploader is not None:
            if self.view.groups:  # before, the import of MLflow would hold up the start of engines and trainer on few cores
                self.uploader.start()
            self.uploader.more(self._checkpoints.existing())

    def _announce(self) -> None:
        """Send MLflow's run id and address as a measurement, once they are determined, so that other commands show them."""
        if self.uploader is not None and (run_id := self.uploader.run_id) is not None and run_id != self._announced:
            labels = {"mlflow_run_id": run_id, "mlflow_uri": self.uploader.shown_uri}
            self.session.reporter.send(kind="progress", values={}, labels=labels)
            self._announced = run_id

    def _state(self) -> tuple[Activity, str]:
        if self._closed_at is not None:
            return Activity.DONE, "waiting for the workers to end"
        waiting = self.uploader.queued if self.uploader else 0
        return (Activity.BUSY, f"{waiting} metric points wait for MLflow") if waiting > 1000 else (Activity.NO_RECORDS, "following the run")

    def _over(self) -> bool:
        """True if the run is closed and every other worker has exited or has been silent for long."""
        now = time.monotonic()
        if not self._ended():
            return False
        self._closed_at = self._closed_at or now
        others = [worker for worker in self.view.workers.values() if worker.worker != self.session.worker]
        if now - self._closed_at < CLOSED_S and not self._configured <= {worker.worker for worker in others}:
            return False
        # A worker that loads may be silent for longer before no more is expected of it.
        limits = {worker.worker: LOADING_S if activity_of(worker.labels) == Activity.START else QUIET_S for worker in others}
        return all(worker.ended or now - self._last_report.get(worker.worker, 0.0) > limits[worker.worker] for worker in others)

    def _ended(self) -> bool:
        """True if the run is finished or failed; a stopped run may be resumed."""
        return self.view.closed is not None or status_of(self.view) in ("finished", "failed")

    def _mlflow_status(self) -> str:
        """The status to set in MLflow; a run that a stop has cut short is KILLED until it is resumed."""
        if not self._complete:
            return "KILLED"
        if self.view.closed is None and any(worker.labels.get("status") == "failed" for worker in self.view.workers.values()):
            return "FAILED"
        return MLFLOW_STATUS.get(status_of(self.view), "KILLED")

    def _patiently(self, check: Callable[[float], bool], *, limit_s: float) -> bool:
        """Call `check(seconds to wait)` until it is true; False after `limit_s`, or earlier after a stop request. Reports meanwhile."""
        end_s = time.monotonic() + limit_s
        while not check(0.25):
            left_s = end_s - time.monotonic()
            if left_s < 0 or self._out_of_time():
                return False
            self.session.reporter.doing(Activity.SAVE, f"waiting for MLflow, at most {math.ceil(left_s / 5) * 5} s more")
            self.session.reporter.status()
        return True

    def _save(self, *, now: bool = False) -> None:
        """Write a snapshot of the view to `state` if one is due, or `now`; then delete records that no process needs."""
        positions = {partition: self._tail.position(partition) for partition in self._partitions}
        if saved := self._views.write(self.view, positions, now=now):
            self._retention.delete(self.view, positions, saved)

    def _check_time(self) -> None:
        """Report while the log is read; raises `_OutOfTime` once the time after a stop request has passed."""
        if self._out_of_time():
            raise _OutOfTime
        self.session.reporter.status()

    def _out_of_time(self) -> bool:
        now = time.monotonic()
        if self.session.stop.is_set():
            self._stopped_at = self._stopped_at or now
        return self._stopped_at is not None and now - self._stopped_at > STOPPED_S


def _uploader(session: Session, file: MetricsFile) -> Uploader | None:
    """The uploader to MLflow; None if the run does not use MLflow or it is not installed."""
    chosen = session.config.mlflow
    if not chosen.enabled:
        return None
    if find_spec("mlflow") is None:
        session.reporter.notify("MLflow is not installed: metrics are written to metrics.jsonl only")
        return None
    tags = {"penstock.git": str(session.info.get("git") or "unknown"), "mlflow.source.name": "penstock", **lineage(session.info)}
    target = target_of(session.record, session.config, tags=tags, data=session.info.get("data", ()))
    session.reporter.notify(f"sending metrics to MLflow at {without_password(target.uri)}, experiment {target.experiment!r}")
    return Uploader(target, file, notify=session.reporter.notify)
