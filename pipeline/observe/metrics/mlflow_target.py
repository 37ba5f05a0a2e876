"""Where a run is tracked in MLflow, as its configuration says it.

The rule: whoever writes to a run's experiment asks here, so that tracker, what-if and fork stand side by side.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.mlflow.child_run import PARENT_TAG
from penstock.infra.mlflow.tracking import Target
from penstock.infra.paths import state_directory
from penstock.pipeline.config.load import Config
from penstock.pipeline.observe.metrics.points import flatten
from penstock.topics.runs import RunRecord

FORKED_TAG = "penstock.forked_from"


def target_of(
    record: RunRecord,
    config: Config,
    *,
    tags: Mapping[str, str],
    params: Mapping[str, Any] | None = None,
    data: Sequence[Mapping[str, Any]] = (),
) -> Target:
    """The run's place in MLflow; its configuration, or another table, as parameters, and `data` as its data sets."""
    state = state_directory()
    chosen, table = config.mlflow, json.loads(record.config) if params is None else params
    uri = chosen.tracking_uri or f"sqlite:///{state / 'mlflow.db'}"
    return Target(
        run=record.run,
        uri=uri,
        experiment=chosen.experiment,
        # A database has no place for files of its own: MLflow would take the working directory, whichever that is.
        artifacts=(state / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None,
        params=flatten(table),
        tags=tags,
        data=data,
        start_ms=record.created_ns // 1_000_000,
        over=record.status in ("finished", "failed"),
    )


def lineage(info: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a run that was forked from another; nothing for one that was not."""
    origin = info.get("forked_from")
    if not isinstance(origin, Mapping):
        return {}
    found = {FORKED_TAG: str(origin["run"]), f"{FORKED_TAG}.step": str(origin["step"]), f"{FORKED_TAG}.digest": str(origin["digest"])}
    return found | ({PARENT_TAG: str(origin["mlflow_run_id"])} if origin.get("mlflow_run_id") else {})
