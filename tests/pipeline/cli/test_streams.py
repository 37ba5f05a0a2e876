"""Standard streams that are closed or full: what does something is silent, what only prints says so in one line."""

import importlib
import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.infra.errors import PenstockError
from penstock.pipeline import cli
from penstock.pipeline.cli import app
from penstock.pipeline.launch.shutdown import lasting_output

PENSTOCK = f"{sys.executable} -c 'from penstock.pipeline.cli import console; raise SystemExit(console())'"

PRINTING = ["runs", "runs --json", "status r", "report latest", "logs r -f", "topics tail r groups", "sql r q", "plan c"]
DOING = ["run c.toml", "runs rm r", "stop r", "broker start", "topics delete r", "report r --html p", "plan c --plot=p", "create c", ""]
LOOKING = ["runs", "status r", "report r", "logs r", "broker status", "broker stop", "stop r", "topics list r", "sql r q"]


class Full(io.StringIO):
    """A stream on a full device."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("words", PRINTING)
def test_a_command_that_only_prints_is_refused_without_a_standard_output(words: str) -> None:
    with pytest.raises(PenstockError, match="prints its result, but standard output is closed"):
        app.refuse_unseen(words.split())


@pytest.mark.parametrize("words", DOING)
def test_a_command_that_does_something_does_it_without_a_standard_output(words: str) -> None:
    app.refuse_unseen(words.split())


def test_a_closed_stream_is_a_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert app.open_closed()
    with lasting_output(), app.checked_output():
        print("step 1/2")
        print("warning", file=sys.stderr, flush=True)
    assert sys.stdin.read() == ""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    monkeypatch.undo()
    assert not app.open_closed()


def test_a_full_device_ends_a_command_in_one_line_and_no_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["graph"]) == 1
    assert capsys.readouterr().err == "penstock: cannot write to standard output: No space left on device\n"
    with app.checked_output(), lasting_output():
        print("step 1/2", flush=True)


def test_closed_streams_in_a_shell(tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = f"{PENSTOCK} runs >&-; echo $?; {PENSTOCK} broker status >&-; echo $?; {PENSTOCK} nonsense <&- 2>&-; echo $?"
    environment = {**os.environ, "PENSTOCK_HOME": str(home)}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1", "0", "2"]
    assert done.stderr == "penstock: `penstock runs` prints its result, but standard output is closed: redirect it to a file or a pipe\n"
    assert not home.exists()  # whoever only looks makes no folder


@pytest.mark.parametrize("words", LOOKING)
def test_looking_makes_no_folder(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    cli.main(words.split())
    assert not (tmp_path / "home").exists()


def test_a_busy_machine_does_not_make_the_client_warn() -> None:
    importlib.import_module("penstock.infra.kafka.log")
    assert not logging.getLogger("kafka.net.selector").isEnabledFor(logging.WARNING)
    assert logging.getLogger("kafka.client").isEnabledFor(logging.WARNING)
