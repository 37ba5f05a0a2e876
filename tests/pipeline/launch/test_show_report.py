"""The report at the end of `penstock run`: the tracker's, or one from the log where the tracker left none."""

import json
import re
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.launch.launcher import show_report
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import log_with


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return log_with(RecordBuilder(steps=2).whole())


def test_a_run_without_the_trackers_report_is_reported_from_its_log(log: MemoryLog, capsys: pytest.CaptureFixture[str]) -> None:
    show_report(log, RUN, json_out=True, notify=print)
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    directory = run_directory(RUN)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.json").write_text(json.dumps(collect(log, RUN) | {"reason": "the tracker wrote this"}))
    show_report(log, RUN, json_out=False, notify=print)
    shown = capsys.readouterr().out
    assert "finished: the tracker wrote this" in shown
    assert len(shown.splitlines()) <= 30


def test_on_a_terminal_the_trackers_report_is_as_wide_as_that(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_directory(RUN)
    directory.mkdir(parents=True)
    (directory / "report.json").write_text(json.dumps(collect(log, RUN)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for width in (60, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        show_report(log, RUN, json_out=False, notify=print)
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in capsys.readouterr().out.splitlines()) <= width
