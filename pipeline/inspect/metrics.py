"""Converts a run's records to metric points, for `metrics.jsonl` and MLflow."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.infra.mlflow.tracking import PARENT_TAG, Target
from penstock.infra.paths import state_directory
from penstock.pipeline.config.load import Config, to_json
from penstock.pipeline.inspect.run_view import Folded, RunView
from penstock.pipeline.inspect.run_view_types import Tally
from penstock.pipeline.scheduling.rules import Schedule
from penstock.topics.ledger import Entry
from penstock.topics.metrics import Measurement
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Record

CONSTANT = ("n", "samples")
"""Values of an evaluation that are constant during a run and are not logged."""
STATUS_EVERY_MS = 10_000
"""Interval at which a worker's status becomes a point; workers send one status per second, for the live view."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Values at one time: a line of `metrics.jsonl`, and one MLflow point per value."""

    source: str
    """Source of the metric: ledger, metrics or reward."""
    number: int
    """Offset in the topic `source`; for reward, the policy version. Ascending within a source."""
    kind: str
    timestamp_ms: int
    step: int
    """Optimizer step; for statuses, seconds since the run was created."""
    values: dict[str, float]
    labels: dict[str, Any] = field(default_factory=dict)


class Points:
    """Converts a run's records to `Line`s, one record at a time and in the order of their topics."""

    def __init__(self, *, created_ms: int, schedule: Schedule) -> None:
        self._created_ms, self._schedule = created_ms, schedule
        self._sampled: dict[tuple[str, str], int] = {}
        self._published: dict[int, int] = {}
        self._rewarded = -1

    def of(self, folded: Folded, record: Record, *, source: str) -> Iterator[Line]:
        """Yield the line for a record, or nothing. `folded` is what `RunView.fold` returned for it, `source` the name of its topic."""
        line = partial(Line, source=source, number=record.offset, timestamp_ms=record.timestamp_ms)
        if isinstance(folded, Entry) and folded.kind == "step":
            # Values whose names end in _at are times, not metrics.
            values = {f"train/{name}": value for name, value in folded.metrics.items() if not name.endswith("_at")}
            yield line(kind="step", step=folded.step or 0, values=values, labels={"version": folded.version})
        elif isinstance(folded, Entry) and folded.kind == "version" and folded.version is not None:
            self._published[folded.version] = record.timestamp_ms
        elif isinstance(folded, Measurement) and folded.kind == "eval":
            step = (folded.version or 0) * self._schedule.steps_per_version if folded.step is None else folded.step
            values = {f"eval/{name}": value for name, value in folded.values.items() if name not in CONSTANT}
            yield line(kind="eval", step=step, values=values, labels={"version": folded.version, **folded.labels})
        elif isinstance(folded, Measurement) and folded.kind in ("status", "final") and self._is_due(folded, record):
            values = {f"system/{folded.worker}/{name}": value for name, value in folded.values.items()}
            step = max(0, (record.timestamp_ms - self._created_ms) // 1000)
            yield line(kind=folded.kind, step=step, values=values, labels={"worker": folded.worker})

    def rewards(self, view: RunView, *, before: int) -> Iterator[Line]:
        """Yield a line with the mean reward of all scored samples for each version below `before` that has no line yet."""
        for version in range(self._rewarded + 1, before):
            self._rewarded = version
            tally = view.rewards.get(version, Tally())
            if tally.mean is None or not self._published:
                continue
            # The time is that of the ledger entry after which samples of this version are stale, or of the last entry.
            overtaken = min(version + self._schedule.max_lag + 1, max(self._published))
            values = {"reward": tally.mean, "reward_samples": float(tally.samples)}
            yield Line(
                source="reward",
                number=version,
                kind="reward",
                timestamp_ms=self._published.get(overtaken, self._created_ms),
                step=version * self._schedule.steps_per_version,
                values=values,
                labels={"version": version},
            )

    def _is_due(self, measurement: Measurement, record: Record) -> bool:
        """True for a worker's first status in each `STATUS_EVERY_MS` and for its final report."""
        source, interval = (measurement.worker, measurement.incarnation), record.timestamp_ms // STATUS_EVERY_MS
        if measurement.kind == "status" and self._sampled.get(source, -1) >= interval:
            return False
        self._sampled[source] = interval
        return True


def flatten(table: Mapping[str, Any], *, prefix: str = "") -> dict[str, str]:
    """Flatten a nested table to dotted names and texts, without None: `flatten({"run": {"seed": 3, "x": None}})` is {"run.seed": "3"}."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix=f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = str(value)
    return flat


FORKED_TAG = "penstock.forked_from"


def target_of(
    record: RunRecord, config: Config, *, tags: Mapping[str, str], changed: Config | None = None, data: Sequence[Mapping[str, Any]] = ()
) -> Target:
    """Return the MLflow server, experiment and parameters for logging a run; `changed` has the values to log if not those of `config`."""
    state = state_directory()
    uri = config.mlflow.tracking_uri or f"sqlite:///{state / 'mlflow.db'}"
    return Target(
        run=record.run,
        uri=uri,
        experiment=config.mlflow.experiment,
        # For a database URI, MLflow would store artifacts in the working directory.
        artifacts=(state / "mlartifacts").as_uri() if uri.startswith("sqlite:") else None,
        params=flatten(settled(changed or config)),
        tags=tags,
        data=data,
        start_ms=record.created_ns // 1_000_000,
        over=record.status in ("finished", "failed"),
    )


def settled(config: Config) -> dict[str, Any]:
    """Return a configuration as nested dicts, with the effective value of keys whose default depends on others (`schedule.max_lag`)."""
    table: dict[str, Any] = json.loads(to_json(config))
    for name, owner in (("algorithm", config), ("schedule", config.rules), ("kafka", config)):
        table[name] = {key: getattr(owner, key, None) if value is None else value for key, value in table[name].items()}
    return table


def lineage(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the MLflow tags that name the parent of a run; empty for a run without a parent."""
    origin = info.get("regraded_from") or info.get("forked_from")
    if not isinstance(origin, Mapping):
        return {}
    tags = {FORKED_TAG: str(origin["run"]), f"{FORKED_TAG}.step": str(origin["step"]), f"{FORKED_TAG}.digest": str(origin["digest"])}
    return tags | ({PARENT_TAG: str(origin["mlflow_run_id"])} if origin.get("mlflow_run_id") else {})
