"""A run's checkpoints as versions of one registered model.

The registry is made equal to the caller's list, so a second call changes nothing. The alias `latest` is MLflow's own: the version with the
highest number; only `best` is set here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    registered = _registered_versions(client, name)
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


def _registered_versions(client: Any, name: str) -> dict[int, Any]:
    versions = client.search_model_versions(f"name = '{name}'", max_results=1000)
    return {int(version.tags[STEP_TAG]): version for version in versions if STEP_TAG in version.tags}


def _source(client: Any, version: ModelVersion, *, run_id: str, local: bool) -> str:
    """Address of the model for the registry; a server gets a copy."""
    if local:
        return version.directory.resolve().as_uri()
    folder = f"{ARTIFACTS}/step-{version.step}"
    client.log_artifacts(run_id, str(version.directory), folder)
    return f"{client.get_run(run_id).info.artifact_uri}/{folder}"


def inputs(entities: Any, data: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A run's data sets as MLflow's inputs; each has `name`, `source`, `digest`, `rows` and `context` (training or evaluation)."""
    rows = []
    for entry in data:
        kind, source = _dataset_source(str(entry["source"]))
        profile = f'{{"num_rows": {int(entry["rows"])}}}'
        dataset = entities.Dataset(name=entry["name"], digest=str(entry["digest"])[:36], source_type=kind, source=source, profile=profile)
        rows.append(entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", str(entry["context"]))]))
    return rows


def _dataset_source(source: str) -> tuple[str, str]:
    """MLflow's kind and description of a data source: from the hub, a file, or code."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "hf":
        return "hf", json.dumps({"path": rest})
    if not colon:
        return "local", json.dumps({"uri": source})
    return "code", json.dumps({"tags": {"mlflow.source.name": source}})
