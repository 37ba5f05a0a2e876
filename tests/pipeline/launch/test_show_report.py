"""The report at the end of `penstock run`: the tracker's, or one from the log where the tracker left none."""

import json
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.launch.launcher import show_report
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.a_run import RUN, Teller


def test_a_run_without_the_trackers_report_is_reported_from_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    log = MemoryLog()
    log.create_topics({RUNS_TOPIC: RUNS_SPEC, **topics_of(RUN, partitions=8)})
    producer = log.producer()
    for outgoing in Teller(steps=2).whole():
        producer.send(outgoing)
    show_report(log, RUN, json_out=True)
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    directory = run_directory(RUN)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.txt").write_text("the tracker's")
    show_report(log, RUN, json_out=False)
    assert capsys.readouterr().out == "the tracker's\n"
