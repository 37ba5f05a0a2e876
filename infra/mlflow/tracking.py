"""One MLflow run per pipeline run, child runs with results of later work on its records, and its checkpoints as a registered model.

A pipeline run never has a second one. After its points a tag stores how far they were delivered, so that a restarted tracker continues
there; a point delivered twice is one point, as MLflow's databases have one row for each (name, step, time, value). The registry is made
equal to the caller's list. The alias `latest` is MLflow's own: the version with the highest number; only `best` is set here.
"""

import fcntl
import importlib
import json
import logging
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.engines.packages import left_out
from penstock.infra.errors import TrackingError
from penstock.topics.wire.secrets import without_password
from penstock.topics.wire.visible import visible

STEP_TAG = "penstock.step"
BEST = "best"
ARTIFACTS = "checkpoints"
"""Folder among a run's artifacts to which models are uploaded for a server, which cannot read this machine's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A checkpoint's model with its tags."""

    step: int
    directory: Path
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCheckpoints:
    """The existing checkpoints, and the step of the one with the best evaluation."""

    versions: tuple[ModelVersion, ...] = ()
    best: int | None = None


def register(client: Any, *, name: str, run_id: str, checkpoints: RegisteredCheckpoints, local: bool) -> None:
    """Make the registered model `name` have exactly these versions; `local`: MLflow reads this machine's disk."""
    versions = client.search_model_versions(f"name = '{name}'", max_results=1000)
    registered = {int(version.tags[STEP_TAG]): version for version in versions if STEP_TAG in version.tags}
    if not registered and not checkpoints.versions:
        return
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        client.create_registered_model(name)
    for step in sorted(registered.keys() - {version.step for version in checkpoints.versions}):
        client.delete_model_version(name, registered.pop(step).version)
    for version in sorted(checkpoints.versions, key=lambda version: version.step):
        if version.step not in registered:
            tags = {**version.tags, STEP_TAG: str(version.step)}
            source = _source(client, version, run_id=run_id, local=local)
            registered[version.step] = client.create_model_version(name, source, run_id=run_id, tags=tags, await_creation_for=0)
    if checkpoints.best in registered and BEST not in registered[checkpoints.best].aliases:
        client.set_registered_model_alias(name, BEST, registered[checkpoints.best].version)


def _source(client: Any, version: ModelVersion, *, run_id: str, local: bool) -> str:
    """Return the address of the model for the registry; for a server, the model is uploaded first."""
    if local:
        return version.directory.resolve().as_uri()
    folder = f"{ARTIFACTS}/step-{version.step}"
    client.log_artifacts(run_id, str(version.directory), folder)
    return f"{client.get_run(run_id).info.artifact_uri}/{folder}"


def inputs(entities: Any, data: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a run's data sets as MLflow's inputs; each has `name`, `source`, `digest`, `rows` and `context` (training or evaluation)."""
    rows = []
    for entry in data:
        kind, source = _dataset_source(str(entry["source"]))
        profile = f'{{"num_rows": {int(entry["rows"])}}}'
        dataset = entities.Dataset(name=entry["name"], digest=str(entry["digest"])[:36], source_type=kind, source=source, profile=profile)
        rows.append(entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", str(entry["context"]))]))
    return rows


def _dataset_source(source: str) -> tuple[str, str]:
    """Return MLflow's kind and description of a data source: from the hub, a file, or code."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "hf":
        return "hf", json.dumps({"path": rest})
    if not colon:
        return "local", json.dumps({"uri": source})
    return "code", json.dumps({"tags": {"mlflow.source.name": source}})


RUN_TAG = "penstock.run"
POSITION_TAG = "penstock.position"
REASON_TAG = "penstock.reason"
MAX_POINTS = 1000
"""Number of metrics in one request: the server's limit."""
MAX_PARAMS = 100
MAX_PARAM_CHARS = 500
MAX_NAME_CHARS = 250

_SQLITE = "sqlite:///"
_UNNAMEABLE = re.compile(r"[^/\w.\- :]")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    # The client's own retries would hide an outage for minutes; the uploader's are reported and end with the run.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of one metric at one time; sending it twice stores one point."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The MLflow run in which a pipeline run is tracked."""

    run: str
    uri: str
    experiment: str
    artifacts: str | None = None
    """URI of the artifact store of a new experiment; the server's default if None."""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[Mapping[str, Any]] = ()
    """The data sets: `name`, `source`, `digest`, `rows` and `context` of each."""
    start_ms: int | None = None
    over: bool = False
    """True if the pipeline run has ended: missing points are delivered without showing it as running."""

    @property
    def local(self) -> bool:
        """True if MLflow is a database file of this machine, and not a server."""
        return self.uri.startswith("sqlite:")


class MlflowRun:
    """The MLflow run of one pipeline run, identified by its tag; created once. Every method may raise `TrackingError`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        with translated(target.uri):
            self._client, self._entities = connect(target.uri)
            run = self._find_or_create()
            self.run_id: str = run.info.run_id
            self.position: dict[str, int] = _position(run.data.tags.get(POSITION_TAG))
            log_params(self._client, self._entities, self.run_id, target.params)
            if target.data:
                self._client.log_inputs(self.run_id, inputs(self._entities, target.data))
            if run.info.status != "RUNNING" and not target.over:  # an earlier tracker was stopped
                self._client.update_run(self.run_id, status="RUNNING")

    def log(self, points: Sequence[Point], *, position: Mapping[str, int]) -> None:
        """Send points; the last request also stores how far each source has been delivered."""
        merged = {**self.position, **position}
        metrics = metrics_of(self._entities, points)
        tag = self._entities.RunTag(POSITION_TAG, json.dumps(merged))
        limit = MAX_POINTS - 1  # the server's limit covers items of all kinds; one is the tag
        with translated(self.target.uri):
            for start in range(0, max(1, len(metrics)), limit):
                last = start + limit >= len(metrics)
                self._client.log_batch(self.run_id, metrics=metrics[start : start + limit], tags=[tag] if last else [])
        self.position = merged

    def register(self, checkpoints: RegisteredCheckpoints) -> None:
        """Make the existing checkpoints the versions of the registered model named after the pipeline run."""
        with translated(self.target.uri):
            register(self._client, name=self.target.run, run_id=self.run_id, checkpoints=checkpoints, local=self.target.local)

    def finish(self, status: str, *, end_ms: int | None = None, artifacts: Sequence[Path] = (), reason: str | None = None) -> None:
        """Set FINISHED, KILLED or FAILED and the reason, then attach files; `end_ms`: end of the pipeline run, by default now."""
        with translated(self.target.uri):
            # A request that timed out may have created a second run after the search.
            if self._find_or_create().info.run_id != self.run_id:
                shown = without_password(self.target.uri)
                raise TrackingError(f"MLflow at {shown} has a second run of {self.target.run} after a timeout; the first one is used")
            if reason is not None:
                self._client.set_tag(self.run_id, REASON_TAG, visible(reason))
            self._client.set_terminated(self.run_id, status=status, end_time=end_ms)
            for path in artifacts:
                self._client.log_artifact(self.run_id, str(path))

    def _find_or_create(self) -> Any:
        """Return the oldest MLflow run with this pipeline run's tag, created if missing; others with the tag are deleted."""
        target, number = self.target, _experiment(self._client, self.target)
        if not runs_of(self._client, number, target.run):
            tags = {**target.tags, RUN_TAG: target.run}
            self._client.create_run(number, start_time=target.start_ms, tags=tags, run_name=target.run)
        first, *others = runs_of(self._client, number, target.run)
        for other in others:  # created at the same time, by a second tracker or by a request that had timed out
            self._client.delete_run(other.info.run_id)
        return first


def _experiment(client: Any, target: Target) -> str:
    """Return the id of the target's experiment, created if missing. Raises `TrackingError` if it was deleted."""
    experiment = client.get_experiment_by_name(target.experiment)
    if experiment is None:
        return str(client.create_experiment(target.experiment, artifact_location=target.artifacts))
    if experiment.lifecycle_stage != "active":
        raise TrackingError(f"the MLflow experiment {target.experiment!r} was deleted: restore it, or choose another mlflow.experiment")
    return str(experiment.experiment_id)


def connect(uri: str) -> tuple[Any, Any]:
    """Return a client of the server, or of the database file, created if missing, and the module of its entities."""
    mlflow = load_mlflow()
    make_database(uri, fill=lambda uri: mlflow.MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
    return mlflow.MlflowClient(tracking_uri=uri), importlib.import_module("mlflow.entities")


def runs_of(client: Any, experiment: str, run: str) -> list[Any]:
    """Return the MLflow runs of a pipeline run, the oldest first."""
    runs = client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{run}'", max_results=10)
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def metrics_of(entities: Any, points: Sequence[Point]) -> list[Any]:
    """Convert points to metrics of the MLflow client."""
    return [entities.Metric(nameable(point.key), float(point.value), point.timestamp_ms, point.step) for point in points]


def log_params(client: Any, entities: Any, run_id: str, values: Mapping[str, str]) -> None:
    """Send parameters, in requests within the server's limit."""
    params = [entities.Param(key, value[:MAX_PARAM_CHARS]) for key, value in sorted(values.items())]
    for start in range(0, len(params), MAX_PARAMS):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS])


def nameable(key: str) -> str:
    """Replace what a metric's name must not contain in MLflow; a rejected name would block every later point.

    Example:
        nameable("train/a//b?")  # -> "train/a/_/b_"
    """
    parts = _UNNAMEABLE.sub("_", key)[:MAX_NAME_CHARS].split("/")
    return posixpath.join(*("_" if part in ("", ".", "..") else part for part in parts))


def _position(tag: str | None) -> dict[str, int]:
    """Parse the tag with the delivered number of each source; {} if it is missing or malformed."""
    try:
        position = json.loads(tag or "{}")
    except ValueError:
        return {}
    return {str(key): int(value) for key, value in position.items()} if isinstance(position, dict) else {}


def load_mlflow() -> Any:
    """Import MLflow's client library with quiet logging, and return it. Raises `TrackingError` if it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with left_out("pandas"):  # MLflow imports it for data frames: half a second of CPU time
            mlflow = importlib.import_module("mlflow")
    except ImportError as error:
        raise TrackingError("mlflow is not installed: pip install '.[tracking]' in the checkout, or set mlflow.enabled = false") from error
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Translate errors of MLflow's client that the block raises into `TrackingError`, one line."""
    try:
        yield
    except TrackingError:
        raise
    except _foreign_errors() as error:
        cause = _CREDENTIALS.sub("//", " ".join(str(error).split()))
        # The client wraps connection errors in messages of its own.
        silent = isinstance(error, OSError) or "failed with exception" in cause
        outcome = "does not respond" if silent else f"refuses: {cause[:200]}"
        raise TrackingError(f"MLflow at {without_password(uri)} {outcome}") from error


def _foreign_errors() -> tuple[type[BaseException], ...]:
    """Return the exception types that MLflow's client raises; the skinny client comes without a database."""
    kinds: list[type[BaseException]] = [OSError]
    names = (("mlflow.exceptions", "MlflowException"), ("sqlalchemy.exc", "SQLAlchemyError"), ("alembic.util.exc", "CommandError"))
    for module, name in names:
        try:
            kinds.append(getattr(importlib.import_module(module), name))
        except ImportError:
            continue
    return tuple(kinds)


def make_database(uri: str, *, fill: Callable[[str], None]) -> None:
    """Create the database file of a `sqlite:///` address if it is missing; `fill` creates the tables at the address it gets.

    MLflow creates tables over seconds and without transactions; a process killed meanwhile would leave a database that MLflow cannot open.
    So they are created in another file, which is renamed when it is complete.
    """
    path = _file(uri)
    if path is None or _has_content(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    # A killed process releases the lock; the next one starts over.
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _has_content(path):
            return
        for old in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
            old.unlink(missing_ok=True)
        fill(f"{_SQLITE}{unfinished}")
        unfinished.rename(path)


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _file(uri: str) -> Path | None:
    name = uri.removeprefix(_SQLITE)
    return Path(name) if name and name != uri and not name.startswith((":memory:", "file:")) else None


PARENT_TAG = "mlflow.parentRunId"


class ChildRun:
    """A new MLflow run; `target` names the parent pipeline run and has the child's own parameters and tags.

    Every method may raise `TrackingError`.
    """

    def __init__(self, target: Target, *, name: str) -> None:
        self._uri = target.uri
        with translated(target.uri):
            self._client, self._entities = connect(target.uri)
            experiment = _experiment(self._client, target)
            first = next(iter(runs_of(self._client, experiment, target.run)), None)
            self.parent_id = None if first is None else str(first.info.run_id)
            parent = {PARENT_TAG: self.parent_id} if self.parent_id else {}
            self.run_id: str = self._client.create_run(experiment, tags={**target.tags, **parent}, run_name=name).info.run_id
            log_params(self._client, self._entities, self.run_id, target.params)

    def log(self, points: Sequence[Point]) -> None:
        metrics = metrics_of(self._entities, points)
        with translated(self._uri):
            for start in range(0, len(metrics), MAX_POINTS):
                self._client.log_batch(self.run_id, metrics=metrics[start : start + MAX_POINTS])

    def finish(self, status: str, *, tags: Mapping[str, str]) -> None:
        """Set FINISHED, KILLED or FAILED, and tags with the result."""
        with translated(self._uri):
            self._client.log_batch(self.run_id, tags=[self._entities.RunTag(key, value) for key, value in tags.items()])
            self._client.set_terminated(self.run_id, status=status)
