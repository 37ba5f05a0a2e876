"""A run's launcher on this machine: found by its lock, asked to stop, its workers' logs read; without a broker."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pipeline import cli
from penstock.pipeline.cli.app import FAILED, OK, USAGE
from penstock.pipeline.cli.runs import seconds
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.launch.run_lock import attended_runs
from tests.support.children import child
from tests.support.paths import ROOT

LAUNCHER = """
import sys, time
from pathlib import Path
from penstock.pipeline.launch.run_lock import attending
from penstock.pipeline.launch.shutdown import stop_requested
with attending(Path(sys.argv[1]), "one"), stop_requested() as stop:
    print("at work", flush=True)
    stop.wait(600)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with the folders of two runs."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for run in ("one", "two"):
        (tmp_path / "runs" / run / "logs").mkdir(parents=True)
    for name in ("rollout-0", "trainer"):
        (tmp_path / "runs" / "one" / "logs" / f"{name}.log").write_text("".join(f"{name} {n}\n" for n in range(30)), encoding="utf-8")
    return tmp_path


def test_a_run_with_a_launcher_is_named_by_broker_stop_and_ended_by_stop(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attended_runs() == []
    command = [sys.executable, "-c", LAUNCHER, str(home / "runs" / "one")]
    with child(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "at work\n"
        assert attended_runs() == ["one"]
        assert cli.main(["broker", "stop"]) == FAILED
        assert "the broker was not stopped, because one is running: penstock stop RUN first" in capsys.readouterr().err
        assert cli.main(["stop", "one"]) == OK
        said = capsys.readouterr()
        assert "penstock run --resume one" in said.out
        assert "stopping one" in said.err
        assert launcher.wait(120) == 0
    assert attended_runs() == []
    assert cli.main(["stop", "one"]) == USAGE
    refused = capsys.readouterr().err
    assert "has no launcher on this machine" in refused
    assert "stopping" not in refused


@pytest.mark.usefixtures("home")
def test_logs_show_the_last_lines_of_a_role_and_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["logs", "one", "rollout", "-n", "2"]) == OK
    assert capsys.readouterr().out == "rollout-0  rollout-0 28\nrollout-0  rollout-0 29\n"
    assert cli.main(["logs", "one", "-n", "1"]) == OK
    assert capsys.readouterr().out.splitlines() == ["rollout-0  rollout-0 29", "trainer    trainer 29"]
    assert cli.main(["logs", "one", "trainr"]) == USAGE
    assert "did you mean 'trainer'?" in capsys.readouterr().err
    assert cli.main(["logs", "onee"]) == USAGE
    assert "no folder on this machine; did you mean 'one'?" in capsys.readouterr().err


def test_looking_starts_no_broker(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs"], ["status", "latest"], ["report", "latest"], ["sql", "latest", "select 1"], ["runs", "rm", "one"]):
        assert cli.main(command) == FAILED
        assert capsys.readouterr().err.endswith("the broker of this machine is not running; start it with `penstock broker start`\n")
    assert not (home / "broker" / "data").exists()


def test_an_age_is_a_number_and_a_unit() -> None:
    assert [seconds(text) for text in ("7d", "12h", "30m")] == [604_800.0, 43_200.0, 1_800.0]
    for text in ("", "7", "d", "-1d", "7w"):
        with pytest.raises(ConfigError, match="such as 7d"):
            seconds(text)
