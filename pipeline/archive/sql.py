"""Questions in SQL to a run: over its live topics, or over an archive.

The rule: a question sees the run's tables and nothing else, neither files nor the network, and only the topics that it names are read.
"""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, cast

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.layout import KINDS, kind_of
from penstock.pipeline.archive.rows import read_tables
from penstock.pipeline.archive.views import RAW, TABLES, VIEWS
from penstock.pipeline.observe.report.summary import COUNTED
from penstock.pipeline.observe.tables.samples_groups_steps import RunTables
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.topics.catalogue import RUNS_TOPIC

MEMORY = "2GiB"
"""Of one question, beside the tables that it is about: it may be asked beside the workers of a run."""
AGAIN_S = 0.1
ALIASES = tuple(name for name in RAW if name not in TABLES)
"""Tables of `raw` that can be named without it."""
_ASKING = {"SELECT", "EXPLAIN", "RELATION", "PRAGMA"}
_WORD = re.compile(r"[A-Za-z_]+")
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

    def rows(self, name: str) -> Any:
        """The archive's table of that name, as something DuckDB scans."""
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
        begins, ends = self.log.begin_offsets(places), self.log.end_offsets(places)
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

    def rows(self, name: str) -> Any:
        """All files of the table as one."""
        kind, archive = KINDS[name], self._archived.archive
        files = [str(path) for partition in archive.partitions(kind) for path in archive.files(kind, partition)]
        return ds.dataset(files, schema=kind.schema, format="parquet") if files else kind.schema.empty_table()


def ask(tables: Tables, query: str) -> pa.Table:
    """The answer to one question. Raises `ValueError` with DuckDB's own hint for what is no SQL or names what is not there."""
    with _translated():
        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type.name not in _ASKING:
            raise ValueError("one question at a time, which changes nothing: a single SELECT, DESCRIBE, SUMMARIZE or EXPLAIN")
        connection = _connect(tables, _named(query))
        try:
            return _computed(connection, _OURS if _SHOW.fullmatch(query) else query)
        finally:
            connection.close()


def _computed(connection: duckdb.DuckDBPyConnection, query: str) -> pa.Table:
    """The answer, by a thread of its own: while DuckDB computes, it lets no signal through. Ctrl-C ends it."""
    answer = Future[pa.Table]()

    def compute() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(connection.sql(query).to_arrow_table())
            except BaseException as error:
                answer.set_exception(error)

    try:
        threading.Thread(target=compute, name="sql", daemon=True).start()
        return answer.result()
    except KeyboardInterrupt:
        while not answer.cancel() and not answer.done():  # the begin of a computation cannot be interrupted
            connection.interrupt()
            wait([answer], AGAIN_S)
        raise


def gone_from(tables: Tables, query: str) -> list[str]:
    """Which records of the topics that a question is about were deleted, a line for each partition; none for one about no table."""
    named = _named(query)
    topics = {KINDS[table].topic for name, table in RAW.items() if f"raw.{name}" in named} | (
        set(COUNTED) if named & TABLES.keys() else set()
    )
    return deleted(tables.log, *(f"{tables.run}.{topic}" for topic in sorted(topics - {RUNS_TOPIC})))


def views() -> dict[str, list[tuple[str, str]]]:
    """View -> its columns with their types."""
    connection = _connect(None, set())
    try:
        names = [*VIEWS, *(name for name in TABLES if name not in VIEWS), *ALIASES, *(f"raw.{name}" for name in RAW if name not in ALIASES)]
        return {name: [(row[0], row[1]) for row in connection.execute(f"describe from {name}").fetchall()] for name in names}
    finally:
        connection.close()


def _named(query: str) -> set[str]:
    """The views and tables whose rows a question may need, those of `raw` as `raw.NAME`; rather one too many."""
    try:
        names = duckdb.connect().get_table_names(query, qualified=True)
    except duckdb.Error:
        names = set()
    paths = [_WORD.findall(name.partition(" AS ")[0].lower()) for name in names]
    tables = {f"raw.{path[-1]}" if "raw" in path or path[-1] in ALIASES else path[-1] for path in paths if path}
    if not tables:
        words = set(_WORD.findall(query.lower()))
        tables = words | {f"raw.{word}" for word in (words if "raw" in words else words & set(ALIASES))}
    return tables | {table for view, (_, needed) in VIEWS.items() if view in tables for table in needed}


def _connect(tables: Tables | None, named: set[str]) -> duckdb.DuckDBPyConnection:
    """A database in memory with all tables and views; the tables that were named have rows."""
    connection = duckdb.connect()
    connection.execute("create schema raw; set python_enable_replacements = false; set timezone = 'UTC'")
    connection.execute(f"set memory_limit = '{MEMORY}'; set temp_directory = ''")
    for name, table in RAW.items():
        rows = tables.rows(table) if tables is not None and f"raw.{name}" in named else KINDS[table].schema.empty_table()
        connection.register(f"_{name}", rows)
        connection.execute(f"create view raw.{name} as select * from _{name}")
        if name in ALIASES:
            connection.execute(f"create view {name} as select * from _{name}")
    made = None if tables is None else RunTables(tables.log, tables.run)
    for name, (schema, make) in TABLES.items():
        own = f"_{name}_table" if name in VIEWS else name
        connection.register(own, make(made) if made is not None and name in named else schema.empty_table())
    for name, (query, _) in VIEWS.items():
        connection.execute(f"create view {name} as {query}")
    connection.execute("set enable_external_access = false; set lock_configuration = true")
    return connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise ValueError(
            f"the answer takes more than {MEMORY} to compute: ask for less at once, or put the question to an export with DuckDB itself"
        ) from error
    except duckdb.Error as error:
        text = re.split(r"\n\s*LINE \d+:", str(error))[0]
        if re.search(r"syntax error.*[,\"]", text) and re.search(r"\bgroup\b(?!\s+by)", str(error), re.IGNORECASE):
            text += "; group is a word of SQL: write group_id"
        raise ValueError(f"{' '.join(text.split())} (`penstock sql RUN` lists the views)") from error
