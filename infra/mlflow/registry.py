"""A run's checkpoints as versions of one registered model.

The rule: whoever calls names what is kept, and the registry is made equal to that: asked twice it changes nothing. The alias `latest`
is MLflow's own and stands for the version with the highest number; only `best` is set here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_TAG = "penstock.step"
BEST = "best"
ARTIFACTS = "checkpoints"
"""The folder among a run's artifacts in which a server has the models: it cannot read this machine's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A checkpoint's model and its description."""

    step: int
    directory: Path
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredCheckpoints:
    """The checkpoints that exist, and which of them has the best evaluation."""

    versions: tuple[ModelVersion, ...] = ()
    best: int | None = None


def register(client: Any, *, name: str, run_id: str, checkpoints: RegisteredCheckpoints, local: bool) -> None:
    """Make the registered model `name` have exactly these versions; `local` says that MLflow reads this machine's disk."""
    found = _registered_versions(client, name)
    if not found and not checkpoints.versions:
        return
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        client.create_registered_model(name)
    for step in sorted(found.keys() - {version.step for version in checkpoints.versions}):
        client.delete_model_version(name, found.pop(step).version)
    for version in sorted(checkpoints.versions, key=lambda version: version.step):
        if version.step not in found:
            tags = {**version.tags, STEP_TAG: str(version.step)}
            source = _source(client, version, run_id=run_id, local=local)
            found[version.step] = client.create_model_version(name, source, run_id=run_id, tags=tags, await_creation_for=0)
    if checkpoints.best in found and BEST not in found[checkpoints.best].aliases:
        client.set_registered_model_alias(name, BEST, found[checkpoints.best].version)


def _registered_versions(client: Any, name: str) -> dict[int, Any]:
    """Step -> version, of those that are there."""
    versions = client.search_model_versions(f"name = '{name}'", max_results=1000)
    return {int(version.tags[STEP_TAG]): version for version in versions if STEP_TAG in version.tags}


def _source(client: Any, version: ModelVersion, *, run_id: str, local: bool) -> str:
    """Where the registry finds the model; a server is sent a copy."""
    if local:
        return version.directory.resolve().as_uri()
    place = f"{ARTIFACTS}/step-{version.step}"
    client.log_artifacts(run_id, str(version.directory), place)
    return f"{client.get_run(run_id).info.artifact_uri}/{place}"


def inputs(entities: Any, data: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A run's data sets as MLflow's inputs; each has `name`, `source`, `digest`, `rows` and `context` (training or evaluation)."""
    found = []
    for one in data:
        kind, source = _dataset_source(str(one["source"]))
        dataset = entities.Dataset(
            name=one["name"], digest=str(one["digest"])[:36], source_type=kind, source=source, profile=f'{{"num_rows": {int(one["rows"])}}}'
        )
        found.append(entities.DatasetInput(dataset, [entities.InputTag("mlflow.data.context", str(one["context"]))]))
    return found


def _dataset_source(source: str) -> tuple[str, str]:
    """MLflow's kind of a data source and its description: of the hub, a file, or made by code."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "hf":
        return "hf", json.dumps({"path": rest})
    if not colon:
        return "local", json.dumps({"uri": source})
    return "code", json.dumps({"tags": {"mlflow.source.name": source}})
