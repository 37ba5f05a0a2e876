"""Computes questions in SQL, each in a process of its own with limits of memory and time.

Invariant: no statement of a question reaches a file, an extension, the network or a setting.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox.keeper.confined import limit
from penstock.infra.sandbox.keeper.process_tree import statm_bytes

MAPPED = 0
"""Field of `statm` for the memory that RLIMIT_AS counts."""
MEMORY_BYTES = 2 << 30
"""Of DuckDB. The process may take twice as much in addition to the tables: the values of one row are outside DuckDB's limit."""
THREADS = 4
POLL_S = 0.1
OUT_OF_MEMORY, REFUSED, TOO_LARGE, NO_QUESTION = 3, 4, 5, 6
"""Exit statuses of a question's process."""
_ASKING = {"SELECT", "EXPLAIN", "RELATION", "PRAGMA"}
_MAIN = f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.pipeline.archive.database import main; main()"


class OutOfMemory(ValueError):
    """A question takes more memory than it may."""


class NoQuestion(ValueError):
    """Several statements, or one that changes something."""


class _TooLarge(Exception):
    """An answer has more bytes than `Limits.size`."""


class Refused(ValueError):
    """A question that DuckDB refuses; the text is DuckDB's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """A table of Parquet files, read as far as a question needs them."""

    files: Sequence[str]
    schema: pa.Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a question is ended before DuckDB is done."""

    rows: int | None = None
    """Rows that are computed; None for all."""
    size: int = MEMORY_BYTES
    """Bytes of an answer that is not refused."""
    seconds: float | None = None
    gone: Callable[[], bool] = lambda: False
    """True if the asker waits no longer."""


NO_LIMITS = Limits()


def open_database() -> duckdb.DuckDBPyConnection:
    """An empty database in memory that nothing outside can be reached from."""
    return duckdb.connect(
        config={
            "enable_external_access": "false",
            "autoload_known_extensions": "false",
            "autoinstall_known_extensions": "false",
            "allow_community_extensions": "false",
            "python_enable_replacements": "false",
            "memory_limit": f"{MEMORY_BYTES}B",
            "temp_directory": "",
            "threads": str(min(THREADS, os.cpu_count() or 1)),
        }
    )


def filled(tables: Iterable[tuple[str, Any]], setup: Sequence[str]) -> duckdb.DuckDBPyConnection:
    """A database with these tables, after the statements of `setup`; its settings are locked."""
    connection = open_database()
    for name, table in tables:
        connection.register(name, table)
    for statement in ("set timezone = 'UTC'", *setup, "set lock_configuration = true"):
        connection.execute(statement)
    return connection


def compute(tables: Mapping[str, "pa.Table | Scanned"], setup: Sequence[str], query: str, limits: Limits = NO_LIMITS) -> pa.Table:
    """The answer. Raises `Refused`, `NoQuestion`, `OutOfMemory`, and `ValueError` at a limit; Ctrl-C ends the process, too."""
    files = {name: table.files for name, table in tables.items() if isinstance(table, Scanned)}
    with tempfile.TemporaryFile() as rows, tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as problem:
        for table in tables.values():
            with pa.ipc.new_stream(rows, table.schema) as stream:
                if not isinstance(table, Scanned):
                    stream.write_table(table)
        rows.flush()
        request = {
            "setup": setup,
            "query": query,
            "rows": limits.rows,
            "size": limits.size,
            "memory": MEMORY_BYTES,
            "names": list(tables),
            "files": files,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, str(rows.fileno())],
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=problem,
            pass_fds=(rows.fileno(),),
            start_new_session=True,  # Ctrl-C goes to the asker only, which ends the question
        )
        try:
            _send(process, request)
            _wait(process, limits)
        finally:
            process.kill()
            process.wait()
        problem.seek(0)
        _raise_for(process.returncode, problem.read().decode("utf-8", "replace"), limits)
        answer.seek(0)
        return pa.ipc.open_stream(answer).read_all()


def _send(process: "subprocess.Popen[bytes]", request: Mapping[str, Any]) -> None:
    """Send the request; the pipe stays open, as its end ends the process."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # its exit status tells why


def _wait(process: "subprocess.Popen[bytes]", limits: Limits) -> None:
    ends = None if limits.seconds is None else time.monotonic() + limits.seconds
    while True:
        try:
            process.wait(POLL_S)
            return
        except subprocess.TimeoutExpired:
            if limits.gone():
                raise ValueError("the asker waits no longer") from None
            if ends is not None and time.monotonic() > ends:
                raise ValueError(f"no answer within {limits.seconds:g} s: ask for less at once, or use `penstock sql`") from None


def _raise_for(status: int, problem: str, limits: Limits) -> None:
    if status == OUT_OF_MEMORY or "MemoryError" in problem or "bad_alloc" in problem:
        raise OutOfMemory
    if status == NO_QUESTION:
        raise NoQuestion
    if status == TOO_LARGE:
        raise ValueError(f"an answer of more than {limits.size >> 20:,} MiB: select fewer rows or columns")
    if status == REFUSED:
        raise Refused(problem)
    if status:
        last = (problem.strip().splitlines() or [""])[-1]
        raise ValueError(f"the question's process ended with status {status}: {last or 'ask for less at once'}")


def main() -> None:
    """A question's process: the request is a line on stdin, the tables are in a file, the answer goes to stdout as an Arrow stream."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_asker, daemon=True).start()
    try:
        _answer(request, int(sys.argv[1]))
        status = 0
    except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
        status = OUT_OF_MEMORY
    except NoQuestion:
        status = NO_QUESTION
    except _TooLarge:
        status = TOO_LARGE
    except (duckdb.Error, pa.ArrowException) as error:
        print(error, file=sys.stderr, flush=True)
        status = REFUSED
    os._exit(status)


def _answer(request: Mapping[str, Any], descriptor: int) -> None:
    source, memory, files = pa.memory_map(f"/proc/self/fd/{descriptor}"), request["memory"], request["files"]
    tables = {name: pa.ipc.open_stream(source).read_all() for name in request["names"]}
    scanned = {name: ds.dataset(paths, schema=tables[name].schema, format="parquet") for name, paths in files.items()}
    connection = filled((tables | scanned).items(), [f"set memory_limit = '{memory}B'", *request["setup"]])
    limit(resource.RLIMIT_AS, statm_bytes(os.getpid(), MAPPED) + 2 * memory)
    statements = connection.extract_statements(request["query"])
    if len(statements) != 1 or statements[0].type.name not in _ASKING:
        raise NoQuestion
    left, size = request["rows"], 0
    batches = connection.sql(request["query"]).to_arrow_reader(1000)
    with pa.ipc.new_stream(sys.stdout.buffer, batches.schema) as stream:
        for batch in batches:
            size += batch.nbytes
            if size > request["size"]:
                raise _TooLarge
            stream.write_batch(batch if left is None else batch.slice(0, left))
            left = None if left is None else left - batch.num_rows
            if left is not None and left <= 0:
                break
    sys.stdout.flush()


def _end_with_asker() -> None:
    """End this process when the asker has closed the pipe, or has ended."""
    sys.stdin.buffer.read(1)
    os._exit(1)
