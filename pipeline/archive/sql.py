"""Questions in SQL to a run: over its live topics, or over an archive.

The rule: a question sees the run's views and nothing else, neither files nor the network, and only the topics that it names are read.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.files import Archive
from penstock.pipeline.archive.layout import KINDS, kind_of
from penstock.pipeline.archive.source import TopicRows
from penstock.pipeline.archive.views import INNER, NEEDS, RAW, VIEWS
from penstock.pipeline.observe.tables.timeline import TIMELINE, timeline

ALIASES = tuple(name for name in RAW if name not in VIEWS)
"""Tables of `raw` that can be named without it."""
_ASKING = {"SELECT", "EXPLAIN", "RELATION", "PRAGMA"}
_QUOTED = re.compile(r"[A-Za-z_]+")


class Tables(Protocol):
    """Where the rows of a run come from."""

    def rows(self, name: str) -> Any:
        """The archive's table of that name, as something DuckDB scans."""
        ...

    def timeline(self) -> pa.Table:
        """`TIMELINE`."""
        ...


class LiveTables:
    """The topics as they are now; each is read once."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self._log, self._run = log, run
        self._read: dict[str, pa.Table] = {}

    def rows(self, name: str) -> pa.Table:
        """Up to the ends of when it was first asked for."""
        if name not in self._read:
            self._read[name] = self._fetch(name)
        return self._read[name]

    def _fetch(self, name: str) -> pa.Table:
        kind = KINDS[name]
        topic = kind.kafka_name(self._run)
        count = self._log.partitions(topic) or 0
        places = [(topic, partition) for partition in range(count) if kind_of(kind.topic, partition) is kind]
        begins, ends = self._log.begin_offsets(places), self._log.end_offsets(places)
        source = TopicRows(self._log, self._run)
        try:
            found = [table for place in places for table, _ in source.read(kind, place[1], first=begins[place], end=ends[place])]
        finally:
            source.close()
        return pa.concat_tables(found) if found else kind.schema.empty_table()

    def timeline(self) -> pa.Table:
        """From the log."""
        return timeline(self._log, self._run)


class ArchivedTables:
    """The files of an archive, read as far as a question needs them."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def rows(self, name: str) -> Any:
        """All files of the table as one."""
        kind = KINDS[name]
        files = [str(path) for partition in self._archive.partitions(kind) for path in self._archive.files(kind, partition)]
        return ds.dataset(files, schema=kind.schema, format="parquet") if files else kind.schema.empty_table()

    def timeline(self) -> pa.Table:
        """From the archived records."""
        return timeline(cast(Log, ArchivedLog(self._archive)), self._archive.run)


def ask(tables: Tables, query: str) -> pa.Table:
    """The answer to one question. Raises `ValueError` with DuckDB's own hint for what is no SQL or names what is not there."""
    with _translated():
        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type.name not in _ASKING:
            raise ValueError("one question at a time: a single SELECT, DESCRIBE, SUMMARIZE or EXPLAIN")
        connection = _connect(tables, _named(query))
        try:
            return connection.sql(query).to_arrow_table()
        finally:
            connection.close()


def views() -> dict[str, list[tuple[str, str]]]:
    """View -> its columns with their types."""
    connection = _connect(None, set())
    try:
        names = [*VIEWS, "timeline", *ALIASES, *(f"raw.{name}" for name in RAW if name not in ALIASES)]
        return {name: [(row[0], row[1]) for row in connection.execute(f"describe from {name}").fetchall()] for name in names}
    finally:
        connection.close()


def _named(query: str) -> set[str]:
    """The views and tables that a question may need; rather one too many."""
    try:
        words = {
            word for name in duckdb.connect().get_table_names(query, qualified=True) for word in _QUOTED.findall(name.partition(" AS ")[0])
        }
    except duckdb.Error:
        words = set()
    return words or set(_QUOTED.findall(query))


def _connect(tables: Tables | None, named: set[str]) -> duckdb.DuckDBPyConnection:
    """A database in memory with all views; those that were named have rows."""
    connection = duckdb.connect()
    connection.execute("create schema raw; set python_enable_replacements = false; set timezone = 'UTC'")
    needed = {name for name in named if name in RAW} | {name for view in named for name in NEEDS.get(view, ())}
    for name, table in RAW.items():
        rows = tables.rows(table) if tables is not None and name in needed else KINDS[table].schema.empty_table()
        connection.register(f"_{name}", rows)
        connection.execute(f"create view raw.{name} as select * from _{name}")
        if name in ALIASES:
            connection.execute(f"create view {name} as select * from _{name}")
    found = tables.timeline() if tables is not None and "timeline" in named else TIMELINE.empty_table()
    connection.register("timeline", found)
    for name, text in INNER.items():
        connection.execute(f"create view {name} as {text}")
    metrics = connection.execute("select distinct unnest(map_keys(metrics)) from ledger_first where kind = 'step' order by 1").fetchall()
    columns = "".join(
        f''', metrics['{name.replace("'", "''")}'] as "{name.replace('"', '""')}"'''
        for (name,) in metrics
        if name not in ("groups", "step", "version")
    )
    for name, text in VIEWS.items():
        connection.execute(f"create view {name} as {text.replace('{metrics}', columns)}")
    connection.execute("set enable_external_access = false; set lock_configuration = true")
    return connection


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        said = re.split(r"\n\s*LINE \d+:", str(error))[0]
        raise ValueError(f"{' '.join(said.split())} (`penstock sql RUN` lists the views)") from error
