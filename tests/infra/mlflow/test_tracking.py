"""MLflow: found again by tag, brought up to date after an outage, and never told twice; on a real database file."""

import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import TrackingError
from penstock.infra.mlflow import uploader as uploading
from penstock.infra.mlflow.tracking import MAX_POINTS, MlflowRun, Point, Target, nameable
from penstock.infra.mlflow.uploader import Delivery, Uploader
from penstock.topics.wire.secrets import without_password
from tests.support.children import child
from tests.support.waiting import until

WAIT_S = 60.0


@pytest.fixture
def target(empty_database: Path, tmp_path: Path) -> Target:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    artifacts = (tmp_path / "artifacts").as_uri()
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    params = {f"section.key{number}": "x" * 600 for number in range(130)}
    return Target(run="demo-1", uri=uri, experiment="tests", artifacts=artifacts, params=params, tags={"colour": "blue"}, start_ms=1_000)


def points(step: int, *, count: int = 1) -> list[Point]:
    return [Point(key=f"train/m{number}", value=step / 2, timestamp_ms=1_000 + step, step=step) for number in range(count)]


class Lines:
    """A journal in memory: line n is the points of step n."""

    def __init__(self, lines: Sequence[Sequence[Point]]) -> None:
        self.lines = [Delivery(source="ledger", number=number, points=tuple(found)) for number, found in enumerate(lines)]
        self.longest_read = 0

    @property
    def end(self) -> int:
        return len(self.lines)

    @property
    def points(self) -> int:
        return sum(len(line.points) for line in self.lines)

    def read(self, place: int, *, max_points: int) -> tuple[list[Delivery], int]:
        found = [self.lines[place]] if place < self.end else []
        while (after := place + len(found)) < self.end and sum(len(line.points) for line in [*found, self.lines[after]]) <= max_points:
            found.append(self.lines[after])
        self.longest_read = max(self.longest_read, sum(len(line.points) for line in found))
        return found, place + len(found)

    def sync(self) -> None:
        pass


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
        # What was delivered in an earlier life is dropped unseen: a changed value would be a second point.
        values = [float(number) if end == 3 or number >= 3 else -1.0 for number in range(end)]
        lines = Lines([[Point(key="loss", value=value, timestamp_ms=step, step=step)] for step, value in enumerate(values)])
        uploader = Uploader(target, lines, notify=lambda _text: None)
        uploader.finish("FINISHED", end_ms=end, artifacts=[report], reason="solved: all of it")
        assert uploader.wait(WAIT_S)
        assert uploader.queued == 0
    run, steps = held(MlflowRun(replace(target, over=True)))
    assert steps("loss") == list(range(6))
    assert (run.info.status, run.info.end_time, run.data.tags["penstock.reason"]) == ("FINISHED", 6, "solved: all of it")
    assert (tmp_path / "artifacts" / run.info.run_id / "artifacts" / "report.txt").read_text() == "fine"


def test_an_outage_is_said_once_and_loses_no_point_and_holds_none_in_memory(empty_database: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.write_text("no directory, so no database")
    said: list[str] = []
    failed = threading.Event()

    def notify(text: str) -> None:
        said.append(text)
        failed.set()

    target = Target(run="demo-1", uri=f"sqlite:///{away / 'mlflow.db'}", experiment="tests", artifacts=(tmp_path / "art").as_uri())
    lines = Lines([points(number, count=100) for number in range(25)])
    uploader = Uploader(target, lines, notify=notify)
    uploader.start()
    assert failed.wait(WAIT_S)
    assert uploader.run_id is None
    assert uploader.queued == 2500
    assert lines.longest_read == 0
    away.unlink()
    away.mkdir()
    shutil.copy(empty_database, away / "mlflow.db")
    uploader.finish("FINISHED", artifacts=[])
    assert uploader.wait(WAIT_S)
    assert held(MlflowRun(target))[1]("train/m99") == list(range(25))
    assert lines.longest_read < MAX_POINTS
    assert said[0].endswith("; the run continues, and its metrics stay in metrics.jsonl until MLflow responds")
    assert said[1:] == [f"MLflow at {target.uri} responds again"]


def test_a_store_that_comes_back_older_or_empty_gets_everything_again(target: Target, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(uploading, "GATHER_S", 0.01)
    lines = Lines([points(number) for number in range(3)])
    said: list[str] = []
    uploader = Uploader(target, lines, notify=said.append)
    uploader.start()
    until(lambda: uploader.queued == 0)
    before = uploader.run_id
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    with connection:  # as after a restore of yesterday's backup
        for table in ("metrics", "latest_metrics", "tags", "params", "runs"):
            connection.execute(f"delete from {table}")
    connection.close()
    lines.lines += [Delivery(source="ledger", number=number, points=tuple(points(number))) for number in range(3, 5)]
    uploader.finish("FINISHED")
    assert uploader.wait(WAIT_S)
    assert uploader.run_id != before
    assert held(MlflowRun(target))[1]("train/m0") == list(range(5))


def test_a_second_run_made_by_an_answer_that_came_late_is_noticed_at_the_end(target: Target, monkeypatch) -> None:
    monkeypatch.setattr(uploading, "GATHER_S", 0.01)
    lines = Lines([points(number) for number in range(3)])
    uploader = Uploader(target, lines, notify=lambda _text: None)
    uploader.start()
    until(lambda: uploader.queued == 0)
    client = MlflowRun(target)._client
    experiment = client.get_run(uploader.run_id).info.experiment_id
    rival = client.create_run(experiment, start_time=1, tags={"penstock.run": target.run}).info.run_id  # before ours in their order
    uploader.finish("FINISHED")
    assert uploader.wait(WAIT_S)
    assert [run.info.run_id for run in client.search_runs([experiment])] == [rival]
    assert client.get_run(rival).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(rival, "train/m0")] == list(range(3))


def test_an_artifact_store_that_raises_errors_of_its_own_keeps_nothing_else_from_being_done(target: Target, tmp_path: Path) -> None:
    said: list[str] = []
    uploader = Uploader(target, Lines([points(0)]), notify=said.append)
    missing = tmp_path / "missing.txt"
    uploader.finish("KILLED", artifacts=[missing])
    until(lambda: bool(said))
    assert held(MlflowRun(replace(target, over=True)))[0].info.status == "KILLED"
    missing.write_text("there now")
    assert uploader.wait(WAIT_S)


@pytest.mark.parametrize(("key", "name"), [("train/loss", "train/loss"), ("train//a?b", "train/_/a_b"), ("/abs/../x", "_/abs/_/x")])
def test_a_name_that_mlflow_would_refuse_is_changed(key: str, name: str, target: Target) -> None:
    assert nameable(key) == name
    run = MlflowRun(target)
    run.log([Point(key=key, value=1.0, timestamp_ms=1, step=1), *points(1)], position={})
    assert held(run)[1](name) == [1]


MAKE = """
import sys
from penstock.infra.mlflow.tracking import MlflowRun, Target
MlflowRun(Target(run="r", uri=sys.argv[1], experiment="e"))
"""


@pytest.mark.costly
@pytest.mark.slow
def test_a_process_killed_while_it_makes_the_database_leaves_none_that_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    command = [sys.executable, "-c", MAKE, f"sqlite:///{path}"]
    with child(command):
        until(lambda: tables(tmp_path / ".mlflow.db.new") > 60)
    assert not path.exists()
    run = MlflowRun(Target(run="demo-1", uri=f"sqlite:///{path}", experiment="e"))
    run.log(points(1), position={})
    assert held(run)[1]("train/m0") == [1]
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def tables(path: Path) -> int:
    """How many tables and indexes a database has, 0 while there is none or it is being written."""
    if not path.exists():
        return 0
    connection = sqlite3.connect(path, timeout=0.0)
    try:
        return connection.execute("select count(*) from sqlite_master").fetchone()[0]
    except sqlite3.OperationalError:
        return 0
    finally:
        connection.close()


def test_a_deleted_experiment_is_one_clear_error(target: Target) -> None:
    run = MlflowRun(target)
    run._client.delete_experiment(held(run)[0].info.experiment_id)
    with pytest.raises(TrackingError, match="the MLflow experiment 'tests' was deleted: restore it, or choose another"):
        MlflowRun(target)


@pytest.mark.costly  # imports MLflow
def test_an_address_is_shown_without_its_credentials() -> None:
    assert without_password("https://me:secret@host:80/x?y=1") == "https://host:80/x?y=1"
    assert without_password("sqlite:////state/mlflow.db") == "sqlite:////state/mlflow.db"
    with pytest.raises(TrackingError) as caught:
        MlflowRun(Target(run="r", uri="http://me:secret@127.0.0.1:9", experiment="e"))
    assert str(caught.value) == "MLflow at http://127.0.0.1:9 does not respond"
