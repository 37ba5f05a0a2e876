"""SIGKILL of the tracker at any instant, and an MLflow server that dies, hangs and breaks: every point once, in one MLflow run."""

import json
import math
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.mlflow import uploader
from penstock.infra.paths import state_path
from penstock.pipeline.config.load import from_json
from penstock.pipeline.inspect.metrics import Line, Points
from penstock.pipeline.inspect.run_view import RunView
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from penstock.topics.wire.record import Outgoing
from penstock.workers.tracker import worker
from tests.support import page_records
from tests.support.a_run import RecordBuilder
from tests.support.mlflow_server import MlflowServer
from tests.support.processes import Processes
from tests.support.waiting import until

LIMIT_S = 120.0
Point = tuple[str, int, int, float | None]
"""(name, step, milliseconds, value), None for a value that is not a number."""


def hurry() -> None:
    """In the tracker's process: small batches, so that a kill falls between two of them, and no waiting for stragglers."""
    uploader.MAX_POINTS, uploader.GATHER_S = 40, 0.02
    worker.CLOSED_S, worker.SETTLE_S, worker.POLL_S = 0.5, 0.0, 0.05


@dataclass
class Story:
    """A run that is told to the log piece by piece while trackers follow it."""

    log: KafkaLog
    run: str
    home: Path
    untold: list[Outgoing]

    def tell(self, count: int | None = None) -> None:
        """Write the next records, or all that are left."""
        now, self.untold = self.untold[:count], self.untold[count:] if count is not None else []
        page_records.write(self.log, now)

    @property
    def file(self) -> Path:
        return self.home / "runs" / self.run / "metrics.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the file, all of them whole."""
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def points(self) -> list[Point]:
        found = []
        for line in self.lines():
            when = round(line["time"] * 1000)
            values = {name: value for name, value in line.items() if value is None or isinstance(value, float)}
            found += [(name, line["step"], when, value) for name, value in values.items() if name != "time"]
        return found

    def expected(self) -> list[Line]:
        """The lines that the log makes, but for those about the trackers themselves."""
        partitions = [(f"{self.run}.{name}", 0) for name in ("ledger", "metrics", "groups")] + [(RUNS_TOPIC, 0)]
        tail = self.log.tail(dict.fromkeys(partitions, "earliest"))
        records = tail.read_to_end()
        tail.close()
        view, found = RunView(run=self.run), []
        record = next(record for record in records if record.topic == RUNS_TOPIC and record.key == self.run.encode())
        view.fold(record)
        assert view.record is not None
        points = Points(created_ms=view.record.created_ns // 1_000_000, schedule=from_json(view.record.config).rules)
        for record in records:
            if record.topic != RUNS_TOPIC and (folded := view.fold(record)) is not None:
                found += points.of(folded, record, source=record.topic.removeprefix(f"{self.run}."))
        found += points.rewards(view, before=(view.version or 0) + 1)
        return [line for line in found if line.labels.get("worker") != "tracker"]


@pytest.fixture
def story(broker: str, run_id: str, tmp_path: Path) -> Iterator[Callable[..., Story]]:
    logs = []

    def begin(*, steps: int, **config: Any) -> Story:
        log = KafkaLog(broker, client_id="tests")
        logs.append(log)
        log.create_topics({RUNS_SPEC.name: RUNS_SPEC})
        log.create_topics(topics_of(run_id, partitions=1))
        home = tmp_path / "state"
        home.mkdir()
        (home / "broker").symlink_to(state_path() / "broker")  # with the broker's password
        builder = RecordBuilder(run_id, steps=steps, created_s=time.time() - 3600, config=config)
        return Story(log, run_id, home, list(builder.whole()))

    yield begin
    for log in logs:
        log.close()


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    """What a database says; nothing while it is not there or being written."""
    if not database.exists():
        return []
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=0.0)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        connection.close()


def count(database: Path, table: str) -> int:
    return next(iter(rows(database, f"select count(*) from {table}")), (0,))[0]


def of_client(uri: str, keys: Iterable[str]) -> tuple[Any, list[Point]]:
    """The one MLflow run there is, and its points, as MLflow's client has them."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("penstock").experiment_id], run_view_type=3)
    history = [(key, point) for key in keys for point in client.get_metric_history(run.info.run_id, key)]
    return run, [(key, point.step, point.timestamp, None if math.isnan(point.value) else point.value) for key, point in history]


def check(built: Story, *, uri: str, database: Path) -> None:
    """Every point once in the file, in the database and for the client; one MLflow run, ended as the run did."""
    lines, points = built.lines(), built.points()
    places = Counter((line["from"], line["number"]) for line in lines)
    assert max(places.values()) == 1
    assert max(Counter(points).values()) == 1
    known = {(line["from"], line["number"]): line for line in lines}
    for line in built.expected():
        found = known[line.source, line.number]
        assert {name: found[name] for name in line.values} == line.values
        assert (found["step"], round(found["time"] * 1000)) == (line.step, line.timestamp_ms)
    stored = rows(database, "select key, step, timestamp, value, is_nan from metrics")
    assert Counter((key, step, when, None if nan else value) for key, step, when, value, nan in stored) == Counter(points)
    run, given = of_client(uri, {point[0] for point in points})
    assert Counter(given) == Counter(points)
    assert count(database, "runs") == 1
    assert run.info.status == "FINISHED"
    assert json.loads((built.file.parent / "report.json").read_text())["mlflow_run_id"] == run.info.run_id


@pytest.mark.slow
def test_a_tracker_killed_again_and_again_has_every_point_once(story, broker: str, tmp_path: Path):
    built, chance = story(steps=24), random.Random(4)
    database, unborn = built.home / "mlflow.db", built.home / ".mlflow.db.new"
    settings = {"PENSTOCK_HOME": str(built.home)}
    built.tell(60)
    with Processes(broker, built.run, tmp_path) as workers:
        for kill in range(3):
            before = count(database, "metrics") + chance.randrange(20, 120)
            workers.start("tracker", environment=settings, before=hurry)
            until((lambda: count(unborn, "sqlite_master") > 60) if kill == 0 else lambda: count(database, "metrics") > before)  # noqa: B023
            workers.kill("tracker")
            built.tell(140 if kill < 2 else None)
            if kill > 0:  # and the machine with it: the end of the file is lost
                os.truncate(built.file, built.file.stat().st_size - chance.randrange(1, 400))
        workers.start("tracker", environment=settings, before=hurry)
        assert workers.ended("tracker", limit_s=LIMIT_S) == 0, workers.text("tracker")
    check(built, uri=f"sqlite:///{database}", database=database)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_server_that_dies_hangs_and_breaks_under_a_tracker_that_is_killed_has_every_point_once(story, broker, tmp_path: Path, seed: int):
    chance = random.Random(seed)
    with MlflowServer(tmp_path) as server, Processes(broker, f"t{seed}", tmp_path) as workers:
        built = story(steps=150, mlflow={"tracking_uri": server.uri})
        workers.run = built.run
        settings = {"PENSTOCK_HOME": str(built.home), "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}

        def follow() -> None:
            workers.start("tracker", environment=settings, before=hurry)

        def grown(rows: int) -> Callable[[], bool]:
            enough = count(server.database, "metrics") + rows
            return lambda: count(server.database, "metrics") >= enough

        def written(lines: int) -> Callable[[], bool]:
            enough = built.file.read_bytes().count(b"\n") + lines
            return lambda: built.file.read_bytes().count(b"\n") >= enough

        built.tell(100)
        follow()  # nobody answers yet
        until(lambda: "does not respond" in workers.text("tracker"))
        server.start()
        for turn in range(3):
            until(grown(chance.randrange(10, 60)))
            server.kill()
            built.tell(60)
            until(written(10))
            if turn == 1:
                workers.kill("tracker")
                follow()
            with server.broken() as asked:
                until(lambda asked=asked: asked)
                built.tell(30)
            server.start()
            built.tell(60)
            until(grown(chance.randrange(10, 60)))
            server.signal(signal.SIGSTOP)
            built.tell(60)
            until(written(10))
            if turn != 1:  # a request that was given up on is still in the server's hands
                workers.kill("tracker")
                follow()
                until(lambda: workers.text("tracker").count("MLflow at") > 1)
            server.signal(signal.SIGCONT)
            until(grown(chance.randrange(10, 60)))
            workers.kill("tracker")
            built.tell(60)
            follow()
        built.tell()
        assert workers.ended("tracker", limit_s=LIMIT_S) == 0, workers.text("tracker")
        check(built, uri=server.uri, database=server.database)


@pytest.mark.slow
def test_a_tracker_started_when_the_run_is_long_over_delivers_what_an_absent_server_lacks(story, broker, tmp_path: Path):
    with MlflowServer(tmp_path) as server, Processes(broker, "late", tmp_path) as workers:
        built = story(steps=12, mlflow={"tracking_uri": server.uri})
        workers.run = built.run
        settings = {"PENSTOCK_HOME": str(built.home)}
        built.tell()
        workers.start("tracker", environment=settings, before=give_up_soon)
        assert workers.ended("tracker") == 0
        assert f"send them with `penstock worker tracker --run {built.run}`" in workers.text("tracker")
        server.start()
        workers.start("tracker", environment=settings, before=hurry)
        assert workers.ended("tracker") == 0
        check(built, uri=server.uri, database=server.database)


def give_up_soon() -> None:
    """In the tracker's process: MLflow is not waited for at the end."""
    hurry()
    worker.MLFLOW_END_S = 1.0
