"""A child run beneath a pipeline run's MLflow run: the result of working on the run's records afterwards.

The rule: it never carries the tag by which a pipeline run finds its own MLflow run; the parent is only referred to.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.mlflow.database import make_database
from penstock.infra.mlflow.tracking import (
    MAX_PARAM_CHARS,
    MAX_PARAMS,
    MAX_POINTS,
    RUN_TAG,
    Point,
    Target,
    load_mlflow,
    nameable,
    translated,
)

PARENT_TAG = "mlflow.parentRunId"


class ChildRun:
    """A new MLflow run; `target` names the parent pipeline run and holds the child's own parameters and tags.

    Every method may raise `TrackingError`.
    """

    def __init__(self, target: Target, *, name: str) -> None:
        self._uri = target.uri
        with translated(target.uri):
            mlflow = load_mlflow()
            make_database(target.uri, fill=lambda uri: mlflow.MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
            self._client: Any = mlflow.MlflowClient(tracking_uri=target.uri)
            self._entities = importlib.import_module("mlflow.entities")
            existing = self._client.get_experiment_by_name(target.experiment)
            experiment = (
                existing.experiment_id
                if existing
                else self._client.create_experiment(target.experiment, artifact_location=target.artifacts)
            )
            self.parent_id = self._parent(experiment, target.run)
            parent = {PARENT_TAG: self.parent_id} if self.parent_id else {}
            self.run_id: str = self._client.create_run(experiment, tags={**target.tags, **parent}, run_name=name).info.run_id
            params = [self._entities.Param(key, value[:MAX_PARAM_CHARS]) for key, value in sorted(target.params.items())]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self.run_id, params=params[start : start + MAX_PARAMS])

    def log(self, points: Sequence[Point]) -> None:
        """Send points."""
        metrics = [self._entities.Metric(nameable(point.key), float(point.value), point.timestamp_ms, point.step) for point in points]
        with translated(self._uri):
            for start in range(0, len(metrics), MAX_POINTS):
                self._client.log_batch(self.run_id, metrics=metrics[start : start + MAX_POINTS])

    def finish(self, status: str, *, tags: Mapping[str, str]) -> None:
        """Set FINISHED, KILLED or FAILED, and tags with the result."""
        with translated(self._uri):
            self._client.log_batch(self.run_id, tags=[self._entities.RunTag(key, value) for key, value in tags.items()])
            self._client.set_terminated(self.run_id, status=status)

    def _parent(self, experiment: str, run: str) -> str | None:
        existing = self._client.search_runs([experiment], filter_string=f"tags.`{RUN_TAG}` = '{run}'", max_results=10)
        first = min(existing, key=lambda run: (run.info.start_time, run.info.run_id), default=None)
        return None if first is None else str(first.info.run_id)
