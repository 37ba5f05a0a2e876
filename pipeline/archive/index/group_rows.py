"""Rows of the index from records of `prompts`, `groups`, `ledger` and `dead-letters`, in any interleaving of these topics.

A row is final once its group has an outcome and was trained or dropped; of repeated records the first counts."""

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
"""Columns of the index. `lag` is that of the oldest trained token; `truncated` counts samples that reached the token limit; `source` is
the source of a mixture; `partition` and `offset` are those of the outcome in `groups`, null before there is one."""
STEPS = schema("step int, version int, committed time, groups ints, boundaries ints, digest text")
"""Columns of every step; its metrics follow as float64 columns, by name."""
TOPICS = ("dead-letters", "ledger", "groups", "prompts")
"""Topics that the index is made of."""
_PAYLOAD = ("epoch", "row", "prompt", "prompt_ids", "columns", "min_version", "samples_per_prompt", "admitted")
"""Columns that are the payload's, in prompts as in outcomes."""
_WRITTEN = {"admitted": "created_ns"}

Row = dict[str, Any]
"""Column -> value; of payload columns an array of one element."""


class _End(NamedTuple):
    """The ledger's entry about a group."""

    step: int | None
    """None if it was dropped as stale."""
    version: int | None
    offset: int
    seq: int


@dataclass(slots=True)
class GroupRows:
    """Folds records into rows; final rows leave with `take`."""

    run: str
    done: IdSet = field(default_factory=IdSet)
    """Groups whose rows were taken."""
    last_seq: int = -1
    closed: bool = False
    """True if the ledger has its last entry."""
    dead_letters: dict[int, str] = field(default_factory=dict)
    """Group -> kind of the first dead letter about it."""
    steps: list[Entry] = field(default_factory=list)
    """Committed steps that were not taken."""
    steps_from: int = 0
    """Offset in `ledger` before which all steps were taken."""
    _poison: set[tuple[str, int, int]] = field(default_factory=set)
    _pending: dict[int, Row] = field(default_factory=dict)
    _final: list[int] = field(default_factory=list)
    """Groups among `_pending` that may be taken."""
    _ends: dict[int, _End] = field(default_factory=dict)
    _parts: GroupAssembler = field(default_factory=GroupAssembler)

    def add(self, record: Record) -> None:
        """Fold a record of any topic; those of other topics change nothing. Raises `Unusable`, and is unchanged then."""
        fold = _FOLDS.get(record.topic.removeprefix(f"{self.run}."))
        if fold is not None:
            fold(self, record)

    def final(self) -> int:
        """Number of rows that may be taken."""
        return len(self._final)

    def take(self) -> pa.Table:
        """The final rows, which are forgotten."""
        rows = [self._pending.pop(group) for group in self._final]
        for group in self._final:
            self.done.add(group)
            self._ends.pop(group, None)
        self._final.clear()
        return table_of(rows)

    def rest(self, *, ended: bool) -> pa.Table:
        """Rows that were not taken; `ended` is true if no more records will follow."""
        return table_of([{**row, **self._ending(group, row, ended=ended)} for group, row in sorted(self._pending.items())])

    def low(self) -> dict[Partition, int]:
        """Partition -> the first offset with something that was not taken; without partitions of which everything was."""
        offsets = [row["at"] for row in self._pending.values()]
        offsets += [("groups", part.partition, part.offset) for part in self._parts.held()]
        offsets += [("ledger", 0, end.offset) for end in self._ends.values()]
        lowest: dict[Partition, int] = {}
        for topic, partition, offset in offsets:
            tp = f"{self.run}.{topic}", partition
            lowest[tp] = min(offset, lowest.get(tp, offset))
        return lowest

    def seq_before(self) -> int:
        """Number of the last ledger entry before the first that was not taken."""
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
        """Complete a row if it is final now."""
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
            with contextlib.suppress(Unusable, ValueError, LookupError, AttributeError):  # the trainer refuses it; its headers count
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
    """Rows as `GROUPS`."""
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
    """Steps as `STEPS` and their metrics."""
    names = sorted({name for entry in entries for name in entry.metrics} - set(STEPS.names))
    columns: dict[str, list[Any]] = {
        "step": [entry.step for entry in entries],
        "version": [entry.version for entry in entries],
        "committed": [entry.time_ns for entry in entries],
        "groups": [[planned.group for planned in entry.plan] for entry in entries],
        "boundaries": [entry.boundaries for entry in entries],
        "digest": [entry.digest for entry in entries],
    }
    columns |= {name: [None if math.isnan(value := entry.metrics.get(name, math.nan)) else value for entry in entries] for name in names}
    fields = pa.schema([*STEPS, *((name, pa.float64()) for name in names)])
    return pa.table([_array(columns[column.name], column) for column in fields], schema=fields)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """Values as an array; `pyarrow.array` would import pandas."""
    if pa.types.is_timestamp(field.type):
        return column_of(pa.field(field.name, pa.int64())).to_arrow(values).view(field.type)
    return column_of(field).to_arrow(values)


def _payload(batch: pa.RecordBatch, names: Mapping[str, str]) -> Row:
    written = {**_WRITTEN, **names}
    return {name: batch.column(written.get(name, name)) for name in _PAYLOAD}


def _facts(headers: Headers, record: Record) -> Row:
    """The columns that headers have."""
    return {
        "group": headers.group,
        "outcome": headers.outcome,
        "samples": headers.samples or 0,
        "no_reward": headers.no_reward or 0,
        "reward_mean": headers.reward_mean,
        "policy_version_min": headers.policy_version_min,
        "policy_version_max": headers.policy_version_max,
        "tokens": headers.tokens,
        "worker": headers.worker,
        "sha256": headers.sha256,
        "partition": record.partition,
        "offset": record.offset,
        "at": ("groups", record.partition, record.offset),
    }


def _outcome(parts: Sequence[pa.RecordBatch]) -> Row:
    """The columns that only the payload of an outcome has."""
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
