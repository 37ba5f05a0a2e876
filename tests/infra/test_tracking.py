"""MLflow: found again by tag, brought up to date after an outage, and never told twice; on a real database file."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.errors import TrackingError
from infra.tracking import MAX_POINTS, MlflowRun, Point, Target, without_credentials
from infra.uploader import Uploader

WAIT_S = 60.0


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables: making one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowRun(Target(run="none", uri=f"sqlite:///{path}", experiment="none", artifacts=(path.parent / "art").as_uri()))
    return path


@pytest.fixture
def target(empty_database: Path, tmp_path: Path) -> Target:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    artifacts = (tmp_path / "artifacts").as_uri()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    params = {f"section.key{number}": "x" * 600 for number in range(130)}
    return Target(run="demo-1", uri=uri, experiment="tests", artifacts=artifacts, params=params, tags={"colour": "blue"}, start_ms=1_000)


def points(step: int, *, count: int = 1) -> list[Point]:
    return [Point(key=f"train/m{number}", value=step / 2, timestamp_ms=1_000 + step, step=step) for number in range(count)]


def held(run: MlflowRun) -> tuple[Any, Callable[[str], list[int]]]:
    """The run as MLflow has it, and the steps of a metric."""
    client = run._client

    def steps(key: str) -> list[int]:
        return [point.step for point in client.get_metric_history(run.run_id, key)]

    return client.get_run(run.run_id), steps


def test_a_pipeline_run_has_one_mlflow_run_however_often_it_is_opened(target: Target) -> None:
    first = MlflowRun(target)
    first.finish("KILLED")
    second = MlflowRun(target)
    assert second.run_id == first.run_id
    run, _ = held(second)
    assert run.info.status == "RUNNING"
    assert run.info.start_time == 1_000
    assert run.data.tags["colour"] == "blue"
    assert len(run.data.params) == 130
    assert {len(value) for value in run.data.params.values()} == {500}


def test_of_two_runs_made_in_the_same_instant_one_stays(target: Target) -> None:
    first = MlflowRun(target)
    client = first._client
    rival = client.create_run(held(first)[0].info.experiment_id, tags={"penstock.run": target.run})
    assert MlflowRun(target).run_id == first.run_id
    assert client.get_run(rival.info.run_id).info.lifecycle_stage == "deleted"


def test_a_batch_as_large_as_the_server_takes_goes_through(target: Target) -> None:
    run = MlflowRun(target)
    run.log(points(1, count=MAX_POINTS), position={"ledger": 7})
    assert MlflowRun(target).position == {"ledger": 7}
    assert held(run)[1](f"train/m{MAX_POINTS - 1}") == [1]


def test_the_same_point_twice_is_one_point(target: Target) -> None:
    run = MlflowRun(target)
    for _ in range(2):
        run.log([*points(1), *points(2)], position={})
    assert held(run)[1]("train/m0") == [1, 2]


def test_a_second_uploader_goes_on_where_the_first_ended(target: Target, tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    report.write_text("fine")
    for end in (3, 6):
        uploader = Uploader(target, say=lambda _text: None)
        for number in range(end):
            # What was delivered in an earlier life is dropped unseen: a changed value would be a second point.
            value = float(number) if end == 3 or number >= 3 else -1.0
            uploader.put([Point(key="loss", value=value, timestamp_ms=number, step=number)], source="ledger", number=number)
        uploader.finish("FINISHED", artifacts=[report])
        assert uploader.wait(WAIT_S)
        assert uploader.queued == 0
    run, steps = held(MlflowRun(target))
    assert steps("loss") == list(range(6))
    assert (tmp_path / "artifacts" / run.info.run_id / "artifacts" / "report.txt").read_text() == "fine"


def test_an_outage_is_said_once_and_loses_no_point(empty_database: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.write_text("no directory, so no database")
    said: list[str] = []
    failed = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        failed.set()

    target = Target(run="demo-1", uri=f"sqlite:///{away / 'mlflow.db'}", experiment="tests", artifacts=(tmp_path / "art").as_uri())
    uploader = Uploader(target, say=say)
    for number in range(20):
        uploader.put(points(number), source="ledger", number=number)
    assert failed.wait(WAIT_S)
    assert uploader.run_id is None
    assert uploader.queued == 20
    away.unlink()
    away.mkdir()
    shutil.copy(empty_database, away / "mlflow.db")
    uploader.finish("FINISHED", artifacts=[])
    assert uploader.wait(WAIT_S)
    assert held(MlflowRun(target))[1]("train/m0") == list(range(20))
    assert said[0].endswith("; the run goes on, and its points wait in the log")
    assert said[1:] == [f"MLflow at {target.uri} answers again"]


def test_a_deleted_experiment_is_one_clear_error(target: Target) -> None:
    run = MlflowRun(target)
    run._client.delete_experiment(held(run)[0].info.experiment_id)
    with pytest.raises(TrackingError, match="the MLflow experiment 'tests' was deleted: restore it, or choose another"):
        MlflowRun(target)


def test_an_address_is_shown_without_its_credentials() -> None:
    assert without_credentials("https://me:secret@host:80/x?y=1") == "https://host:80/x?y=1"
    assert without_credentials("sqlite:////state/mlflow.db") == "sqlite:////state/mlflow.db"
    with pytest.raises(TrackingError) as caught:
        MlflowRun(Target(run="r", uri="http://me:secret@127.0.0.1:9", experiment="e"))
    assert str(caught.value) == "MLflow at http://127.0.0.1:9 does not answer"
