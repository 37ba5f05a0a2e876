"""MLflow experiment and tags of a run, from its configuration; used by tracker, what-if replays and forks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.infra.mlflow.child_run import PARENT_TAG
from penstock.infra.mlflow.tracking import Target
from penstock.infra.paths import state_directory
from penstock.pipeline.config.load import Config, to_json
from penstock.pipeline.inspect.metrics.points import flatten
from penstock.topics.runs import RunRecord

FORKED_TAG = "penstock.forked_from"


def target_of(
    record: RunRecord,
    config: Config,
    *,
    tags: Mapping[str, str],
    changed: Config | None = None,
    data: Sequence[Mapping[str, Any]] = (),
) -> Target:
    """The run's MLflow target; its configuration, or a `changed` one, as parameters, and `data` as its data sets."""
    state = state_directory()
    chosen = config.mlflow
    uri = chosen.tracking_uri or f"sqlite:///{state / 'mlflow.db'}"
    return Target(
        run=record.run,
        uri=uri,
        experiment=chosen.experiment,
        # A database stores no files: MLflow would put them into the working directory.
        artifacts=(state / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None,
        params=flatten(settled(changed or config)),
        tags=tags,
        data=data,
        start_ms=record.created_ns // 1_000_000,
        over=record.status in ("finished", "failed"),
    )


def settled(config: Config) -> dict[str, Any]:
    """A run's keys, those that were left to its loss or its schedule with the values that these have.

    Example:
        settled(config)["schedule"]["max_lag"]  # -> 4, where only the mode "in_flight" is given
    """
    table: dict[str, Any] = json.loads(to_json(config))
    for name, owner in (("algorithm", config), ("schedule", config.rules), ("kafka", config)):
        table[name] = {key: getattr(owner, key, None) if value is None else value for key, value in table[name].items()}
    return table


def lineage(info: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a run that was forked from another; nothing for one that was not."""
    origin = info.get("forked_from")
    if not isinstance(origin, Mapping):
        return {}
    tags = {FORKED_TAG: str(origin["run"]), f"{FORKED_TAG}.step": str(origin["step"]), f"{FORKED_TAG}.digest": str(origin["digest"])}
    return tags | ({PARENT_TAG: str(origin["mlflow_run_id"])} if origin.get("mlflow_run_id") else {})
