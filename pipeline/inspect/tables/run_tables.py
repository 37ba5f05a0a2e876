"""Samples and turns of a run as Arrow tables. Of duplicate records the first one is used; unknown values are null."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.infra.log import Log, Partition
from penstock.pipeline.inspect.tables.timeline import schema
from penstock.pipeline.learner.micro_batches import advantage_function, combined_advantages, sequences
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.groups import Group
from penstock.topics.rollouts import Rollout, generated

Floats = npt.NDArray[np.float32]


class Advantages:
    """The advantage function of a run's configuration; a custom one is loaded only with `trust_code`.

    `why_not` is the reason why there are no advantages, None otherwise.
    """

    def __init__(self, config: dict[str, Any], *, trust_code: bool) -> None:
        self.name: str | None = None
        self.why_not: str | None = None
        self._function: Callable[..., Any] | None = None
        self._truncated = "train"
        try:
            self._open(config, trust_code=trust_code)
        except ValueError as error:
            self.why_not = " ".join(str(error).split())

    def of(self, group: Group) -> Floats:
        """Return [K] advantages, one per sample; NaN for a sample that is not trained or if they are unknown."""
        values = np.full(len(group.samples), np.nan, np.float32)
        if self._function is None or not group.samples:
            return values
        try:
            advantage_of = {
                sequence.sample: sequence.advantage for sequence in sequences(group, advantages=self._function, truncated=self._truncated)
            }
        # A custom function may raise any exception.
        except Exception as error:
            self._function, self.why_not = None, f"{self.name} fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return values
        for number, sample in enumerate(group.samples):
            values[number] = advantage_of.get(sample.rollout.sample, np.nan)
        return values

    def _open(self, table: dict[str, Any], *, trust_code: bool) -> None:
        """Load the advantage function of a configuration. Raises `ValueError` with the reason why advantages are unknown."""
        from penstock.pipeline.config.load import from_json

        config = from_json(json.dumps(table))
        self.name, self._truncated = config.advantage, config.algorithm.truncated
        if config.algorithm.kl_coef and config.algorithm.kl_in == "reward":
            raise ValueError("rewards were reduced by the KL to the reference, whose logprobs are not in the log (algorithm.kl_in)")
        self._function = combined_advantages(advantage_function(self.name, trust_code=trust_code), combine=config.algorithm.combine)


SAMPLES = schema(
    """
    group int, sample int, policy_version_min int, policy_version_max int, token_ids int32s, behaviour_logprobs float32s,
    loss_mask bools, span_versions int32s, span_starts int32s, finish text, temperature float, started time, ended time,
    worker text, completion text, reward float, components floats, reward_error text, logged text, advantage float,
    tokens int
    """
)


class RunTables:
    """The tables of one run that its index does not have."""

    def __init__(self, log: Log, run: str) -> None:
        self.log, self.run = log, run
        self._reader = RunReader(log, run)

    def samples(self) -> pa.Table:
        """Return `SAMPLES`, every finished sample. Reward and advantage are null before scoring; so is a custom function's advantage."""
        scored_columns: dict[tuple[int, int], dict[str, Any]] = {}
        record = find(self.log, self.run)
        advantages = Advantages(json.loads(record.config) if record is not None and record.config else {}, trust_code=False)
        for read in self._reader.groups():
            if (group := read.payload) is not None:
                values = [None if value != value else value for value in map(float, advantages.of(group))]  # noqa: PLR0124
                for sample, advantage in zip(group.samples, values, strict=True):
                    columns = {name: getattr(sample, name) for name in ("completion", "reward", "components", "reward_error", "logged")}
                    scored_columns[group.group, sample.rollout.sample] = {**columns, "advantage": advantage}
        rows = [
            {**_attributes(rollout, SAMPLES), **scored_columns.get(key, {}), "tokens": len(generated(rollout))}
            for key, rollout in self._rollouts()
        ]
        return _table(rows, SAMPLES)

    def turns(self) -> pa.Table:
        """Return `TURNS`, every part of every trajectory, in order; versions are null for parts that the environment wrote."""
        return pa.Table.from_pylist([row for _, rollout in self._rollouts() for row in _turns_of(rollout)], schema=TURNS)

    def _rollouts(self) -> list[tuple[tuple[int, int], Rollout]]:
        rollouts = {(read.payload.group, read.payload.sample): read.payload for read in self._reader.samples() if read.payload is not None}
        return sorted(rollouts.items(), key=lambda item: item[0])


ATTRIBUTES = {
    "policy_version_min": "version_min",
    "policy_version_max": "version_max",
    "started": "started_ns",
    "ended": "ended_ns",
}
"""Column -> attribute of a sample with another name."""


def _attributes(record: Rollout, schema: pa.Schema) -> dict[str, Any]:
    """Return column -> value for the columns of a schema that are attributes of a sample."""
    named = {column: ATTRIBUTES.get(column, column) for column in schema.names}
    return {column: getattr(record, name) for column, name in named.items() if hasattr(record, name)}


def sample_rows(group: Group, parts: Sequence[pa.RecordBatch], advantages: Sequence[float]) -> pa.Table:
    """Return the samples of a group as `SAMPLES`, from the group and the payloads of its parts. Large columns are not copied."""
    written = pa.concat_arrays([part.column("samples").flatten() for part in parts])
    rollouts = [sample.rollout for sample in group.samples]
    computed: dict[str, list[Any]] = {
        "group": [group.group] * len(rollouts),
        "policy_version_min": [rollout.version_min for rollout in rollouts],
        "policy_version_max": [rollout.version_max for rollout in rollouts],
        "advantage": [None if math.isnan(value) else float(value) for value in advantages],
        "tokens": [len(generated(rollout)) for rollout in rollouts],
    }
    columns = []
    for column in SAMPLES:
        name = ATTRIBUTES.get(column.name, column.name) if column.name in ("started", "ended") else column.name
        if column.name in computed:
            columns.append(pa.array(computed[column.name], column.type))
        elif written.type.get_field_index(name) < 0:  # an earlier release wrote the record, without this column
            columns.append(pa.nulls(len(rollouts), column.type))
        else:
            columns.append(written.field(name).cast(column.type))
    return pa.table(columns, schema=SAMPLES)


def unscored_rows(reader: RunReader, groups: set[int], *, since: Mapping[Partition, int]) -> list[pa.Table]:
    """Read the samples of these groups from `rollouts`, from the offsets `since`: a table of `SAMPLES` without rewards, [] for none."""
    rollouts = (read.payload for read in reader.samples(only=groups, since=since) if read.payload is not None)
    rows = [{**_attributes(rollout, SAMPLES), "tokens": len(generated(rollout))} for rollout in rollouts]
    return [_table(rows, SAMPLES)] if rows else []


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    # from_pandas converts NaN to null, also within lists.
    columns = {field.name: pa.array([row.get(field.name) for row in rows], field.type, from_pandas=True) for field in schema}
    return pa.table(columns, schema=schema)


TURNS = schema(
    """
    group int, sample int, turn int, source text, start int, end int, tokens int, finish text, reward float,
    policy_version_min int, policy_version_max int, environment text, environment_seed int, worker text
    """
)


def _turns_of(rollout: Rollout) -> Iterator[dict[str, Any]]:
    """Yield a row of `TURNS` per part of a trajectory; none for a single completion."""
    versions = rollout.token_versions
    for number, turn in enumerate(rollout.turns or ()):
        own = versions[turn.start : turn.end] if turn.source == "model" else versions[:0]
        yield {
            **_attributes(rollout, TURNS),
            **{name: getattr(turn, name) for name in ("source", "start", "end", "finish", "reward")},
            "turn": number,
            "tokens": turn.end - turn.start,
            "policy_version_min": int(own.min()) if len(own) else None,
            "policy_version_max": int(own.max()) if len(own) else None,
        }
