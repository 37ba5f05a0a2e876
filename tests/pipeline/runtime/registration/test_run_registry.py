"""What a run is stands in its own topic; in the topic of all runs there is only that it exists and how it stands."""

import json
from dataclasses import replace

from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.runtime.registration.run_registry import find, set_status, write
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import runs
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.runs import RunRecord
from tests.support.a_run import CONFIG, RUN
from tests.support.page_records import log_with, register

MADE = RunRecord(run=RUN, status="created", config=json.dumps(CONFIG), info='{"steps": 3, "git": "a"}', created_ns=1, updated_ns=1)


def test_the_topic_of_all_runs_holds_nothing_that_a_worker_acts_on() -> None:
    log = log_with([])
    write(log, MADE)
    set_status(log, MADE, status="running")
    shared = [runs.read(record, run=RUN)[1] for record in scan(log, RUNS_TOPIC)]
    assert [record.status for record in shared] == ["created", "running"]
    assert {record.config for record in shared} == {"{}"}
    found = find(log, RUN)
    assert found and (found.status, found.config, found.info) == ("running", MADE.config, MADE.info)
    assert load(log, RUN).record == found


def test_who_may_write_to_the_topic_of_all_runs_cannot_change_what_a_run_executes() -> None:
    log = log_with([])
    write(log, MADE)
    evil = replace(MADE, config=json.dumps({**CONFIG, "reward": {"functions": ["evil.py:run"]}}), updated_ns=9)
    register(log, evil)
    found = find(log, RUN)
    assert found and found.config == MADE.config
    assert load(log, RUN).record == found


def test_a_run_that_is_resumed_with_changes_is_what_was_written_last() -> None:
    log = log_with([])
    write(log, MADE)
    changed = replace(MADE, config=json.dumps({**CONFIG, "run": {"steps": 9}}), updated_ns=2)
    write(log, changed)
    found = find(log, RUN)
    assert found and found.config == changed.config
    assert load(log, RUN).record == found
