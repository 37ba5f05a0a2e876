"""`RunIndex`: a table with one row per group and one with one row per step of a run, updated incrementally from the log.

The tracker writes the index to files in the run's directory. Other processes map these files and add later records in memory; if no tracker
is running, they may write the files themselves.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.infra.log import Log, Partition
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.index.group_rows import TOPICS, GroupRows, steps_table
from penstock.pipeline.archive.index.segments import ROWS, Segments, index_folder
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics.runs import ENDED
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

_POSITIONED = (".prompts", ".groups")


class RunIndex:
    """Index of one run. Add records with `add`, in any order of topics, or call `catch_up` to read them from the log."""

    def __init__(self, run: str, *, directory: Path | None = None, created_ns: int = 0, write: bool = False) -> None:
        """Open the index files in `directory`; if None, rows are in memory only. `write`: append to the files unless another process does.

        `created_ns` is the run's creation time, which distinguishes runs of the same id.
        """
        self.run = run
        self._rows = GroupRows(run)
        self._tables: dict[str, list[pa.Table]] = {"groups": [], "steps": []}
        self._files: dict[str, Segments] = {}
        self._paths: dict[str, list[Path]] = {"groups": [], "steps": []}
        self.positions: dict[Partition, int] = {}
        """Partition -> first offset that is not in the index; a missing partition has to be read from its start."""
        if directory is not None:
            self._open(directory, str(created_ns), write=write)

    def add(self, record: Record) -> None:
        """Add a record to the index. Raises `Unusable` for a record that cannot be read, and changes nothing then."""
        tp = record.topic, record.partition
        if record.offset < self.positions.get(tp, 0):
            return
        self.positions[tp] = record.offset + 1
        self._rows.add(record)
        self._settle(ROWS)

    def catch_up(self, log: Log, *, decoding: Callable[[Record], AbstractContextManager[None]] = lambda _: nullcontext()) -> None:
        """Add all records up to the current ends of the topics. `decoding` is a context around each record. Raises `LogError`."""
        reader = RunReader(log, self.run)
        for topics in (TOPICS[:1], TOPICS[1:]):  # dead letters first, because they name records that must not be decoded
            for record in reader.records(*topics, since=self.positions):
                with contextlib.suppress(Unusable), decoding(record):  # a worker reports the record as a dead letter
                    self.add(record)

    def groups(self, *, ended: bool = False) -> pa.Table:
        """Return the table `GROUPS`, a row per admitted group. `ended`: the run has ended, so groups without an outcome are unused."""
        rest = self._rows.rest(ended=ended or self._rows.closed)
        return pa.concat_tables([*self._tables["groups"], rest]).replace_schema_metadata(None)

    def stored_groups(self, *, ended: bool = False) -> tuple[list[Path], pa.Table]:
        """Return the rows of `groups` as (Arrow files, table of the rows that are in no file)."""
        paths = self._paths["groups"]
        rest = self._rows.rest(ended=ended or self._rows.closed)
        return paths, pa.concat_tables([*self._tables["groups"][len(paths) :], rest]).replace_schema_metadata(None)

    def steps(self) -> pa.Table:
        """Return the table `STEPS`, a row per committed step, with a column per metric."""
        tables = [*self._tables["steps"], steps_table(self._rows.steps)]
        return pa.concat_tables(tables, promote_options="default").replace_schema_metadata(None)

    @property
    def dead_letters(self) -> Mapping[int, str]:
        """Group -> kind of the first dead letter about it."""
        return self._rows.dead_letters

    def close(self) -> None:
        """Write the final rows, and release the files."""
        if self._files:
            self._settle(1)
        for files in self._files.values():
            files.close()
        self._files = {}

    def _open(self, directory: Path, identity: str, *, write: bool) -> None:
        states = {}
        for name in self._tables:
            with contextlib.suppress(OSError):  # without a readable directory, rows are in memory
                files = Segments(directory / name, identity)
                if write and files.lock():
                    self._files[name] = files
                self._tables[name], self._paths[name], states[name] = files.tables, files.paths, files.state
        rows, groups, steps = self._rows, states.get("groups", {}), states.get("steps", {})
        self.positions = {(f"{self.run}.{topic}", number): offset for topic, number, offset in groups.get("positions", ())}
        rows.closed, rows.steps_from = groups.get("closed", False), steps.get("ledger", 0)
        # Read the ledger from the smaller of the two tables' offsets.
        ledger = self.run + ".ledger", 0
        first = min((groups, steps), key=lambda state: state.get("ledger", 0))
        rows.last_seq, self.positions[ledger] = first.get("seq", -1), first.get("ledger", 0)
        if "done" in groups:
            rows.done = IdSet.from_json(groups["done"])

    def _settle(self, least: int) -> None:
        """Move final rows to the files, or to tables in memory, if there are at least `least`."""
        if self._rows.final() >= least:
            self._append("groups", self._rows.take())
        if len(self._rows.steps) >= least:
            entries, self._rows.steps = self._rows.steps, []
            self._append("steps", steps_table(entries))

    def _append(self, name: str, table: pa.Table) -> None:
        files = self._files.get(name)
        if files is None:
            self._tables[name].append(table)
            return
        low = self._rows.low() if name == "groups" else {}
        at = self.positions | low
        seq = self._rows.seq_before() if name == "groups" else self._rows.last_seq
        state: dict[str, Any] = {"closed": self._rows.closed, "seq": seq}
        if name == "groups":
            state["done"] = self._rows.done.as_json()
        state["ledger"] = at.get((f"{self.run}.ledger", 0), 0)
        state["positions"] = [
            [topic.removeprefix(f"{self.run}."), number, offset] for (topic, number), offset in at.items() if topic.endswith(_POSITIONED)
        ]
        try:
            files.append(table, state)
        except OSError:  # e.g. the disk is full: keep the rows in memory
            self._files.pop(name).close()
            self._tables[name].append(table)
        else:
            self._tables[name], self._paths[name] = files.tables, files.paths


def open_index(log: Log, run: str) -> tuple[RunIndex, bool]:
    """Open a run's index (in memory for an archive) and bring it up to date; return it and True if the run has ended. Raises `LogError`."""
    record = find(log, run)
    ended = record is not None and record.status in ENDED
    folder = None if isinstance(log, ArchivedLog) else index_folder(run)
    index = RunIndex(run, directory=folder, created_ns=record.created_ns if record else 0, write=ended)
    index.catch_up(log)
    index.close()
    return index, ended


def all_groups(log: Log, run: str) -> pa.Table:
    """`GROUPS` of a run, by number. Raises `LogError`."""
    index, ended = open_index(log, run)
    return index.groups(ended=ended).sort_by("group")
