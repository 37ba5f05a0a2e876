"""Checkpoints in MLflow's model registry: what is kept is registered, what is gone is not, and asking twice changes nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.mlflow.tracking import MlflowRun, ModelVersion, RegisteredCheckpoints, Target, connect

DATA = [
    {"name": "sums", "source": "/data/arithmetic.py:sums", "digest": "a" * 64, "rows": 200, "context": "training"},
    {"name": "gsm8k", "source": "hf:openai/gsm8k", "digest": "b" * 64, "rows": 64, "context": "evaluation"},
    {"name": "held", "source": "/data/held.jsonl", "digest": "c" * 64, "rows": 8, "context": "evaluation"},
]


@pytest.fixture(scope="module")
def run(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> MlflowRun:
    place = tmp_path_factory.mktemp("registry")
    shutil.copy(empty_database, place / "mlflow.db")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    return MlflowRun(Target(run="demo-1", uri=uri, experiment="tests", artifacts=(place / "art").as_uri(), data=DATA))


def kept(directory: Path, *steps: int, best: int | None = None) -> RegisteredCheckpoints:
    versions = []
    for step in steps:
        (directory / f"step-{step}" / "model").mkdir(parents=True, exist_ok=True)
        tags = {"penstock.run": "demo-1", "penstock.version": str(step), "penstock.ledger_offset": "7", "penstock.digest": f"{step:x}"}
        versions.append(ModelVersion(step=step, directory=directory / f"step-{step}" / "model", tags=tags))
    return RegisteredCheckpoints(versions=tuple(versions), best=best)


def registered(run: MlflowRun) -> dict[str, Any]:
    client, _ = connect(run.target.uri)
    return {found.tags["penstock.step"]: found for found in client.search_model_versions("name = 'demo-1'")}


def test_each_kept_checkpoint_is_a_version_with_its_tags_and_those_that_are_gone_are_deleted(run: MlflowRun, tmp_path: Path) -> None:
    client, _ = connect(run.target.uri)
    run.register(kept(tmp_path, 40, 20, best=20))
    first = registered(run)
    assert {step: found.version for step, found in first.items()} == {"20": 1, "40": 2}
    assert first["40"].tags["penstock.ledger_offset"] == "7" and first["40"].run_id == run.run_id
    assert first["40"].source == (tmp_path / "step-40" / "model").as_uri()
    run.register(kept(tmp_path, 40, 20, best=20))
    assert {step: found.version for step, found in registered(run).items()} == {"20": 1, "40": 2}
    assert client.get_model_version_by_alias("demo-1", "best").version == 1
    run.register(kept(tmp_path, 40, 60, best=60))
    assert {step: found.version for step, found in registered(run).items()} == {"40": 2, "60": 3}
    assert client.get_model_version_by_alias("demo-1", "best").version == 3
    assert client.get_model_version_by_alias("demo-1", "latest").version == 3


def test_data_sets_are_inputs_of_the_run_by_kind_digest_and_context(run: MlflowRun) -> None:
    client, _ = connect(run.target.uri)
    MlflowRun(run.target)  # a restarted tracker
    inputs = client.get_run(run.run_id).inputs.dataset_inputs
    found = {one.dataset.name: (one.dataset.source_type, one.dataset.digest, one.tags[0].value) for one in inputs}
    assert len(inputs) == 3
    assert found == {
        "sums": ("code", "a" * 36, "training"), "gsm8k": ("hf", "b" * 36, "evaluation"), "held": ("local", "c" * 36, "evaluation"),
    }  # fmt: skip
    assert json.loads(inputs[0].dataset.profile)["num_rows"] in (200, 64, 8)
