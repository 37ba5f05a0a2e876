"""Runs SQL queries with DuckDB, each in a process with limits of memory and time and without access to files, network or settings."""

import contextlib
import json
import os
import queue
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox.keeper import limit, statm_bytes

MAPPED = 0
"""Field of `statm` for the memory that RLIMIT_AS counts."""
MEMORY_BYTES = 2 << 30
"""DuckDB's memory limit. The process may use twice as much in addition to the tables, because DuckDB does not count the values of a row."""
THREADS = 4
POLL_S = 0.005
OUT_OF_MEMORY, REFUSED, INVALID = 3, 4, 5
"""Exit statuses of a query process. For the last two, stderr has the error message: DuckDB's, or one of ours."""
_READ_ONLY = {"SELECT", "EXPLAIN", "RELATION", "PRAGMA"}
_MAIN = f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.pipeline.archive.database import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """A table in Parquet files of any writer, which are read lazily."""

    files: Sequence[str]
    schema: pa.Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A table of the run index: rows in its files, and later rows in memory."""

    files: Sequence[Path]
    """Parquet files, or Arrow files, of which only the columns of `rest` are used."""
    rest: pa.Table


Source: TypeAlias = pa.Table | Scanned | Stored
"""The rows of a table: in memory, in Parquet files, or in the files of an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits at which a query is stopped."""

    rows: int | None = None
    """Largest number of returned rows; further rows are cut off. None for all."""
    size: int = MEMORY_BYTES
    seconds: float | None = None
    disconnected: Callable[[], bool] = lambda: False
    """Returns True if the client no longer waits for the result."""


NO_LIMITS = Limits()


def open_database() -> duckdb.DuckDBPyConnection:
    """Open an empty in-memory database without extensions."""
    return duckdb.connect(
        config={
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
            "memory_limit": f"{MEMORY_BYTES}B",
            "temp_directory": "",
            "threads": str(min(THREADS, os.cpu_count() or 1)),
        }
    )


def filled(
    tables: Iterable[tuple[str, Any]], setup: Sequence[str], files: Sequence[str] = (), connection: duckdb.DuckDBPyConnection | None = None
) -> duckdb.DuckDBPyConnection:
    """Fill a database (a new one if None) with tables, and run `setup`; it reads no other files than `files`, and settings are locked."""
    connection = connection or open_database()
    connection.execute(f"set allowed_paths = [{', '.join(map(_literal, files))}]")
    connection.execute("set enable_external_access = false")
    for name, table in tables:
        connection.register(name, table)
    for statement in ("set timezone = 'UTC'", *setup, "set lock_configuration = true"):
        connection.execute(statement)
    return connection


class _Process:
    """A process that computes one query, with its pipes and temporary files."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            self.rows, self.result, self.problem = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(self.rows.fileno())],
                stdin=subprocess.PIPE,
                stdout=self.result,
                stderr=self.problem,
                pass_fds=(self.rows.fileno(),),
                start_new_session=True,  # Ctrl-C goes to the parent only, which stops the query
            )
            self._files = stack.pop_all()

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._files.close()


_spare: "queue.SimpleQueue[_Process]" = queue.SimpleQueue()


def prepare() -> None:
    """Start the process of the next query in advance, because loading its libraries takes longer than most queries."""
    if _spare.empty():
        _spare.put(_Process())


def _take() -> _Process:
    try:
        return _spare.get_nowait()
    except queue.Empty:
        return _Process()


def compute(tables: Mapping[str, Source], setup: Sequence[str], query: str, limits: Limits = NO_LIMITS) -> pa.Table:
    """Run a query over `tables`, after the `setup` statements, in another process, and return its result.

    Raises `ValueError` if DuckDB refuses the query, it is not one read-only statement, or a limit is exceeded.
    """
    with contextlib.closing(_take()) as process:
        for table in tables.values():
            rest = table.rest if isinstance(table, Stored) else table
            with pa.ipc.new_stream(process.rows, rest.schema) as stream:
                if not isinstance(rest, Scanned):
                    stream.write_table(rest)
        process.rows.flush()
        request = {
            "setup": setup,
            "query": query,
            "rows": limits.rows,
            "size": limits.size,
            "memory": MEMORY_BYTES,
            "names": list(tables),
            "files": {name: table.files for name, table in tables.items() if isinstance(table, Scanned)},
            "stored": {name: list(map(str, table.files)) for name, table in tables.items() if isinstance(table, Stored)},
        }
        stdin = process.popen.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has exited: its exit status is reported
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()  # the pipe stays open, because the process exits when it is closed
        _wait(process.popen, limits)
        process.problem.seek(0)
        _raise_for(process.popen.returncode, process.problem.read().decode("utf-8", "replace").strip())
        process.result.seek(0)
        return pa.ipc.open_stream(process.result).read_all()


def _wait(process: "subprocess.Popen[bytes]", limits: Limits) -> None:
    """Wait until the process exits. Raises `ValueError` at the time limit, or if the client has disconnected."""
    deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
    while process.poll() is None:
        if limits.disconnected():
            raise ValueError("the client has disconnected")
        if deadline is not None and time.monotonic() > deadline:
            raise ValueError(f"the query took more than {limits.seconds:g} s: narrow it, or use `penstock sql`, which has no limit")
        time.sleep(POLL_S)


def _raise_for(status: int, problem: str) -> None:
    """Raise `ValueError` with the cause if a query process failed; `problem` is what it wrote to stderr."""
    if status == OUT_OF_MEMORY or "MemoryError" in problem or "bad_alloc" in problem:
        limit_gib = f"{MEMORY_BYTES / 2**30:g} GiB"
        raise ValueError(f"the query needs more than {limit_gib}: narrow it, or export the run and query the files with DuckDB")
    if status == INVALID:
        raise ValueError(problem)
    if status == REFUSED:
        text = re.split(r"\n\s*LINE \d+:", problem)[0]
        if re.search(r"syntax error.*[,\"]", text) and re.search(r"\bgroup\b(?!\s+by)", problem, re.IGNORECASE):
            text += "; group is an SQL keyword: write group_id"
        raise ValueError(f"{' '.join(text.split())} (`penstock sql RUN` lists the views)")
    if status:
        raise ValueError(f"the query's process exited with status {status}: {(problem.splitlines() or ['narrow the query'])[-1]}")


def main() -> None:
    """Entry point of a query process: reads the request from stdin and tables from a file; writes the result as Arrow stream to stdout."""
    connection = open_database()  # before there is a request
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        _run(request, int(sys.argv[1]), connection)
        status = 0
    except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
        status = OUT_OF_MEMORY
    except (duckdb.Error, pa.ArrowException, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        status = REFUSED if isinstance(error, duckdb.Error | pa.ArrowException) else INVALID
    os._exit(status)


def _run(request: Mapping[str, Any], descriptor: int, connection: duckdb.DuckDBPyConnection) -> None:
    """Compute the result of a request and write it to stdout; the file `descriptor` has an Arrow stream for each of its tables."""
    source, memory, files = pa.memory_map(f"/proc/self/fd/{descriptor}"), request["memory"], request["files"]
    tables: dict[str, Any] = {name: pa.ipc.open_stream(source).read_all() for name in request["names"]}
    if files:
        import pyarrow.dataset as ds

        tables |= {name: ds.dataset(paths, schema=tables[name].schema, format="parquet") for name, paths in files.items()}
    setup, parquet = [f"set memory_limit = '{memory}B'"], list[str]()
    for name, paths in request["stored"].items():
        if paths and paths[0].endswith(".parquet"):
            parquet += paths
            tables[f"{name}_rest"] = tables.pop(name)
            listed = ", ".join(map(_literal, paths))
            setup.append(f"create view {name} as from read_parquet([{listed}]) union all by name from {name}_rest")
        elif paths:
            mapped = [pa.ipc.open_file(pa.memory_map(path)).read_all().select(tables[name].column_names) for path in paths]
            tables[name] = pa.concat_tables([*mapped, tables[name]], promote_options="default")
    filled(tables.items(), [*setup, *request["setup"]], parquet, connection)
    limit(resource.RLIMIT_AS, statm_bytes(os.getpid(), MAPPED) + 2 * memory)
    statements = connection.extract_statements(request["query"])
    if len(statements) != 1 or statements[0].type.name not in _READ_ONLY:
        raise ValueError("the query must be one read-only statement: SELECT, DESCRIBE, SUMMARIZE or EXPLAIN")
    remaining, size = request["rows"], 0
    batches = connection.sql(request["query"]).to_arrow_reader(1000)
    with pa.ipc.new_stream(sys.stdout.buffer, batches.schema) as stream:
        for batch in batches:
            size += batch.nbytes
            if size > request["size"]:
                raise ValueError(f"the result is larger than {request['size'] >> 20:,} MiB: select fewer rows or columns")
            stream.write_batch(batch if remaining is None else batch.slice(0, remaining))
            remaining = None if remaining is None else remaining - batch.num_rows
            if remaining is not None and remaining <= 0:
                break
    sys.stdout.flush()


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _exit_with_parent() -> None:
    sys.stdin.buffer.read(1)
    os._exit(1)
