"""A run's records as Arrow tables, typed whether they have rows or not.

The rule: of records that say the same thing twice the first counts, as for the workers; what is not known yet is null.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from penstock.infra.log import Log
from penstock.pipeline.observe.report.summary import fates, load
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics import groups as groups_topic
from penstock.topics import ledger, prompts, rollouts
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt
from penstock.topics.rollouts import Rollout
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

_TIME = pa.timestamp("ns", tz="UTC")
SAMPLES = pa.schema(
    [
        ("group", pa.int64()),
        ("sample", pa.int64()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("behaviour_logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("span_versions", pa.list_(pa.int32())),
        ("span_starts", pa.list_(pa.int32())),
        ("finish", pa.string()),
        ("temperature", pa.float64()),
        ("started", _TIME),
        ("ended", _TIME),
        ("worker", pa.string()),
        ("completion", pa.string()),
        ("reward", pa.float64()),
        ("components", pa.list_(pa.float64())),
        ("tokens", pa.int64()),
    ]
)
GROUPS = pa.schema(
    [
        ("group", pa.int64()),
        ("epoch", pa.int64()),
        ("row", pa.int64()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("columns", pa.string()),
        ("min_version", pa.int64()),
        ("samples_per_prompt", pa.int64()),
        ("fate", pa.string()),
        ("reason", pa.string()),
        ("samples", pa.int64()),
        ("reward_mean", pa.float64()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("admitted", _TIME),
        ("scored", _TIME),
        ("outcome", pa.string()),
        ("sha256", pa.string()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
    ]
)
STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("committed", _TIME),
        ("groups", pa.list_(pa.int64())),
        ("boundaries", pa.list_(pa.int64())),
        ("digest", pa.string()),
    ]
)
"""What every step has; its metrics follow as float64 columns, by name."""

Read = TypeVar("Read")


def samples(log: Log, run: str) -> pa.Table:
    """`SAMPLES`: every finished sample; completion, reward and its components are null until its group is scored."""
    scored = {(group.group, sample.rollout.sample): sample for _, group in _groups(log, run) for sample in group.samples}
    found: dict[tuple[int, int], Rollout] = {}
    for record in scan(log, f"{run}.rollouts"):
        rollout = _read(rollouts.read, record, run)
        if rollout is not None:
            found.setdefault((rollout.group, rollout.sample), rollout)
    rows = [_sample_row(found[key], scored.get(key)) for key in sorted(found)]
    return _table(rows, SAMPLES)


def groups(log: Log, run: str) -> pa.Table:
    """`GROUPS`: every admitted group; `fate` as in the report, `open` while the run goes on."""
    fate_of = fates(load(log, run))
    outcomes = {group.group: (record, group) for record, group in _groups(log, run)}
    admitted: dict[int, Prompt] = {}
    for record in scan(log, f"{run}.prompts"):
        prompt = _read(prompts.read, record, run)
        if prompt is not None:
            admitted.setdefault(prompt.group, prompt)
    rows = [_group_row(admitted[number], outcomes.get(number), fate_of.get(number, "open")) for number in sorted(admitted)]
    return _table(rows, GROUPS)


def steps(log: Log, run: str) -> pa.Table:
    """`STEPS` and the metrics of the steps."""
    found: dict[int, Entry] = {}
    seq = 0
    for record in scan(log, f"{run}.ledger"):
        entry = _read(ledger.read, record, run)
        if entry is None or entry.seq != seq:
            continue  # told already, or not of this story
        seq += 1
        if entry.kind == "step" and entry.step is not None:
            found.setdefault(entry.step, entry)
    names = sorted({name for entry in found.values() for name in entry.metrics} - set(STEPS.names))
    rows = [
        {
            "step": entry.step,
            "version": entry.version,
            "committed": entry.time_ns,
            "groups": [planned.group for planned in entry.plan],
            "boundaries": entry.boundaries,
            "digest": entry.digest,
            **{name: entry.metrics.get(name) for name in names},
        }
        for _, entry in sorted(found.items())
    ]
    return _table(rows, pa.schema([*STEPS, *(pa.field(name, pa.float64()) for name in names)]))


def _sample_row(rollout: Rollout, scored: groups_topic.ScoredSample | None) -> dict[str, Any]:
    return {
        "group": rollout.group,
        "sample": rollout.sample,
        "policy_version_min": rollout.version_min,
        "policy_version_max": rollout.version_max,
        "token_ids": rollout.token_ids,
        "behaviour_logprobs": rollout.behaviour_logprobs,
        "loss_mask": rollout.loss_mask,
        "span_versions": rollout.span_versions,
        "span_starts": rollout.span_starts,
        "finish": rollout.finish,
        "temperature": rollout.temperature,
        "started": rollout.started_ns,
        "ended": rollout.ended_ns,
        "worker": rollout.worker,
        "completion": scored and scored.completion,
        "reward": scored and scored.reward,
        "components": scored and scored.components,
        "tokens": len(rollout.token_ids),
    }


def _group_row(prompt: Prompt, ended: tuple[Record, Group] | None, fate: str) -> dict[str, Any]:
    record, outcome = ended or (None, None)
    drawn = outcome.samples if outcome else ()
    return {
        "group": prompt.group,
        "epoch": prompt.epoch,
        "row": prompt.row,
        "prompt": prompt.prompt,
        "prompt_ids": prompt.token_ids,
        "columns": prompt.columns,
        "min_version": prompt.min_version,
        "samples_per_prompt": prompt.samples_per_prompt,
        "fate": fate,
        "reason": outcome and outcome.reason,
        "samples": len(drawn) if outcome else None,
        "reward_mean": sum(sample.reward for sample in drawn) / len(drawn) if drawn else None,
        "policy_version_min": min((sample.rollout.version_min for sample in drawn), default=None),
        "policy_version_max": max((sample.rollout.version_max for sample in drawn), default=None),
        "admitted": prompt.created_ns,
        "scored": outcome and outcome.scored_ns,
        "outcome": outcome and outcome.outcome,
        "sha256": record and dict(record.headers)["sha256"],
        "partition": record and record.partition,
        "offset": record and record.offset,
    }


def _groups(log: Log, run: str) -> Iterator[tuple[Record, Group]]:
    """The first whole outcome of each group, behind the record of its first part."""
    parts, seen = groups_topic.Parts(), set[int]()
    for record in scan(log, f"{run}.groups"):
        try:
            facts = groups_topic.check(record, run=run)
        except Unusable:
            continue
        if facts.group in seen or (records := parts.add(record, facts)) is None:
            continue
        whole = _read(groups_topic.read, records, run)
        if whole is not None:
            seen.add(whole.group)
            yield records[0], whole


def _read(reader: Callable[..., tuple[Any, Read]], records: Record | Sequence[Record], run: str) -> Read | None:
    try:
        return reader(records, run=run)[1]
    except Unusable:
        return None


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    # from_pandas: a NaN in memory stands for a null, also within lists.
    columns = {field.name: pa.array([row[field.name] for row in rows], field.type, from_pandas=True) for field in schema}
    return pa.table(columns, schema=schema)
