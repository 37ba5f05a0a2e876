"""An append-only table in a directory: memory-mapped Arrow files or Parquet files, each written atomically.

The name of a file has the numbers of its first and last segment, and its metadata the offsets to continue from: after a kill, later records
are read again. `MERGED` files of similar size are merged to one.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.infra.log import Log, Partition
from penstock.infra.paths import complete, run_directory
from penstock.pipeline.inspect.tables.run_tables import SAMPLES, Advantages, sample_rows, unscored_rows
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics import groups
from penstock.topics.groups import GroupAssembler
from penstock.topics.wire.errors import Unusable

FOLDER = "index"
FORMAT = 2
ROWS = 256
"""Smallest number of rows per file, except the last one."""
MERGED = 16
MERGED_BYTES = 256 << 20
"""Largest total size of files that are merged."""
GRACE_S = 600.0
"""Merged files are deleted after this time, because a running query may still read them."""
_NAME = re.compile(r"(\d{10})-(\d{10})\.(arrow|parquet)")
_STATE = b"penstock.index"


class _File(NamedTuple):
    first: int
    last: int
    path: Path
    table: pa.Table
    """Rows of an Arrow file; for Parquet an empty table with its schema."""
    rows: int


class Segments:
    """The files of one table. Methods raise `OSError`."""

    def __init__(self, directory: Path, identity: str | None, *, parquet: bool = False) -> None:
        """Open the files in `directory` that were written with the same `identity`; with any identity if None."""
        self.directory, self._identity, self._suffix = directory, identity, "parquet" if parquet else "arrow"
        self._lock: int | None = None
        self._files = self._read()

    @property
    def tables(self) -> list[pa.Table]:
        """The rows of each Arrow file, in order."""
        return [file.table for file in self._files]

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def state(self) -> dict[str, Any]:
        """The `state` that the last file was written with; empty if there is no file."""
        return _state(self._files[-1].table) if self._files else {}

    def lock(self) -> bool:
        """Become the only writer until `close`; return False if another process is the writer."""
        if self._lock is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / ".lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # also of a file system without locks
                os.close(lock)
                return False
            self._lock, self._files = lock, self._read()
            self._clear()
        return True

    def append(self, table: pa.Table, state: Mapping[str, Any]) -> None:
        """Write the rows as a new file with the metadata `state`, and merge files if there are enough. Call `lock` first."""
        first = self._files[-1].last + 1 if self._files else 0
        self._files.append(self._write(first, first, table, state))
        with contextlib.suppress(OSError):  # the rows are written; a later `append` merges
            while len(parts := self._files[-MERGED:]) == MERGED and len({_level(part.rows) for part in parts}) == 1:
                import pyarrow.parquet as pq

                if sum(part.path.stat().st_size for part in parts) > MERGED_BYTES:
                    return
                tables = [pq.read_table(part.path) if self._suffix == "parquet" else part.table for part in parts]
                merged = pa.concat_tables(tables, promote_options="default").combine_chunks()
                self._files[-MERGED:] = [self._write(parts[0].first, parts[-1].last, merged, state)]
                self._clear()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, first: int, last: int, table: pa.Table, state: Mapping[str, Any]) -> _File:
        path = self.directory / f"{first:010d}-{last:010d}.{self._suffix}"
        part = path.with_suffix(".part")
        about = json.dumps({"format": FORMAT, "identity": self._identity, **state})
        table = table.replace_schema_metadata({_STATE: about.encode()})
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if self._suffix == "parquet":
                import pyarrow.parquet as pq  # imported late, because reading the index does not need it

                pq.write_table(table, file, compression="zstd")
            else:
                with pa.ipc.new_file(file, table.schema) as writer:
                    writer.write_table(table)
            complete(file, path)
        return _File(first, last, path, *_opened(path))

    def _read(self) -> list[_File]:
        """Open the files in order, without those that a merge has replaced and those after a gap or of another identity."""
        while self.directory.is_dir():
            names = [match for path in self.directory.iterdir() if (match := _NAME.fullmatch(path.name))]
            numbers = sorted(((int(match[1]), int(match[2]), match[0]) for match in names), key=lambda name: (name[0], -name[1]))
            try:
                files: list[_File] = []
                for first, last, name in numbers:
                    if files and first <= files[-1].last:
                        continue
                    path = self.directory / name
                    file = _File(first, last, path, *_opened(path))
                    state = _state(file.table)
                    is_ours = state.get("format") == FORMAT and self._identity in (None, state.get("identity"))
                    if first != (files[-1].last + 1 if files else 0) or not is_ours:
                        break
                    files.append(file)
                return files
            except OSError as error:
                if error.errno != errno.ENOENT:  # a missing file was merged by the writer: list the files again
                    raise
        return []

    def _clear(self) -> None:
        """Delete unfinished files, files of another identity, and files that a merge replaced more than `GRACE_S` ago."""
        names, now_s = {file.path.name for file in self._files}, time.time()
        recent = [(file.first, file.last) for file in self._files if now_s - file.path.stat().st_mtime < GRACE_S]
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and any(first <= int(match[1]) and int(match[2]) <= last for first, last in recent):
                continue
            if path.name not in names and path.suffix in (".arrow", ".parquet", ".part"):
                with contextlib.suppress(OSError):
                    path.unlink()


def _opened(path: Path) -> tuple[pa.Table, int]:
    """Open a file; return its rows (memory-mapped; for Parquet none, with the schema) and their number."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            about = pq.read_metadata(path)
            return pa.Table.from_batches([], schema=about.schema.to_arrow_schema()), about.num_rows
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return table, len(table)
    except pa.ArrowInvalid:  # not a file of this module
        return pa.Table.from_batches([], schema=pa.schema([])), 0


def _state(table: pa.Table) -> dict[str, Any]:
    try:
        state = json.loads((table.schema.metadata or {}).get(_STATE, b"{}"))
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _level(rows: int) -> int:
    """Number of merges that a file of that many rows has behind it."""
    level = 0
    while rows >= ROWS * MERGED:
        level, rows = level + 1, rows // MERGED
    return level


def partition_of(run: str, group: int) -> int | None:
    """The partition of a group by the files of the index on this machine, without the log; None if they do not have it."""
    folder = index_folder(run)
    with contextlib.suppress(OSError):
        for table in Segments(folder / "groups", None).tables if folder is not None else ():
            numbers = np.concatenate([np.from_dlpack(chunk) for chunk in table["group"].chunks])
            if len(rows := np.flatnonzero(numbers == group)):
                partition: int | None = table["partition"][int(rows[0])].as_py()
                return partition
    return None


def index_folder(run: str) -> Path | None:
    """The folder of a run's index on this machine; None if the run has no folder here."""
    directory = run_directory(run)
    return directory / FOLDER if directory.is_dir() else None


GROUPS = 1024
"""Smallest number of groups per file, except the last one."""
_SKEW_MS = 600_000
"""Allowed difference between the clocks of the machines that write records."""


class SampleCopy:
    """Samples of the groups of one run that have an outcome: in files if this process may write them, else in memory."""

    def __init__(self, log: Log, run: str, *, directory: Path | None) -> None:
        record = find(log, run)
        self.log, self.run = log, run
        self._config: dict[str, Any] = json.loads(record.config) if record is not None and record.config else {}
        self._files: Segments | None = None
        if directory is not None:
            with contextlib.suppress(OSError):
                self._files = Segments(directory, str(record.created_ns if record else 0), parquet=True)
        self._positions: dict[Partition, int] = {}
        self._done = IdSet()
        self._tables: list[pa.Table] = []
        self._writable = False

    @property
    def paths(self) -> list[Path]:
        return [] if self._files is None else self._files.paths

    def catch_up(self, waiting: Collection[int], *, since_ms: int) -> pa.Table:
        """Read `groups` to the current end, and return the rows that are in no file.

        `waiting` are groups without an outcome, the oldest admitted at `since_ms`; their samples are read from `rollouts` and returned too.
        """
        reader, assembler, advantages = RunReader(self.log, self.run), GroupAssembler(), Advantages(self._config, trust_code=False)
        waiting = set(waiting)
        self._open()
        rows: list[pa.Table] = []
        reached = dict(self._positions)
        for record in reader.records("groups", since=self._positions):
            tp = record.topic, record.partition
            reached[tp] = record.offset + 1
            with contextlib.suppress(Unusable):
                headers = groups.check(record, run=self.run)
                parts = None if headers.group in self._done else assembler.add(record, headers)
                if parts is None or not reader.poison.isdisjoint(part.id for part in parts):
                    continue
                _, group = groups.read(parts, run=self.run)
                self._done.add(group.group)
                if group.samples:
                    waiting.discard(group.group)  # scored after the caller read the index
                rows.append(sample_rows(group, [groups.CODEC.batch(part.value) for part in parts], advantages.of(group).tolist()))
            if len(rows) >= GROUPS and not any(assembler.held()):
                self._keep(rows, reached)
                rows = []
        if not any(assembler.held()):
            self._keep(rows, reached)
            rows = []
        if self._files is not None:
            self._files.close()
        late = unscored_rows(reader, waiting, since=self._since(since_ms)) if waiting else []
        return pa.concat_tables([_EMPTY, *self._tables, *rows, *late])

    def _open(self) -> None:
        """Continue after the rows in the files, and lock them if no other process appends to them."""
        if self._files is not None:
            with contextlib.suppress(OSError):
                self._writable = self._files.lock()
            if state := self._files.state:
                self._positions = {(f"{self.run}.groups", number): offset for number, offset in state["positions"]}
                self._done = IdSet.from_json(state["groups"])

    def _keep(self, rows: list[pa.Table], reached: dict[Partition, int]) -> None:
        """Append rows to the files, or keep these and all later ones in memory: a file's state covers all earlier rows."""
        if rows and self._writable and self._files is not None:
            positions = [[number, offset] for (_, number), offset in reached.items()]
            try:
                self._files.append(pa.concat_tables(rows), {"positions": positions, "groups": self._done.as_json()})
                return
            except OSError:  # e.g. the disk is full
                self._writable = False
        self._tables += rows

    def _since(self, admitted_ms: int) -> dict[Partition, int]:
        topic = f"{self.run}.rollouts"
        return self.log.offsets_at([(topic, number) for number in range(self.log.partitions(topic) or 0)], max(0, admitted_ms - _SKEW_MS))


_EMPTY = pa.Table.from_batches([], schema=SAMPLES)
