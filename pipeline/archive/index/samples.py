"""Incremental Parquet copy of a run's samples, in the run's folder: what SQL reads instead of the log."""

import contextlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.infra.log import Log, Partition
from penstock.pipeline.archive.index.segments import Segments
from penstock.pipeline.inspect.tables.advantages import Advantages
from penstock.pipeline.inspect.tables.run_tables import SAMPLES, sample_rows, unscored_rows
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.pipeline.scheduling.rules import IdSet
from penstock.topics import groups
from penstock.topics.groups import GroupAssembler
from penstock.topics.wire.errors import Unusable

GROUPS = 1024
"""Groups of a file, but of the last one."""
_SKEW_MS = 600_000
"""The times of records come from the clocks of several machines."""


class SampleCopy:
    """The samples of one run with an outcome, in files as far as this process may write them; the others in memory."""

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

    @property
    def paths(self) -> list[Path]:
        return [] if self._files is None else self._files.paths

    def catch_up(self, waiting: Collection[int], *, since_ms: int) -> pa.Table:
        """Read on to the current ends, and return the rows that are in no file.

        `waiting` are groups without scored samples, of which the oldest was admitted at `since_ms`: their samples come from `rollouts`.
        """
        reader, assembler, advantages = RunReader(self.log, self.run), GroupAssembler(), Advantages(self._config, trust_code=False)
        writable, waiting = self._open(), set(waiting)
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
                    waiting.discard(group.group)  # it was scored after the caller had read the index
                rows.append(sample_rows(group, [groups.CODEC.batch(part.value) for part in parts], advantages.of(group).tolist()))
            if len(rows) >= GROUPS and not any(assembler.held()):
                self._keep(rows, reached, writable=writable)
                rows = []
        if not any(assembler.held()):
            self._keep(rows, reached, writable=writable)
            rows = []
        if self._files is not None:
            self._files.close()
        late = unscored_rows(reader, waiting, since=self._since(since_ms)) if waiting else []
        return pa.concat_tables([_EMPTY, *self._tables, *rows, *late])

    def _open(self) -> bool:
        """Continue after the files; True if this process may write more."""
        if self._files is None:
            return False
        writable = False
        with contextlib.suppress(OSError):
            writable = self._files.lock()
        if state := self._files.state:
            self._positions = {(f"{self.run}.groups", number): offset for number, offset in state["positions"]}
            self._done = IdSet.from_json(state["groups"])
        return writable

    def _keep(self, rows: list[pa.Table], reached: dict[Partition, int], *, writable: bool) -> None:
        if not rows:
            return
        table = pa.concat_tables(rows)
        if writable and self._files is not None:
            positions = [[number, offset] for (_, number), offset in reached.items()]
            with contextlib.suppress(OSError):
                self._files.append(table, {"positions": positions, "groups": self._done.as_json()})
                self._positions = dict(reached)
                return
        self._tables.append(table)

    def _since(self, admitted_ms: int) -> dict[Partition, int]:
        topic = f"{self.run}.rollouts"
        return self.log.offsets_at([(topic, number) for number in range(self.log.partitions(topic) or 0)], max(0, admitted_ms - _SKEW_MS))


_EMPTY = pa.Table.from_batches([], schema=SAMPLES)
