"""What the tests of MLflow share."""

from pathlib import Path

import pytest

from penstock.infra.mlflow.tracking import MlflowRun, Target


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowRun(Target(run="none", uri=f"sqlite:///{path}", experiment="none", artifacts=(path.parent / "art").as_uri()))
    return path
