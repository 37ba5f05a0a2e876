"""Builds the rows of a run index from records of `prompts`, `groups`, `ledger` and `dead-letters`, which may arrive interleaved.

A row is final when its group has an outcome and was trained or dropped. Of repeated records the first one counts.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.infra.log import Partition
from penstock.pipeline.data.references import SOURCE_COLUMN
from penstock.pipeline.inspect.tables.timeline import schema
from penstock.pipeline.runtime.topic_reader import POISON
from penstock.pipeline.scheduling.rules import SETTLED, IdSet, group_status
from penstock.topics import dead_letters, groups, ledger, prompts
from penstock.topics.groups import GroupAssembler
from penstock.topics.ledger import Entry
from penstock.topics.wire.columns import column_of
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Record

GROUPS = schema(
    """
    group int, epoch int, row int, prompt text, prompt_ids int32s, columns text, min_version int, samples_per_prompt int,
    status text, reason text, samples int, no_reward int, reward_mean float, policy_version_min int, policy_version_max int,
    admitted time, scored time, outcome text, sha256 text, partition int, offset int,
    step int, trained_version int, lag int, tokens int, truncated int, reward_min float, reward_max float, rewards float32s,
    worker text, source text
    """
)
"""Columns of the index's groups. `lag` is the lag of the oldest trained token, `truncated` the number of samples that reached the token
limit, `source` the data source in a mixture; `partition` and `offset` locate the outcome in `groups`, null if there is none."""
STEPS = schema("step int, version int, committed time, groups ints, boundaries ints, digest text")
"""Columns of the index's steps. Metrics follow as float64 columns, by name."""
TOPICS = ("dead-letters", "ledger", "groups", "prompts")
"""Topics from which the index is built."""
_PAYLOAD = ("epoch", "row", "prompt", "prompt_ids", "columns", "min_version", "samples_per_prompt", "admitted")
"""Columns that are copied from the payload of a prompt or of an outcome."""
_WRITTEN = {"admitted": "created_ns"}
_STATED = ("group", "outcome", "reward_mean", "policy_version_min", "policy_version_max", "tokens", "worker", "sha256")
"""Columns that are copied from the headers of an outcome."""

Row = dict[str, Any]
"""Column -> value; for columns in `_PAYLOAD` an Arrow array of one element."""


class _End(NamedTuple):
    """Ledger entry that trained a group or dropped it as stale."""

    step: int | None
    """Step that was trained on the group; None if the group was dropped."""
    version: int | None
    offset: int
    seq: int


@dataclass(slots=True)
class GroupRows:
    """Builds rows from records. `take` removes and returns the final rows."""

    run: str
    done: IdSet = field(default_factory=IdSet)
    last_seq: int = -1
    closed: bool = False
    dead_letters: dict[int, str] = field(default_factory=dict)
    """Group -> kind of its first dead letter."""
    steps: list[Entry] = field(default_factory=list)
    """Committed steps; the caller removes those that it has stored."""
    steps_from: int = 0
    """Offset in `ledger` before which all steps are stored."""
    _poison: set[tuple[str, int, int]] = field(default_factory=set)
    _pending: dict[int, Row] = field(default_factory=dict)
    _final: list[int] = field(default_factory=list)
    """Groups among `_pending` that may be taken."""
    _ends: dict[int, _End] = field(default_factory=dict)
    _parts: GroupAssembler = field(default_factory=GroupAssembler)

    def add(self, record: Record) -> None:
        """Add a record; records of other topics are ignored. Raises `Unusable` for one that cannot be read, and changes nothing then."""
        fold = _FOLDS.get(record.topic.removeprefix(f"{self.run}."))
        if fold is not None:
            fold(self, record)

    def final(self) -> int:
        return len(self._final)

    def take(self) -> pa.Table:
        """Remove the final rows and return them as a table."""
        rows = [self._pending.pop(group) for group in self._final]
        for group in self._final:
            self.done.add(group)
            self._ends.pop(group, None)
        self._final.clear()
        return table_of(rows)

    def rest(self, *, ended: bool) -> pa.Table:
        """Return the rows that were not taken. `ended`: no more records follow, which settles the status of open groups."""
        return table_of([{**row, **self._ending(group, row, ended=ended)} for group, row in sorted(self._pending.items())])

    def low(self) -> dict[Partition, int]:
        """Return partition -> first offset needed by rows that were not taken; partitions that no row needs are left out."""
        offsets = [row["at"] for row in self._pending.values()]
        offsets += [("groups", part.partition, part.offset) for part in self._parts.held()]
        offsets += [("ledger", 0, end.offset) for end in self._ends.values()]
        lowest: dict[Partition, int] = {}
        for topic, partition, offset in offsets:
            tp = f"{self.run}.{topic}", partition
            lowest[tp] = min(offset, lowest.get(tp, offset))
        return lowest

    def seq_before(self) -> int:
        """Return the sequence number of the last ledger entry before the first one needed by rows that were not taken."""
        return min((end.seq - 1 for end in self._ends.values()), default=self.last_seq)

    def _ending(self, group: int, row: Row, *, ended: bool) -> Row:
        end = self._ends.get(group)
        trained = end is not None and end.step is not None
        status = group_status(row.get("outcome"), trained=trained, stale=end is not None and not trained, ended=ended)
        if end is None or not trained:
            return {"status": status}
        oldest = row.get("policy_version_min")
        lag = None if oldest is None or end.version is None else end.version - oldest
        return {"status": status, "step": end.step, "trained_version": end.version, "lag": lag}

    def _settle(self, group: int) -> None:
        """Complete a group's row if its status is final."""
        row = self._pending.get(group)
        if row is None or row.get("outcome") is None or "status" in row:
            return
        ending = self._ending(group, row, ended=False)
        if ending["status"] in SETTLED:
            row |= ending
            self._final.append(group)

    def _add_prompt(self, record: Record) -> None:
        group = prompts.check(record, run=self.run).group
        if group is None or group in self.done or group in self._pending:
            return
        row: Row = {"group": group, "at": ("prompts", record.partition, record.offset)}
        if (record.topic, record.partition, record.offset) not in self._poison:
            row |= _payload(prompts.CODEC.batch(record.value), {"prompt_ids": "token_ids"})
        self._pending[group] = row

    def _add_outcome(self, record: Record) -> None:
        headers = groups.check(record, run=self.run)
        group = headers.group
        assert group is not None
        if group in self.done or self._pending.get(group, {}).get("outcome") is not None:
            return
        records = self._parts.add(record, headers)
        if records is None:
            return
        row = {**self._pending.get(group, {}), **_facts(headers, records[0])}
        if self._poison.isdisjoint((part.topic, part.partition, part.offset) for part in records):
            with contextlib.suppress(Unusable, ValueError, LookupError, AttributeError):  # damaged payload: use the headers only
                row |= _outcome([groups.CODEC.batch(part.value) for part in records])
        self._pending[group] = row
        self._settle(group)

    def _add_entry(self, record: Record) -> None:
        _, entry = ledger.read(record, run=self.run)
        if not ledger.continues(entry, after=self.last_seq):
            return
        self.last_seq = entry.seq
        self.closed = self.closed or entry.kind == "run-closed"
        if entry.kind == "step" and record.offset >= self.steps_from:
            self.steps.append(entry)
        for group in (*entry.groups, *(planned.group for planned in entry.plan)) if entry.kind in ("step", "stale") else ():
            if group not in self.done and (group not in self._ends or self._ends[group].step is None):
                self._ends[group] = _End(entry.step if entry.kind == "step" else None, entry.version, record.offset, entry.seq)
                self._settle(group)

    def _add_dead_letter(self, record: Record) -> None:
        _, refused = dead_letters.read(record, run=self.run)
        if (group := dead_letters.claimed_group(refused)) is not None:
            self.dead_letters.setdefault(group, refused.kind)
        if refused.kind == POISON:
            self._poison.add((refused.topic, refused.partition, refused.offset))


_FOLDS = {
    "prompts": GroupRows._add_prompt,
    "groups": GroupRows._add_outcome,
    "ledger": GroupRows._add_entry,
    "dead-letters": GroupRows._add_dead_letter,
}


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Convert rows to a table with the columns `GROUPS`."""
    columns = []
    for column in GROUPS:
        values = [row.get(column.name) for row in rows]
        if column.name in _PAYLOAD:
            arrays = [pa.nulls(1, column.type) if value is None else value.cast(column.type) for value in values]
            columns.append(pa.concat_arrays(arrays) if arrays else pa.nulls(0, column.type))
        else:
            columns.append(_array(values, column))
    return pa.table(columns, schema=GROUPS)


def steps_table(entries: Sequence[Entry]) -> pa.Table:
    """Convert step entries to a table with the columns `STEPS` and one column per metric."""
    names = sorted({name for entry in entries for name in entry.metrics} - set(STEPS.names))
    columns: dict[str, list[Any]] = {
        **{name: [getattr(entry, name) for entry in entries] for name in ("step", "version", "boundaries", "digest")},
        "committed": [entry.time_ns for entry in entries],
        "groups": [[planned.group for planned in entry.plan] for entry in entries],
    }
    columns |= {name: [None if math.isnan(value := entry.metrics.get(name, math.nan)) else value for entry in entries] for name in names}
    fields = pa.schema([*STEPS, *((name, pa.float64()) for name in names)])
    return pa.table([_array(columns[column.name], column) for column in fields], schema=fields)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Convert values to an Arrow array. `pyarrow.array` would import pandas."""
    if pa.types.is_timestamp(field.type):
        return column_of(pa.field(field.name, pa.int64())).to_arrow(values).view(field.type)
    return column_of(field).to_arrow(values)


def _payload(batch: pa.RecordBatch, names: Mapping[str, str]) -> Row:
    written = {**_WRITTEN, **names}
    return {name: batch.column(written.get(name, name)) for name in _PAYLOAD}


def _facts(headers: Headers, record: Record) -> Row:
    """Return the columns of an outcome that follow from its headers and its offset."""
    return {
        **{name: getattr(headers, name) for name in _STATED},
        "samples": headers.samples or 0,
        "no_reward": headers.no_reward or 0,
        "partition": record.partition,
        "offset": record.offset,
        "at": ("groups", record.partition, record.offset),
    }


def _outcome(parts: Sequence[pa.RecordBatch]) -> Row:
    """Return the columns of an outcome that require its payload."""
    first = parts[0]
    samples = [part.column("samples").flatten() for part in parts]
    rewards = [reward for part in samples for reward in part.field("reward").to_pylist()]
    values = [reward for reward in rewards if reward is not None]
    source = json.loads(first.column("columns")[0].as_py() or "{}").get(SOURCE_COLUMN)
    return {
        **_payload(first, {}),
        "reason": first.column("reason")[0].as_py(),
        "scored": first.column("scored_ns")[0].as_py(),
        "reward_min": min(values, default=None),
        "reward_max": max(values, default=None),
        "rewards": rewards,
        "truncated": sum(part.field("finish").to_pylist().count("length") for part in samples),
        "source": None if source is None else str(source),
    }
