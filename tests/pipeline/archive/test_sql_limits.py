"""The limits of a question in SQL: of memory, and of a person's patience."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive import database, sql
from penstock.pipeline.archive.database import Limits
from penstock.pipeline.cli import inspect as command
from penstock.pipeline.cli import main
from tests.support.children import child, end_in_time
from tests.support.paths import ROOT
from tests.support.refusals import one_line

pytestmark = pytest.mark.costly  # starts processes

ENDLESS = "select count(*) from range(10000000) a, range(10000000) b where a.range + b.range = 7"


class NoTables:
    """A run of which nothing is asked."""

    log, run = MemoryLog(), "r"

    def rows(self, name: str) -> Any:
        raise AssertionError(name)


ASKING = """
from penstock.pipeline.archive import database, sql
from tests.pipeline.archive.test_sql_limits import ENDLESS, NoTables

wait = database._wait

def said(process, limits):
    print("computing", process.pid, flush=True)
    wait(process, limits)

database._wait = said
try:
    sql.ask(NoTables(), ENDLESS)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_question_that_is_being_computed() -> None:
    with child([sys.executable, "-c", ASKING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        word, computing = asking.stdout.readline().split()
        assert word == "computing"
        asking.send_signal(signal.SIGINT)
        assert asking.communicate(timeout=180)[0] == "interrupted\n"
        assert end_in_time(int(computing))


def test_the_command_says_in_one_line_that_it_was_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def reading(*_: object) -> Iterator[tuple[MemoryLog, str]]:
        yield NoTables.log, NoTables.run

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reading", reading)
    monkeypatch.setattr(sql, "ask", interrupted)
    assert main(["sql", "r", "select 1"]) == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted before there was a result"]


@pytest.mark.parametrize("query", ["select count(*) from (select distinct range from range(5000000))", "select list_sum(range(400000000))"])
def test_a_question_that_takes_too_much_memory_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    monkeypatch.setattr(database, "MEMORY_BYTES", 32 << 20)
    with one_line(ValueError, match=r"^the query needs more than 0.03125 GiB: narrow it"):
        sql.ask(NoTables(), query)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [(Limits(seconds=0.0), "the query took more than 0 s: narrow it"), (Limits(disconnected=lambda: True), "the client has disconnected")],
)
@pytest.mark.parametrize("query", [ENDLESS, "select " + "(" * 60_000, "select levenshtein(repeat('a', 9000000), repeat('b', 9000000))"])
def test_a_question_ends_at_a_limit_of_time_and_with_its_asker(limits: Limits, problem: str, query: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        sql.ask(NoTables(), query, limits)


def test_of_an_answer_only_the_rows_that_are_needed_are_computed_and_a_large_one_is_refused() -> None:
    everything = "select * from range(300000000)"
    assert sql.ask(NoTables(), everything, Limits(rows=201))["range"].to_pylist() == list(range(201))
    with pytest.raises(ValueError, match=r"^the result is larger than 1 MiB: select fewer rows or columns$"):
        sql.ask(NoTables(), everything, Limits(size=1 << 20))


OPENING = (
    "select * from '{}'",
    "select * from read_csv('{}')",
    "select * from read_text('{}')",
    "select * from read_blob('{}')",
    "explain select * from read_json('{}')",
    "from query('select * from read_csv(''{}'')')",
    "from query_table(['{}'])",
    "from glob('{}*')",
    "from parquet_metadata('{}')",
    "attach '{}' as x",
    "copy (select 1) to '{}'",
    "export database '{}'",
    "import database '{}'",
    "load '{}'",
    "set enable_external_access = true",
    "set memory_limit = '100GB'",
    "set extension_directory = '{}'",
    "create table x as from read_csv('{}')",
)


@pytest.mark.parametrize("query", OPENING)
def test_no_statement_opens_a_file_or_changes_a_setting(tmp_path: Path, query: str) -> None:
    """A named pipe without a writer: who opens it waits without end."""
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    with database.filled([], []) as connection, pytest.raises(duckdb.Error):
        connection.sql(query.format(pipe))
    assert os.listdir(tmp_path) == ["pipe.csv"]
