"""Questions in SQL to a run: over its live topics, or over an archive.

Invariant: a question reads the run's tables only, neither files nor the network, and only the topics that it names.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import duckdb
import pyarrow as pa

from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive import database
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.database import NO_LIMITS, Limits, NoQuestion, OutOfMemory, Refused, Scanned, compute, filled
from penstock.pipeline.archive.layout import KINDS, kind_of
from penstock.pipeline.archive.rows import read_tables
from penstock.pipeline.archive.views import RAW, TABLES, VIEWS
from penstock.pipeline.observe.report.summary import COUNTED
from penstock.pipeline.observe.tables.samples_groups_steps import RunTables
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.topics.catalogue import RUNS_TOPIC

ALIASES = tuple(name for name in RAW if name not in TABLES)
"""Tables of `raw` that can be named without it."""
_WORD = re.compile(r"[a-z_]+")
_IN_RAW = re.compile(r"\braw\s*\.\s*([a-z_]+)")
_COMPUTED_NAMES = {"query", "query_table"}
"""Functions whose arguments name tables."""
_OURS = "select view_name as name from duckdb_views() where not internal and schema_name = 'main' and view_name[1] <> '_' order by 1"
"""The answer to `show tables`, without what the views stand on."""
_SHOW = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)


class Tables(Protocol):
    """Where the rows of a run come from."""

    @property
    def log(self) -> Log:
        """The run's records."""
        ...

    @property
    def run(self) -> str:
        """Its id."""
        ...

    def rows(self, name: str) -> pa.Table | Scanned:
        """The archive's table of that name."""
        ...


class LiveTables:
    """The topics as they are when they are first asked for."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self.log, self.run = log, run

    def rows(self, name: str) -> pa.Table:
        """A topic's records up to its ends."""
        kind = KINDS[name]
        topic = kind.kafka_name(self.run)
        count = self.log.partitions(topic) or 0
        places = [(topic, partition) for partition in range(count) if kind_of(kind.topic, partition) is kind]
        begins, ends = self.log.beginning_offsets(places), self.log.end_offsets(places)
        reader = BulkReader(self.log.connection)
        try:
            blocks = [
                table
                for place in places
                for table, _ in read_tables(reader, kind, place[1], run=self.run, first=begins[place], end=ends[place])
            ]
        finally:
            reader.close()
        return pa.concat_tables(blocks) if blocks else kind.schema.empty_table()


class ArchivedTables:
    """The files of an archive, read as far as a question needs them."""

    def __init__(self, archived: ArchivedLog) -> None:
        self._archived = archived

    @property
    def log(self) -> Log:
        """The archived records."""
        return cast(Log, self._archived)

    @property
    def run(self) -> str:
        """The archived run."""
        return self._archived.run

    def rows(self, name: str) -> pa.Table | Scanned:
        """All files of the table as one."""
        kind, archive = KINDS[name], self._archived.archive
        files = [str(path) for partition in archive.partitions(kind) for path in archive.files(kind, partition)]
        return Scanned(files=files, schema=kind.schema) if files else kind.schema.empty_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question with the rows of what it names; computed without the log."""

    query: str
    tables: dict[str, pa.Table | Scanned]

    def answer(self, limits: Limits = NO_LIMITS) -> pa.Table:
        """Compute it. Raises `ValueError` if DuckDB refuses it, and at a limit."""
        with _translated():
            return compute(self.tables, _SETUP, _OURS if _SHOW.fullmatch(self.query) else self.query, limits)


def ask(tables: Tables, query: str) -> pa.Table:
    """The answer to one question. Raises `ValueError` with DuckDB's own hint for what is no SQL or names what is not there."""
    return question(tables, query).answer()


def question(tables: Tables, query: str) -> Question:
    """A question with the rows of what it names, which are read here."""
    return Question(query=query, tables=_tables(tables, _named(query)))


def gone_from(tables: Tables, query: str) -> list[str]:
    """Which records of the topics that a question is about were deleted, a line for each partition; none for one about no table."""
    named = _named(query)
    topics = {KINDS[table].topic for name, table in RAW.items() if f"raw.{name}" in named} | (
        set(COUNTED) if named & TABLES.keys() else set()
    )
    return deleted(tables.log, *(f"{tables.run}.{topic}" for topic in sorted(topics - {RUNS_TOPIC})))


def views() -> dict[str, list[tuple[str, str]]]:
    """View -> its columns with their types."""
    connection = filled(_tables(None, set()).items(), _SETUP)
    try:
        names = [*VIEWS, *(name for name in TABLES if name not in VIEWS), *ALIASES, *(f"raw.{name}" for name in RAW if name not in ALIASES)]
        return {name: [(row[0], row[1]) for row in connection.execute(f"describe from {name}").fetchall()] for name in names}
    finally:
        connection.close()


def _named(query: str) -> set[str]:
    """The views and tables whose names are words of a question, those of `raw` as `raw.NAME`; rather one too many.

    Nothing is parsed: DuckDB may take minutes to parse a hostile question.
    """
    text = query.lower().replace('"', "")
    plain = set(_WORD.findall(_IN_RAW.sub(" ", text)))
    if plain & _COMPUTED_NAMES:
        return {*VIEWS, *TABLES, *(f"raw.{name}" for name in RAW)}
    in_raw = {*_IN_RAW.findall(text), *(plain if "raw" in plain else plain & set(ALIASES))}
    tables = plain | {f"raw.{name}" for name in in_raw}
    return tables | {table for view, (_, needed) in VIEWS.items() if view in tables for table in needed}


def _tables(tables: Tables | None, named: set[str]) -> dict[str, pa.Table | Scanned]:
    """All tables of the database; those that were named have rows."""
    filled_in = {
        f"_{name}": tables.rows(table) if tables is not None and f"raw.{name}" in named else KINDS[table].schema.empty_table()
        for name, table in RAW.items()
    }
    run = None if tables is None else RunTables(tables.log, tables.run)
    for name, (schema, make) in TABLES.items():
        filled_in[_own(name)] = make(run) if run is not None and name in named else schema.empty_table()
    return filled_in


def _own(name: str) -> str:
    """The name of a table of `TABLES`, which a view may have taken."""
    return f"_{name}_table" if name in VIEWS else name


_SETUP = (
    "create schema raw",
    *(f"create view raw.{name} as select * from _{name}" for name in RAW),
    *(f"create view {name} as select * from _{name}" for name in ALIASES),
    *(f"create view {name} as {query}" for name, (query, _) in VIEWS.items()),
)
"""The views over the tables."""


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OutOfMemory as error:
        raise ValueError(
            f"the answer takes more than {database.MEMORY_BYTES / 2**30:g} GiB to compute: "
            "ask for less at once, or put the question to an export with DuckDB itself"
        ) from error
    except NoQuestion as error:
        raise ValueError("one question at a time, which changes nothing: a single SELECT, DESCRIBE, SUMMARIZE or EXPLAIN") from error
    except OSError as error:
        raise ValueError(f"the question cannot be computed: {error}") from error
    except (Refused, duckdb.Error) as error:
        text = re.split(r"\n\s*LINE \d+:", str(error))[0]
        if re.search(r"syntax error.*[,\"]", text) and re.search(r"\bgroup\b(?!\s+by)", str(error), re.IGNORECASE):
            text += "; group is a word of SQL: write group_id"
        raise ValueError(f"{' '.join(text.split())} (`penstock sql RUN` lists the views)") from error
