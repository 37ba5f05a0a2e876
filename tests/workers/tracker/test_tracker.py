"""The tracker: one MLflow run a pipeline run, every point once however often it starts again, and a report at the end."""

import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import Fenced
from penstock.infra.memory.log import MemoryLog
from penstock.infra.memory.state import MemoryTail
from penstock.pipeline.config.load import from_json
from penstock.pipeline.inspect.live.saved_view import newest
from penstock.pipeline.inspect.run_view import load, read_view
from penstock.pipeline.inspect.status import WATCHED, standing
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.catalogue import RUNS_SPEC
from penstock.topics.wire.record import Outgoing
from penstock.workers.tracker import metrics_file, worker
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import log_with, write
from tests.support.waiting import until

STEPS = 5
History = Callable[[str], list[tuple[int, int, float]]]
"""A metric's (step, time, value) points."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A state directory of the test's own, and an end without the waiting that a real run's stragglers get."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "state"))
    for name in ("CLOSED_S", "SETTLE_S"):
        monkeypatch.setattr(worker, name, 0.0)
    monkeypatch.setattr(worker, "POLL_S", 0.02)


@pytest.fixture
def log() -> MemoryLog:
    return log_with()


def built(**config: Any) -> tuple[RecordBuilder, list[Outgoing]]:
    builder = RecordBuilder(steps=STEPS, config=config)
    return builder, list(builder.whole())


def session_for(log: MemoryLog, *, stop: bool = False) -> Session:
    record = load(log, RUN, topics=()).record
    assert record is not None
    session = Session(
        run=RUN, role="tracker", worker="tracker", log=log, record=record, config=from_json(record.config), info=json.loads(record.info),
        stop=threading.Event(),
    )  # fmt: skip
    if stop:
        session.stop.set()
    return session


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(Reporter, "notify", lambda _self, text: lines.append(text))
    return lines


def follow(log: MemoryLog, *, stop: bool = False) -> Session:
    session = session_for(log, stop=stop)
    worker.main(session)
    return session


def run_directory(tmp_path: Path) -> Path:
    return tmp_path / "state" / "runs" / RUN


def points_in(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory(tmp_path) / "metrics.jsonl").read_text().splitlines()]


def report_in(tmp_path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_directory(tmp_path) / "report.json").read_text())
    return report


WITHOUT_MLFLOW = {"mlflow": {"enabled": False}}


def tracked(log: MemoryLog, *, stop: bool = False) -> Session:
    write(log, built(**WITHOUT_MLFLOW)[1])
    return follow(log, stop=stop)


def test_every_step_evaluation_and_version_is_one_line(log: MemoryLog, tmp_path: Path) -> None:
    tracked(log)
    found = points_in(tmp_path)
    counts = Counter(point["kind"] for point in found if point.get("worker") != "tracker")
    assert counts == {"step": STEPS, "eval": 2, "reward": STEPS, "status": 2, "final": 5}
    assert [point["step"] for point in found if point["kind"] == "step"] == list(range(STEPS))
    assert [point["reward"] for point in found if point["kind"] == "reward"] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_without_mlflow_the_run_is_left_as_a_report_and_a_page_all_the_same(log: MemoryLog, tmp_path: Path) -> None:
    tracked(log)
    report = report_in(tmp_path)
    assert (report["status"], report["steps"], report["mlflow_run_id"]) == ("finished", STEPS, None)
    assert "reward" in (run_directory(tmp_path) / "report.txt").read_text()
    page = (run_directory(tmp_path) / "report.html").read_text()
    assert page.startswith("<!doctype html>") and f"<title>{RUN} · Penstock</title>" in page


def test_where_mlflow_is_not_installed_nothing_waits_for_it(
    log: MemoryLog, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    write(log, built()[1])
    follow(log)
    assert "MLflow is not installed: metrics are written to metrics.jsonl only" in said
    assert report_in(tmp_path)["mlflow_run_id"] is None
    assert not [line for line in said if "lacks" in line]


def test_who_looks_at_the_run_goes_on_from_what_the_tracker_has_left(log: MemoryLog) -> None:
    tracked(log)
    left, since = newest(log, RUN)
    assert (left.steps_done, left.closed is not None) == (STEPS, True)
    ledger = (f"{RUN}.ledger", 0)
    assert since[ledger] == log.end_offsets([ledger])[ledger]
    seen = read_view(RunReader(log, RUN), topics=WATCHED, view=left, since=since)
    assert standing(seen, now_s=1e10) == standing(load(log, RUN, topics=WATCHED), now_s=1e10)


def test_a_page_that_is_not_ready_in_time_or_cannot_be_written_costs_one_line(
    log: MemoryLog, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log, built(**WITHOUT_MLFLOW)[1])
    monkeypatch.setattr(worker, "PAGE_S", 0.0)
    follow(log)
    assert [line for line in said if "page" in line] == [
        "the report page was not written: it was not ready within 0 s; "
        f"write it with `penstock report {RUN} --html {run_directory(tmp_path) / 'report.html'}`"
    ]
    monkeypatch.setattr(worker, "PAGE_S", 200.0)
    (run_directory(tmp_path) / "report.html").mkdir()
    said.clear()
    follow(log)
    assert len([line for line in said if "the report page was not written: " in line]) == 1
    assert report_in(tmp_path)["steps"] == STEPS
    assert not list(run_directory(tmp_path).glob(".*.new"))


@pytest.mark.parametrize("cut", [0, 7, 40])
def test_a_tracker_that_starts_again_writes_no_line_twice_and_mends_a_torn_one(log: MemoryLog, tmp_path: Path, cut: int) -> None:
    _, records = built(**WITHOUT_MLFLOW)
    write(log, records[: len(records) // 2])
    follow(log, stop=True)
    file = run_directory(tmp_path) / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - cut])
    write(log, records[len(records) // 2 :])
    follow(log)
    places = [(point["from"], point["number"]) for point in points_in(tmp_path)]
    assert len(places) == len(set(places))
    assert [point["step"] for point in points_in(tmp_path) if point["kind"] == "step"] == list(range(STEPS))


def test_statuses_are_thinned_out_in_the_same_way_every_time(log: MemoryLog, tmp_path: Path) -> None:
    builder, records = built(**WITHOUT_MLFLOW)
    records[-1:-1] = [builder.measured_by("rollout-0", samples=float(count)) for count in range(50)]
    write(log, records)
    follow(log)
    statuses = [point for point in points_in(tmp_path) if point["kind"] == "status" and point["worker"] == "rollout-0"]
    assert 1 <= len(statuses) <= 2


def test_records_nobody_can_use_become_dead_letters_once_and_duplicates_are_counted(log: MemoryLog) -> None:
    _, records = built(**WITHOUT_MLFLOW)
    steps = [outgoing for outgoing in records if outgoing.topic.endswith(".ledger")]
    foreign = RecordBuilder("other").record()
    noise = [Outgoing(topic=f"{RUN}.{name}", partition=0, key=None, headers=(), value=b"noise") for name in ("ledger", "metrics", "groups")]
    wrong = [Outgoing(topic=RUNS_SPEC.name, partition=0, key=RUN.encode(), headers=foreign.headers, value=foreign.value), foreign]
    write(log, [*records[:10], *noise, *wrong, *records[10:], steps[2]])
    session = follow(log)
    assert session.reporter.values["duplicates"] == 1
    follow(log)
    view = load(log, RUN)
    # The scorers' and trainer's topics are theirs to refuse; the other run's own record is in order.
    assert {place[0]: kind for place, kind in view.dead_letters.items()} == {
        f"{RUN}.ledger": "missing-header",
        f"{RUN}.metrics": "missing-header",
        RUNS_SPEC.name: "foreign-run",
    }
    assert view.duplicates["dead-letters"] == 0


def test_it_waits_for_the_last_words_of_workers_that_still_report(log: MemoryLog, tmp_path: Path) -> None:
    builder, records = built(**WITHOUT_MLFLOW)
    write(log, records[:-1])
    session = session_for(log)
    thread = threading.Thread(target=worker.main, args=(session,), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    write(log, [builder.measured_by("evaluator", "eval", version=STEPS + 1, greedy_accuracy=1.0)])
    write(log, [builder.measured_by("evaluator", "final")])
    thread.join(120.0)
    assert not thread.is_alive()
    report = report_in(tmp_path)
    assert report["eval"][-1]["version"] == STEPS + 1


@pytest.mark.parametrize(("missing", "waits"), [(0, False), (1, True)], ids=["everybody has ended", "the scorer has not been heard of"])
def test_only_a_worker_that_was_never_heard_of_is_given_time_after_the_end(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, followed: Callable[[], threading.Thread], missing: int, waits: bool
) -> None:
    monkeypatch.setattr(worker, "CLOSED_S", 60.0)
    config = {"rollout": {"workers": 1}, "eval": {"source": "tiny:successor"}, **WITHOUT_MLFLOW}
    records = [record for record in built(**config)[1] if not missing or record.key != b"scorer-0"]
    write(log, records)
    thread = followed()
    thread.join(1.0 if waits else 120.0)
    assert thread.is_alive() == waits


@pytest.fixture
def followed(log: MemoryLog) -> Iterator[Callable[[], threading.Thread]]:
    """Start a tracker that is told to stop at the end of the test."""
    sessions: list[Session] = []
    threads: list[threading.Thread] = []

    def start() -> threading.Thread:
        sessions.append(session_for(log))
        threads.append(threading.Thread(target=worker.main, args=(sessions[-1],), daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for session, thread in zip(sessions, threads, strict=True):
        session.stop.set()
        thread.join(120.0)


@pytest.mark.parametrize("doing", ["starting", "loading the model"])
def test_an_evaluator_that_still_loads_when_the_run_is_over_has_its_say(log, tmp_path: Path, monkeypatch, followed, doing: str) -> None:
    monkeypatch.setattr(worker, "QUIET_S", 0.0)
    builder, records = built(**WITHOUT_MLFLOW)
    late = builder.measured_by("evaluator", incarnation="b", labels={"doing": doing, "activity": "start"})
    write(log, [*records[:-1], late, builder.measured_by("trainer", incarnation="b")])
    thread = followed()
    thread.join(0.5)
    assert thread.is_alive(), "a worker that is loading says nothing for long"
    write(log, [builder.measured_by("evaluator", "eval", incarnation="b", version=STEPS + 1, greedy_accuracy=1.0)])
    write(log, [builder.measured_by("evaluator", "final", incarnation="b")])
    thread.join(120.0)
    assert not thread.is_alive()
    assert report_in(tmp_path)["eval"][-1]["version"] == STEPS + 1


def test_an_evaluator_that_died_while_it_was_loading_is_not_waited_for_without_end(log, tmp_path: Path, monkeypatch, followed) -> None:
    monkeypatch.setattr(worker, "LOADING_S", 0.5)
    builder, records = built(**WITHOUT_MLFLOW)
    late = builder.measured_by("evaluator", incarnation="b", labels={"doing": "loading the model", "activity": "start"})
    write(log, [*records[:-1], late])
    followed().join(120.0)
    assert (run_directory(tmp_path) / "report.json").exists()


def test_a_second_tracker_of_the_same_run_writes_nothing(log, tmp_path: Path, monkeypatch, followed) -> None:
    monkeypatch.setattr(metrics_file, "LOCK_WAIT_S", 0.2)
    _, records = built(**WITHOUT_MLFLOW)
    write(log, records[:-10])
    followed()
    until(lambda: (run_directory(tmp_path) / "metrics.jsonl").exists() and points_in(tmp_path))
    with pytest.raises(Fenced, match=r"another tracker of this run is already writing to .*metrics\.jsonl"):
        follow(log)


def test_a_tracker_that_is_stopped_says_no_reward_that_may_still_change(log: MemoryLog, tmp_path: Path) -> None:
    _, records = built(**WITHOUT_MLFLOW)
    middle = next(place for place, record in enumerate(records) if record.topic.endswith(".ledger") and place > len(records) // 2)
    write(log, records[: middle - 1])
    follow(log, stop=True)
    write(log, records[middle - 1 :])
    follow(log)
    rewards = [(point["step"], point["reward"]) for point in points_in(tmp_path) if point["kind"] == "reward"]
    assert rewards == [(step, pytest.approx(step / 4)) for step in range(STEPS)]


def test_a_tracker_that_is_stopped_leaves_no_report_of_a_log_too_long_to_be_read_in_time(
    log: MemoryLog, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked(log, stop=True)
    assert (run_directory(tmp_path) / "report.json").exists()
    monkeypatch.setattr(worker, "STOPPED_S", -1.0)
    follow(log, stop=True)
    assert said[-1] == f"no report was written: the log is too long for the tracker; run `penstock report {RUN}`"
    assert not (run_directory(tmp_path) / "report.json").exists()


def test_rewards_are_the_same_whatever_is_read_first_of_a_long_log(log: MemoryLog, tmp_path: Path, monkeypatch) -> None:
    """One record at a time, a whole topic before the next: the versions are known long before their groups are."""
    poll = MemoryTail.poll
    monkeypatch.setattr(MemoryTail, "poll", lambda self, timeout_s, **_: poll(self, timeout_s, max_records=1))
    tracked(log)
    assert [point["reward"] for point in points_in(tmp_path) if point["kind"] == "reward"] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


@pytest.fixture
def mlflow_points(tmp_path: Path, empty_database: Path) -> Callable[[], tuple[list[Any], History]]:
    """What the local MLflow holds: its runs, and a metric's (step, time, value) points."""

    (tmp_path / "state").mkdir(exist_ok=True)
    shutil.copy(empty_database, tmp_path / "state" / "mlflow.db")

    def read() -> tuple[list[Any], History]:
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'state' / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("penstock")
        runs = client.search_runs([experiment.experiment_id])

        def history(key: str) -> list[tuple[int, int, float]]:
            return [(point.step, point.timestamp, point.value) for point in client.get_metric_history(runs[0].info.run_id, key)]

        return list(runs), history

    return read


def test_a_run_followed_by_three_trackers_is_one_mlflow_run_without_double_points(
    log: MemoryLog, tmp_path: Path, mlflow_points: Any
) -> None:
    _, records = built(kafka={"security": {"sasl_plain_password": "hush", "security_protocol": "SASL_SSL"}})
    third = len(records) // 3
    for part in (records[:third], records[third : 2 * third]):
        write(log, part)
        follow(log, stop=True)
    assert mlflow_points()[0][0].info.status == "KILLED"
    write(log, records[2 * third :])
    follow(log)
    runs, history = mlflow_points()
    assert len(runs) == 1
    run = runs[0]
    assert run.info.status == "FINISHED"
    assert [step for step, _, _ in history("train/loss")] == list(range(STEPS))
    assert [(step, value) for step, _, value in history("reward")] == [(step, pytest.approx(step / 4)) for step in range(STEPS)]
    assert [step for step, _, _ in history("eval/greedy_accuracy")] == [0, STEPS]
    assert run.data.params["schedule.prompts_per_step"] == "2"
    assert run.data.params["algorithm.clip_high"] == "0.2"
    assert "None" not in run.data.params.values()
    assert not {"eval/n", "eval/samples"} & set(run.data.metrics)
    assert not [name for name in run.data.params if "security" in name]
    assert run.data.tags["penstock.git"] == "abc123"
    artifacts = tmp_path / "state" / "mlartifacts"
    assert {path.name for path in artifacts.rglob("*") if path.is_file()} == {"config.json", "report.html", "report.json", "report.txt"}
    assert "hush" not in "".join(path.read_text() for path in artifacts.rglob("*.json"))
    report = report_in(tmp_path)
    assert report["mlflow_run_id"] == run.info.run_id
    assert load(log, RUN).mlflow["run_id"] == run.info.run_id


def test_a_closed_run_that_is_tracked_once_more_gets_nothing_twice(log: MemoryLog, mlflow_points: Any) -> None:
    write(log, built()[1])
    follow(log)
    _, history = mlflow_points()
    before = [history(key) for key in ("train/loss", "reward", "system/trainer/cpu_s")]
    assert all(before)
    follow(log)
    runs, history = mlflow_points()
    assert len(runs) == 1
    assert [history(key) for key in ("train/loss", "reward", "system/trainer/cpu_s")] == before


@pytest.mark.costly  # imports MLflow
def test_a_server_that_does_not_answer_costs_one_line_and_a_limited_time(
    log: MemoryLog, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MLFLOW_END_S", 0.5)
    monkeypatch.setattr(worker, "STOPPED_S", 0.5)
    write(log, built(mlflow={"tracking_uri": "http://user:secret@127.0.0.1:9"})[1])
    follow(log)
    about = [line for line in said if "MLflow at http://127.0.0.1:9" in line]
    assert "secret" not in "".join(said)
    assert sum("the run continues" in line for line in about) <= 1
    assert sum("lacks" in line for line in about) == 1
    assert report_in(tmp_path)["mlflow_run_id"] is None
    assert len(points_in(tmp_path)) > STEPS
