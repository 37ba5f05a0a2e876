"""All tables of a run from its log alone: what its index and the views of SQL must say, too."""

from typing import Any

import pyarrow as pa

from penstock.pipeline.archive.index.group_rows import STEPS
from penstock.pipeline.inspect.run_status import group_statuses
from penstock.pipeline.inspect.run_view import read_view
from penstock.pipeline.inspect.status import WATCHED
from penstock.pipeline.inspect.tables.run_tables import RunTables
from penstock.pipeline.inspect.tables.timeline import schema
from penstock.pipeline.runtime.topic_reader import Read
from penstock.pipeline.scheduling.rules import OPEN
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry
from penstock.topics.prompts import Prompt

GROUPS = schema(
    """
    group int, epoch int, row int, prompt text, prompt_ids int32s, columns text, min_version int, samples_per_prompt int,
    status text, reason text, samples int, no_reward int, reward_mean float, policy_version_min int, policy_version_max int,
    admitted time, scored time, outcome text, sha256 text, partition int, offset int, step int
    """
)


class FullRead(RunTables):
    """Samples, turns, groups and steps."""

    def groups(self) -> pa.Table:
        """`GROUPS`: every admitted group; `status` as in the report, `open` for an unfinished group of a live run."""
        status_of = group_statuses(view := read_view(self._reader, topics=WATCHED))
        step_of = {number: step.step for step in view.steps.values() for number in step.groups}
        payloads = ((read.payload, read) for read in self._reader.groups())
        outcomes = {group.group: _outcome_columns(group, read) for group, read in payloads if group is not None}
        admitted = {read.payload.group: read.payload for read in self._reader.prompts() if read.payload is not None}
        rows = [
            {**_prompt_columns(prompt), **outcomes.get(number, {}), "status": status_of.get(number, OPEN), "step": step_of.get(number)}
            for number, prompt in sorted(admitted.items(), key=lambda item: item[0])
        ]
        return pa.Table.from_pylist(rows, schema=GROUPS)

    def steps(self) -> pa.Table:
        """`STEPS` and the metrics of the steps."""
        committed: dict[int, Entry] = {}
        for entry in self._reader.entries():
            if entry.kind == "step" and entry.step is not None:
                committed.setdefault(entry.step, entry)
        names = sorted({name for entry in committed.values() for name in entry.metrics} - set(STEPS.names))
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
            for _, entry in sorted(committed.items())
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema([*STEPS, *(pa.field(name, pa.float64()) for name in names)]))


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    named = {"prompt_ids": "token_ids", "admitted": "created_ns"}
    columns = {column: getattr(prompt, named.get(column, column), None) for column in GROUPS.names}
    return columns | {"prompt_ids": prompt.token_ids.tolist()}


def _outcome_columns(group: Group, read: Read[Group]) -> dict[str, Any]:
    rollouts = [sample.rollout for sample in group.samples]
    return {
        "reason": group.reason,
        "samples": len(rollouts),
        "no_reward": len(rollouts) - len(group.rewards),
        "reward_mean": sum(group.rewards) / len(group.rewards) if group.rewards else None,
        "policy_version_min": min((rollout.version_min for rollout in rollouts), default=None),
        "policy_version_max": max((rollout.version_max for rollout in rollouts), default=None),
        "scored": group.scored_ns,
        "outcome": group.outcome,
        "sha256": read.headers and read.headers.sha256,
        "partition": read.record.partition,
        "offset": read.record.offset,
    }
