"""One record of a tenant of the broker costs a line: other runs stay in lists, are found, and are not deleted for it."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.delete import ended_before
from penstock.pipeline.inspect.records.runs import list_runs
from penstock.pipeline.runtime.registration.run_registry import all_runs, find, resolve, write, write_status
from penstock.topics import ledger, runs
from penstock.topics.catalogue import RUNS_TOPIC, topics_of
from penstock.topics.ledger import Entry
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import CONFIG
from tests.support.page_records import log_with, register

NOW_NS = time.time_ns()
MINE = RunRecord(run="mine", status="finished", config=json.dumps(CONFIG), info='{"steps": 3}', created_ns=NOW_NS, updated_ns=NOW_NS)
DAY_S = 86400.0
DEEP = '{"model": ' * 20_000 + "{}" + "}" * 20_000


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    log = log_with([])
    for run in ("mine", "theirs"):
        log.create_topics(topics_of(run, partitions=1))
    write(log, MINE)
    return log


def assert_mine_is_there(log: MemoryLog) -> None:
    rows = [row for row in list_runs(log) if row["run"] == "mine"]
    assert [(row["status"], row["steps"], row["model"]) for row in rows] == [("finished", 3, Path(CONFIG["model"]["path"]).name)]
    assert "mine" in [record.run for record in all_runs(log)]
    assert resolve(log, "mine") == resolve(log, "min") == "mine"
    made = find(log, "mine")
    assert made is not None
    assert json.loads(made.config) == CONFIG


@pytest.mark.parametrize("topic", [RUNS_TOPIC, "theirs.run"])
@pytest.mark.parametrize(
    "changes",
    [
        {"info": ""},
        {"config": "", "info": ""},
        {"info": "null"},
        {"info": "[]"},
        {"info": '{"steps": NaN}'},
        {"info": '{"steps": 1e999}'},
        {"info": '{"steps": ' + "9" * 5000 + "}"},
        {"info": '{"forked_from": {"run": "mine"}, "rescored_from": {"run": "mine"}}'},
        {"info": '{"forked_from": {"run": "theirs"}}'},
        {"info": '{"forked_from": "mine"}'},
        {"config": DEEP},
        {"config": '{"model": {"path": "\\ud800\\u0000\\u001b[2J"}}'},
        {"config": '{"model": null}'},
        {"config": '"\\ud800"'},
        {"created_ns": 0, "updated_ns": 0},
        {"created_ns": 2**63 - 1, "updated_ns": 2**63 - 1},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_record_of_a_tenant_takes_no_other_run_away(changes: dict[str, object], topic: str, log: MemoryLog) -> None:
    theirs = replace(MINE, run="theirs")
    write(log, theirs)
    register(log, replace(theirs, **changes), topic=topic)  # type: ignore[arg-type]
    assert_mine_is_there(log)


@pytest.mark.parametrize("key", [b"", b"..", b"mine", b"mine\n", b"\xff", b"mine/../theirs", b"MINE"])
def test_a_record_under_the_key_of_another_run_is_skipped(key: bytes, log: MemoryLog) -> None:
    register(log, replace(MINE, run="theirs", status="failed"), key=key)
    assert_mine_is_there(log)


@pytest.mark.parametrize("schema", ["ledger/99", f"ledger/{2**70}", "ledger/", "", "runs/1"])
def test_a_ledger_that_cannot_be_read_breaks_no_list(schema: str, log: MemoryLog) -> None:
    write_status(log, replace(MINE, run="theirs"))
    for seq, kind in enumerate(("step", "run-closed")):
        entry = Entry(seq=seq, kind=kind, time_ns=1, step=0, version=0, details="{}")  # type: ignore[arg-type]
        value = ledger.encode(entry)
        headers = replace(ledger.headers(entry, run="theirs"), schema=schema).encode(value)
        log.producer().send(Outgoing(topic="theirs.ledger", partition=0, key=None, headers=headers, value=value))
    assert_mine_is_there(log)


@pytest.mark.parametrize("status", ["finished", "stopped", "failed", "created"])
def test_a_date_that_others_register_deletes_no_run(status: runs.Status, log: MemoryLog) -> None:
    register(log, replace(MINE, status=status, created_ns=1, updated_ns=1))
    register(log, replace(MINE, run="theirs", created_ns=1, updated_ns=1))
    assert ended_before(log, time.time() - DAY_S, busy=()) == ["theirs"]
    assert ended_before(log, time.time() + DAY_S, busy=()) == ["mine", "theirs"]
    assert ended_before(log, time.time() + DAY_S, busy=["mine"]) == ["theirs"]
