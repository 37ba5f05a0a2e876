"""A worker's place in a run: what it reports, what it sets aside, and what it says when it is asked to stop."""

import threading

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.reporting import reporter
from penstock.pipeline.runtime.reporting.reporter import ThrottledLog
from penstock.topics import dead_letters, metrics
from penstock.topics.metrics import Activity, Measurement
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from tests.support.number_run import RUN, config_of, log_with, session_of


def measured(log: MemoryLog) -> list[Measurement]:
    return [metrics.read(record, run=RUN)[1] for record in log.tail({(f"{RUN}.metrics", 0): "earliest"}).read_to_end()]


def test_measurements_are_numbered_and_carry_the_newest_values_and_labels() -> None:
    log = log_with()
    session = session_of(log, config_of(), role="scorer")
    session.reporter.add("groups")
    session.reporter.add("groups", 2.0)
    session.reporter.doing(Activity.BUSY, "scoring", now=True)
    session.reporter.doing(Activity.BUSY, "scoring", now=True)
    session.close(status="finished")
    first, last = measured(log)
    assert (first.seq, first.kind, first.values["groups"], first.labels) == (0, "status", 3.0, {"doing": "scoring", "activity": "busy"})
    assert (last.seq, last.kind, last.labels) == (1, "final", {"doing": "scoring", "activity": "busy", "status": "finished"})


def test_what_a_worker_does_is_printed_now_and_then_where_it_has_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "PRINT_EVERY_S", 0.0)
    session = session_of(log_with(), config_of(), role="scorer")
    for doing in ("waiting for samples", "waiting for samples", "scoring"):
        session.reporter.doing(Activity.BUSY, doing)
        session.reporter.status(force=True)
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["waiting for samples", "scoring"]


@pytest.mark.parametrize(
    ("finishing", "text"), [(None, "finishes the current work: loading"), (lambda: "hands 3 groups back", "hands 3 groups back")]
)
def test_a_worker_that_is_asked_to_stop_says_what_it_still_finishes(finishing, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = log_with()
    session = session_of(log, config_of())
    if finishing is not None:
        session.ready(finishing=finishing)
    session.reporter.doing(Activity.START, "loading")
    waiting = threading.Thread(target=session.announce_stop)
    waiting.start()
    session.stop.set()
    waiting.join(60.0)
    assert f"trainer: stop requested: {text}" in capsys.readouterr().out
    assert measured(log)[-1].labels["doing"] == f"stopping: {text}"


def test_a_record_is_set_aside_once_by_whichever_worker_meets_it_first() -> None:
    log = log_with()
    record = Record(topic=f"{RUN}.groups", partition=0, offset=4, timestamp_ms=0, key=None, headers=(), value=b"?")
    for role in ("trainer", "tracker"):
        session = session_of(log, config_of(), role=role)
        for _ in range(2):
            session.dead_letters.write(record, Unusable("not Arrow", kind="undecodable"))
    letters = [dead_letters.read(letter, run=RUN)[1] for letter in log.tail({(f"{RUN}.dead-letters", 0): "earliest"}).read_to_end()]
    assert [(letter.offset, letter.worker) for letter in letters] == [(4, "trainer")]


def test_a_worker_that_is_assigned_a_partition_does_not_set_aside_once_more_what_its_last_owner_has() -> None:
    log, bad = log_with(), Unusable("not Arrow", kind="undecodable")
    place = {"topic": f"{RUN}.prompts", "offset": 4, "timestamp_ms": 0, "key": None, "headers": ()}
    records = [Record(partition=number, value=b"?", **place) for number in range(2)]  # type: ignore[arg-type]
    first, second = (session_of(log, config_of(), role=role).dead_letters for role in ("trainer", "tracker"))
    for letters, record in zip((first, second), records, strict=True):
        letters.write(record, bad)
    second.on_rebalance()
    for record in records:
        second.write(record, bad)
    found = [dead_letters.read(letter, run=RUN)[1] for letter in log.tail({(f"{RUN}.dead-letters", 0): "earliest"}).read_to_end()]
    assert [(letter.partition, letter.worker) for letter in found] == [(0, "trainer"), (1, "tracker")]


def test_the_first_lines_of_a_sort_are_printed_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "PRINTED_AT_FIRST", 2)
    lines: list[str] = []
    throttled = ThrottledLog(lines.append)
    for number in range(5):
        throttled.notify("duplicates", f"number {number}")
    throttled.sum_up()
    assert lines == ["number 0", "number 1"]
    throttled.sum_up(now=True)
    throttled.sum_up(now=True)
    assert lines[2:] == ["3 more: duplicates"]
