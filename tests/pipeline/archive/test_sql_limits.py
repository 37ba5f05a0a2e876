"""The limits of a question in SQL: of memory, and of a person's patience."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive import sql
from penstock.pipeline.cli import main
from penstock.pipeline.cli.look import sql as command
from tests.support.children import child
from tests.support.paths import ROOT

ENDLESS = "select count(*) from range(10000000) a, range(10000000) b where a.range + b.range = 7"


class NoTables:
    """A run of which nothing is asked."""

    log, run = MemoryLog(), "r"

    def rows(self, name: str) -> Any:
        raise AssertionError(name)


ASKING = """
import sys, threading, time
from penstock.pipeline.archive import sql
from tests.pipeline.archive.test_sql_limits import ENDLESS, NoTables

def tell_once_it_computes():
    while not any(thread.name == "sql" for thread in threading.enumerate()):
        time.sleep(0.01)
    print("computing", flush=True)

threading.Thread(target=tell_once_it_computes).start()
try:
    sql.ask(NoTables(), ENDLESS)
except KeyboardInterrupt:
    print(sql.ask(NoTables(), "select 41 + 1 as answer")["answer"].to_pylist())
"""


def test_ctrl_c_ends_a_question_that_is_being_computed() -> None:
    with child([sys.executable, "-c", ASKING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == "computing\n"
        asking.send_signal(signal.SIGINT)
        assert asking.communicate(timeout=180)[0] == "[42]\n"


def test_ctrl_c_ends_a_question_whose_computation_is_about_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise KeyboardInterrupt

    monkeypatch.setattr("threading.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        sql.ask(NoTables(), ENDLESS)


def test_the_command_says_in_one_line_that_it_was_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def reading(*_: object) -> Iterator[tuple[MemoryLog, str]]:
        yield NoTables.log, NoTables.run

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reading", reading)
    monkeypatch.setattr(sql, "ask", interrupted)
    assert main(["sql", "r", "select 1"]) == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted, there is no answer"]


def test_an_answer_that_takes_too_much_memory_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MEMORY", "32MiB")
    with pytest.raises(ValueError, match=r"^the answer takes more than 32MiB to compute: ask for less at once") as raised:
        sql.ask(NoTables(), "select count(*) from (select distinct range from range(5000000))")
    assert "\n" not in str(raised.value)
