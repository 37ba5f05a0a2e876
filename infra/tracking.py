"""MLflow: one MLflow run per pipeline run, and a thread that brings points to it however often the server goes away.

The rule: nobody waits for MLflow. What it has got is noted in the run's own tag, so that a restarted tracker goes on behind it.
"""

import importlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from infra.errors import TrackingError

RUN_TAG = "penstock.run"
POSITION_TAG = "penstock.position"
MAX_POINTS = 1000
"""Metrics in one request: the server's limit."""
MAX_PARAMS = 100
MAX_PARAM_CHARS = 500
LONGEST_PAUSE_S = 15.0
GATHER_S = 2.0
"""Points of so long go into one request, which costs as much as a single one."""

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
    # The client would hide an outage for minutes behind its own retries; ours are seen by the person and end with the run.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one metric; logged twice it is still one point, as its time is its record's."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a pipeline run is tracked."""

    run: str
    uri: str
    experiment: str
    artifacts: str | None = None
    """URI of the artifact store for a new experiment; the server's own choice without."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    start_ms: int | None = None


class MlflowRun:
    """The MLflow run of one pipeline run: found by its tag or made, never made twice. Every method may raise `TrackingError`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        with _translated(target.uri):
            mlflow = _mlflow()
            self._client: Any = mlflow.MlflowClient(tracking_uri=target.uri)
            self._entities = importlib.import_module("mlflow.entities")
            found = self._find_or_create()
            self.run_id: str = found.info.run_id
            self.position: dict[str, int] = _position(found.data.tags.get(POSITION_TAG))
            self._describe()

    def log(self, points: Sequence[Point], *, position: Mapping[str, int]) -> None:
        """Send at most `MAX_POINTS` points, and note how far each source has been read."""
        now = {**self.position, **position}
        metrics = [self._entities.Metric(point.key, float(point.value), point.timestamp_ms, point.step) for point in points]
        tag = self._entities.RunTag(POSITION_TAG, json.dumps(now))
        with _translated(self.target.uri):
            self._client.log_batch(self.run_id, metrics=metrics[: MAX_POINTS - 1], tags=[tag] if len(metrics) < MAX_POINTS else [])
            if len(metrics) == MAX_POINTS:  # one request takes 1000 items of all kinds together
                self._client.log_batch(self.run_id, metrics=metrics[MAX_POINTS - 1 :], tags=[tag])
        self.position = now

    def finish(self, status: str, *, artifacts: Sequence[Path] = ()) -> None:
        """Attach files and set FINISHED, KILLED or FAILED."""
        with _translated(self.target.uri):
            for path in artifacts:
                self._client.log_artifact(self.run_id, str(path))
            self._client.set_terminated(self.run_id, status=status)

    def _find_or_create(self) -> Any:
        target = self.target
        experiment = self._client.get_experiment_by_name(target.experiment)
        if experiment is not None and experiment.lifecycle_stage != "active":
            raise TrackingError(f"the MLflow experiment {target.experiment!r} was deleted: restore it, or choose another mlflow.experiment")
        if experiment is None:
            number = self._client.create_experiment(target.experiment, artifact_location=target.artifacts)
        else:
            number = experiment.experiment_id
        if not self._runs(number):
            tags = {**target.tags, RUN_TAG: target.run}
            self._client.create_run(number, start_time=target.start_ms, tags=tags, run_name=target.run)
        first, *others = self._runs(number)
        for other in others:  # made by a second tracker in the same instant
            self._client.delete_run(other.info.run_id)
        return first

    def _runs(self, experiment: str) -> list[Any]:
        found = self._client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{self.target.run}'", max_results=10)
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    def _describe(self) -> None:
        params = [self._entities.Param(key, value[:MAX_PARAM_CHARS]) for key, value in sorted(self.target.params.items())]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[start : start + MAX_PARAMS])


class Uploader:
    """Brings points to MLflow from a thread of its own, with growing pauses while the server does not answer."""

    def __init__(self, target: Target, *, say: Callable[[str], None]) -> None:
        self.shown_uri = without_credentials(target.uri)
        self.run_id: str | None = None
        self._target, self._say = target, say
        self._waiting: deque[tuple[str, int, tuple[Point, ...]]] = deque()
        self._changed = threading.Condition()
        self._ending: tuple[str, tuple[Path, ...]] | None = None
        self._stopped = self._done = False
        self._mlflow_run: MlflowRun | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Points that MLflow has not got yet."""
        with self._changed:
            return sum(len(points) for _, _, points in self._waiting)

    def put(self, points: Sequence[Point], *, source: str, number: int) -> None:
        """Hand over what the record `number` of `source` says; dropped when MLflow has got it in an earlier life."""
        with self._changed:
            self._waiting.append((source, number, tuple(points)))
            self._changed.notify()

    def wait_for_run(self, timeout_s: float) -> str | None:
        """The MLflow run's id, as soon as the server has answered."""
        with self._changed:
            self._changed.wait_for(lambda: self.run_id is not None, timeout_s)
            return self.run_id

    def finish(self, status: str, *, artifacts: Sequence[Path], timeout_s: float) -> bool:
        """Deliver what is left, attach the files, set the status; False when the time was not enough."""
        with self._changed:
            self._ending = (status, tuple(artifacts))
            self._changed.notify()
        self._thread.join(timeout_s)
        return self._done

    def leave(self, timeout_s: float) -> bool:
        """Deliver what is left and stop; the MLflow run stays open for the next tracker."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return self._done

    def _work(self) -> None:
        pause, silent = 0.5, False
        while not self._done:
            try:
                self._advance()
            except TrackingError as error:
                if not silent:
                    self._say(f"{error}; the run goes on, and its points wait in the log")
                silent = True
                # Asked to end, it tries on without a pause worth naming: the caller has set the limit.
                time.sleep(min(pause, 1.0) if self._ending or self._stopped else pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if silent:
                self._say(f"MLflow at {self.shown_uri} answers again")
            pause, silent = 0.5, False

    def _advance(self) -> None:
        """One step towards MLflow having everything: connect, send a batch, or end."""
        if self._mlflow_run is None:
            self._mlflow_run = MlflowRun(self._target)
            with self._changed:
                self.run_id = self._mlflow_run.run_id
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending or self._stopped)
            self._changed.wait_for(lambda: self._ending or self._stopped or len(self._waiting) >= MAX_POINTS, GATHER_S)
            taken, points, position = self._batch(self._mlflow_run.position)
        if points or position:
            self._mlflow_run.log(points, position=position)
        with self._changed:
            for _ in range(taken):
                self._waiting.popleft()
            if self._waiting or not (self._ending or self._stopped):
                return
        if self._ending is not None:
            self._mlflow_run.finish(self._ending[0], artifacts=self._ending[1])
        self._done = True

    def _batch(self, have: Mapping[str, int]) -> tuple[int, list[Point], dict[str, int]]:
        points: list[Point] = []
        position: dict[str, int] = {}
        taken = 0
        for source, number, found in self._waiting:
            if taken and len(points) + len(found) > MAX_POINTS:
                break
            taken += 1
            if number >= have.get(source, 0):
                points += found
                position[source] = number + 1
        return taken, points, position


def without_credentials(uri: str) -> str:
    """The address without user and password, fit to be shown.

    Example:
        without_credentials("https://me:secret@host/x")  # -> "https://host/x"
    """
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def _position(tag: str | None) -> dict[str, int]:
    try:
        found = json.loads(tag or "{}")
    except ValueError:
        return {}
    return {str(key): int(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _mlflow() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        mlflow = importlib.import_module("mlflow")
    except ImportError as error:
        raise TrackingError("mlflow is not installed: pip install 'penstock[tracking]', or set mlflow.enabled = false") from error
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    try:
        yield
    except TrackingError:
        raise
    except _foreign_errors() as error:
        cause = " ".join(str(error).split())
        raise TrackingError(f"MLflow at {without_credentials(uri)} does not take points ({type(error).__name__}: {cause[:160]})") from error


def _foreign_errors() -> tuple[type[BaseException], ...]:
    """What MLflow's client raises; the small client comes without a database."""
    found: list[type[BaseException]] = [OSError]
    names = (("mlflow.exceptions", "MlflowException"), ("sqlalchemy.exc", "SQLAlchemyError"), ("alembic.util.exc", "CommandError"))
    for module, name in names:
        try:
            found.append(getattr(importlib.import_module(module), name))
        except ImportError:
            continue
    return tuple(found)
