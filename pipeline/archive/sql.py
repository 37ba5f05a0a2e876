"""SQL over a run's live topics or an archive: tables, views, and the topics a query reads. Figures agree with `penstock report`."""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from decimal import Decimal
from typing import Any, TextIO, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.database import NO_LIMITS, Limits, Scanned, Source, Stored, compute, filled, prepare
from penstock.pipeline.archive.index.group_rows import GROUPS as GROUP_COLUMNS
from penstock.pipeline.archive.index.group_rows import STEPS
from penstock.pipeline.archive.index.run_index import all_groups, open_index
from penstock.pipeline.archive.index.segments import SampleCopy, index_folder
from penstock.pipeline.archive.layout import KINDS, kind_of
from penstock.pipeline.archive.rows import read_tables
from penstock.pipeline.inspect.report.summary import COUNTED
from penstock.pipeline.inspect.tables.run_tables import SAMPLES as SAMPLE_COLUMNS
from penstock.pipeline.inspect.tables.run_tables import TURNS, RunTables
from penstock.pipeline.inspect.tables.timeline import TIMELINE, timeline
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.topics.catalogue import RUNS_TOPIC

RAW = {
    name.replace("-", "_"): name
    for name in ("run", "prompts", "rollouts", "groups", "weights", "chunks", "ledger", "metrics", "dead-letters", "runs")
}
"""Table `raw.NAME` -> the archive's table, one row per record."""

TABLES: Mapping[str, tuple[pa.Schema, Callable[[RunTables], pa.Table]]] = {
    "samples": (SAMPLE_COLUMNS, RunTables.samples),
    "groups": (GROUP_COLUMNS, lambda of: all_groups(of.log, of.run)),
    "steps": (STEPS, lambda of: open_index(of.log, of.run)[0].steps()),
    "turns": (TURNS, RunTables.turns),
    "timeline": (TIMELINE, lambda of: timeline(of.log, of.run)),
}
"""Table -> (columns, function that computes the rows)."""

LAG = """
select g.step, t.version, group_id, s.sample, t.version - s.policy_version_min as lag,
       t.version - s.policy_version_max as lag_of_newest, t.version - g.policy_version_min as lag_of_group, s.tokens,
       (epoch_ns(t.committed) - epoch_ns(s.ended)) / 1e9 as age_s
from groups g join steps t on t.step = g.step join samples s using (group_id) where s.reward is not null
order by 1, 3, 4
"""

REWARDS = """
select policy_version_min as version, round(sum(reward_mean * rewarded) / sum(rewarded), 12) as reward,
       sum(rewarded)::bigint as samples, count(*) as groups
from (select *, samples - coalesce(no_reward, 0) as rewarded from groups)
where outcome in ('scored', 'filtered') and reward_mean is not null
group by 1 order by 1
"""

SAMPLES = """
select s."group" as group_id, s.sample, g.step, g.status, g.prompt, try(json_extract_string(g.columns, '$.answer')) as answer,
       s.completion, s.reward, s.advantage, s.tokens, s.* exclude ("group", sample, completion, reward, advantage, tokens)
from _samples_table s left join _groups_table g on g."group" = s."group"
"""

GROUPS = """
select "group" as group_id, step, try(json_extract_string(columns, '$.answer')) as answer, * exclude ("group", step) from _groups_table
"""

TURNS_IN_STEPS = """
with trained as (select step, unnest(groups) as number from _steps_table)
select p."group" as group_id, p.sample, p.turn, t.step, p.source, p.tokens, p.reward, p.finish,
       p.* exclude ("group", sample, turn, source, tokens, reward, finish)
from _turns_table p left join trained t on t.number = p."group"
order by p."group", p.sample, p.turn
"""

VIEWS: Mapping[str, tuple[str, frozenset[str]]] = {
    "samples": (SAMPLES, frozenset({"samples", "groups"})),
    "groups": (GROUPS, frozenset({"groups"})),
    "steps": ("from _steps_table", frozenset({"steps"})),
    "turns": (TURNS_IN_STEPS, frozenset({"turns", "steps"})),
    "lag": (LAG, frozenset({"samples", "groups", "steps"})),
    "rewards": (REWARDS, frozenset({"groups"})),
}
"""View -> (query, tables that the query reads). A view comes after the views that it uses."""


ALIASES = tuple(name for name in RAW if name not in TABLES)
"""Tables of the schema `raw` that can also be named without `raw.`."""
_WORD = re.compile(r"[a-z_]+")
_IN_RAW = re.compile(r"\braw\s*\.\s*([a-z_]+)")
_COMPUTED_NAMES = {"query", "query_table"}
_OURS = "select view_name as name from duckdb_views() where not internal and schema_name = 'main' and view_name[1] <> '_' order by 1"
"""Query that replaces `show tables`: it hides the tables behind the views."""
_SHOW = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)


class LiveTables:
    """Tables of a run's live topics. A table has the records up to the end offsets at its first read."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self.log, self.run = log, run
        prepare()

    def computed(self, names: Collection[str]) -> dict[str, Source]:
        """Return `samples`, `groups` and `steps` from the run's index, if they are in `names`."""
        tables: dict[str, Source] = {}
        if not {"samples", "groups", "steps"}.isdisjoint(names):
            index, ended = open_index(self.log, self.run)
            if "groups" in names:
                files, rest = index.stored_groups(ended=ended)
                tables["groups"] = Stored(files=files, rest=rest)
            if "steps" in names:
                tables["steps"] = index.steps()
            if "samples" in names:
                tables["samples"] = self._samples(index.groups(ended=ended))
        return tables

    def _samples(self, groups: pa.Table) -> Stored:
        """Return the table `samples`: from files in the run's directory, and the rows after them from the log."""
        waiting = groups.filter(pc.equal(pc.fill_null(groups["samples"], 0), 0)) if len(groups) else groups
        admitted = [time for time in waiting["admitted"].cast(pa.int64()).to_pylist() if time is not None]
        folder = index_folder(self.run)
        copy = SampleCopy(self.log, self.run, directory=None if folder is None else folder / "samples")
        rest = copy.catch_up(waiting["group"].to_pylist(), since_ms=min(admitted, default=0) // 1_000_000)
        return Stored(files=copy.paths, rest=rest)

    def rows(self, name: str) -> pa.Table:
        """Return the `raw` table of this name: a row per record of its topic, up to the current end offsets."""
        kind = KINDS[name]
        topic = kind.kafka_name(self.run)
        count = self.log.partitions(topic) or 0
        partitions = [(topic, partition) for partition in range(count) if kind_of(kind.topic, partition) is kind]
        starts, ends = self.log.beginning_offsets(partitions), self.log.end_offsets(partitions)
        with closing(BulkReader(self.log.connection)) as reader:
            blocks = [
                table for tp in partitions for table, _ in read_tables(reader, kind, tp[1], run=self.run, first=starts[tp], end=ends[tp])
            ]
        return pa.concat_tables(blocks) if blocks else kind.schema.empty_table()


class ArchivedTables:
    """Tables of an archive, whose files are read lazily."""

    def __init__(self, archived: ArchivedLog) -> None:
        self.log, self.run, self._archive = cast(Log, archived), archived.run, archived.archive

    def rows(self, name: str) -> Source:
        """Return the archived table of this name, as the list of its files."""
        kind, archive = KINDS[name], self._archive
        files = [str(path) for partition in archive.partitions(kind) for path in archive.files(kind, partition)]
        return Scanned(files=files, schema=kind.schema) if files else kind.schema.empty_table()


Tables: TypeAlias = LiveTables | ArchivedTables


def ask(tables: Tables, query: str, limits: Limits = NO_LIMITS) -> pa.Table:
    """Read the tables that a query names, and return its result. Raises `ValueError` if DuckDB refuses it, or at a limit."""
    sources = _tables(tables, _named(query))
    try:
        return compute(sources, _SETUP, _OURS if _SHOW.fullmatch(query) else query, limits)
    except OSError as error:
        raise ValueError(f"the query cannot be computed: {error}") from error


def plain(value: Any) -> Any:
    """Convert a value for JSON: bytes to hexadecimal, times to ISO 8601, NaN and infinity to None."""
    if isinstance(value, Decimal):  # DuckDB's type for sums of integers
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):  # noqa: PLR0124
        return None
    return value.isoformat() if hasattr(value, "isoformat") else value


FORMATS = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl", "parquet": "application/vnd.apache.parquet"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_file(table: pa.Table, ending: str) -> bytes:
    """Encode a result as `ending`, one of `FORMATS`. In CSV, an apostrophe precedes a text that a spreadsheet would run as a formula."""
    if ending == "parquet":
        pq.write_table(table, packed := io.BytesIO())
        return packed.getvalue()
    if ending == "jsonl":
        return "".join(f"{json.dumps(plain(row))}\n" for row in table.to_pylist()).encode()
    write_csv(table, text := io.StringIO(newline=""), end="\r\n", safe=True)
    return text.getvalue().encode("utf-8", "replace")


def write_csv(table: pa.Table, stream: TextIO, *, end: str = "\n", safe: bool = False) -> None:
    """Write a result as CSV, lists as JSON. With `safe`, an apostrophe precedes a text that a spreadsheet would run as a formula."""
    writer = csv.writer(line := io.StringIO(newline=""))  # it quotes the characters of its own line end, CR and LF
    for values in [table.column_names, *(plain(row).values() for row in table.to_pylist())]:
        writer.writerow([_cell(value, safe=safe) for value in values])
        stream.write(line.getvalue().removesuffix("\r\n") + end)
        line.seek(0)
        line.truncate()


def _cell(value: Any, *, safe: bool) -> Any:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return f"'{value}" if safe and isinstance(value, str) and value.startswith(_FORMULA) else value


def deleted_records(tables: Tables, query: str) -> list[str]:
    """Return a sentence per partition from which retention has deleted records that the query would read."""
    named = _named(query)
    topics = {KINDS[table].topic for name, table in RAW.items() if f"raw.{name}" in named} | (
        set(COUNTED) if named & TABLES.keys() else set()
    )
    return deleted(tables.log, *(f"{tables.run}.{topic}" for topic in sorted(topics - {RUNS_TOPIC})))


def views(steps: pa.Schema = STEPS) -> dict[str, list[tuple[str, str]]]:
    """Return view or table -> its (column, type) pairs; `steps` are the columns of the run's steps, including metrics."""
    tables = _tables(None, set()) | {_own("steps"): pa.Table.from_batches([], schema=steps)}
    with filled(tables.items(), _SETUP) as connection:
        names = [*VIEWS, *(name for name in TABLES if name not in VIEWS), *ALIASES, *(f"raw.{name}" for name in RAW if name not in ALIASES)]
        return {name: [(row[0], row[1]) for row in connection.execute(f"describe from {name}").fetchall()] for name in names}


def _named(query: str) -> set[str]:
    """Return the views and tables among a query's words (raw ones as `raw.NAME`). It is not parsed: DuckDB may take minutes for that."""
    text = query.lower().replace('"', "")
    plain = set(_WORD.findall(_IN_RAW.sub(" ", text)))
    if plain & _COMPUTED_NAMES:
        return {*VIEWS, *TABLES, *(f"raw.{name}" for name in RAW)}
    in_raw = {*_IN_RAW.findall(text), *(plain if "raw" in plain else plain & set(ALIASES))}
    tables = plain | {f"raw.{name}" for name in in_raw}
    return tables | {table for view, (_, needed) in VIEWS.items() if view in tables for table in needed}


def _tables(tables: Tables | None, named: set[str]) -> dict[str, Source]:
    """Return all tables of the database; only those in `named` have rows."""
    filled_in = {
        f"_{name}": tables.rows(table) if tables is not None and f"raw.{name}" in named else KINDS[table].schema.empty_table()
        for name, table in RAW.items()
    }
    run = None if tables is None else RunTables(tables.log, tables.run)
    computed = tables.computed(named) if isinstance(tables, LiveTables) else {}
    for name, (schema, make) in TABLES.items():
        rows = computed.get(name) if name in named else schema.empty_table()
        filled_in[_own(name)] = make(run) if rows is None and run is not None else rows
    return filled_in


def _own(name: str) -> str:
    """Return the name in the database of a table in `TABLES`, which differs if a view has the same name."""
    return f"_{name}_table" if name in VIEWS else name


_SETUP = (
    "create schema raw",
    *(f"create view raw.{name} as select * from _{name}" for name in RAW),
    *(f"create view {name} as select * from _{name}" for name in ALIASES),
    *(f"create view {name} as {query}" for name, (query, _) in VIEWS.items()),
)
