"""A child run of a pipeline run's MLflow run, with results of later work on the run's records.

It never carries the tag that identifies a pipeline run's own MLflow run; it only refers to its parent.
"""

from collections.abc import Mapping, Sequence

from penstock.infra.mlflow.tracking import MAX_POINTS, Point, Target, connect, log_params, metrics_of, runs_of, translated

PARENT_TAG = "mlflow.parentRunId"


class ChildRun:
    """A new MLflow run; `target` names the parent pipeline run and has the child's own parameters and tags.

    Every method may raise `TrackingError`.
    """

    def __init__(self, target: Target, *, name: str) -> None:
        self._uri = target.uri
        with translated(target.uri):
            self._client, self._entities = connect(target.uri)
            experiment = self._client.get_experiment_by_name(target.experiment)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(target.experiment, artifact_location=target.artifacts)
            )
            first = next(iter(runs_of(self._client, experiment_id, target.run)), None)
            self.parent_id = None if first is None else str(first.info.run_id)
            parent = {PARENT_TAG: self.parent_id} if self.parent_id else {}
            self.run_id: str = self._client.create_run(experiment_id, tags={**target.tags, **parent}, run_name=name).info.run_id
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
