"""`metrics`: one worker's measurements. Every worker -> tracker, live view, report.

A measurement carries its time, so that reading it twice gives the same point twice."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

import pyarrow as pa

from penstock.topics.wire.checked import require_names, require_whole, whole
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload, as_row
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import column, map_of
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "metrics/1"
MeasurementKind = Literal["status", "progress", "eval", "final"]
MEASUREMENT_KINDS: tuple[MeasurementKind, ...] = get_args(MeasurementKind)
ActivityKind = Literal["work", "wait", "load"]
EVERY_RUN_HAS = ("feeder", "rollout", "scorer", "trainer", "tracker")
"""Roles that every run's measurements include; others may report too."""

CODEC = Codec(
    SCHEMA,
    fields=(
        column("worker", pa.string()),
        column("role", pa.string()),
        column("incarnation", pa.string()),
        column("seq", pa.int64()),
        column("kind", pa.string()),
        column("time_ns", pa.int64()),
        column("version", pa.int64(), nullable=True),
        column("step", pa.int64(), nullable=True),
        column("values", map_of(pa.float64())),
        column("labels", map_of(pa.string())),
    ),
)
_REQUIRED = ("outcome", "worker")


class Activity(StrEnum):
    """Activity of a worker: the label `activity` of its status, next to the free text `doing`, which no reader interprets."""

    BUSY = "busy"
    """Works and reports each second."""
    COMPUTE = "compute"
    """One long computation without reports: a micro-batch, an evaluation."""
    STOP = "stop"
    """Finishes its work after a request to stop."""
    NO_PROMPTS = "no_prompts"
    NO_CALLS = "no_calls"
    NO_SAMPLES = "no_samples"
    NO_WEIGHTS = "no_weights"
    LOAD = "load"
    """Loads a policy version."""
    FULL_WINDOW = "full_window"
    """The schedule admits no prompt before the next version."""
    NO_ROOM = "no_room"
    """No rollout worker has a free slot."""
    NO_DEVICE = "no_device"
    """Waits for a shared device, or hands it over."""
    NO_GROUP = "no_group"
    """Waits for scored groups."""
    SAVE = "save"
    """Writes results: a checkpoint, the model, the report."""
    START = "start"
    DONE = "done"
    """Nothing is left but to wait for the end of the run."""

    @property
    def kind(self) -> ActivityKind:
        """The only definition of work and waiting.

        Example:
            Activity.NO_PROMPTS.kind  # -> "wait"
        """
        if self in (Activity.START, Activity.LOAD):
            return "load"
        return "work" if self in (Activity.BUSY, Activity.COMPUTE, Activity.STOP, Activity.SAVE) else "wait"

    @property
    def reports(self) -> bool:
        """True if a worker reports each second during this activity; the others may last for minutes without a report."""
        return self not in (Activity.COMPUTE, Activity.STOP, Activity.LOAD, Activity.SAVE, Activity.START)


def activity_of(labels: Mapping[str, str]) -> Activity:
    """The activity in the labels of a status; `BUSY` if the writer's release has none or one that this release does not have."""
    try:
        return Activity(labels.get("activity", Activity.BUSY))
    except ValueError:
        return Activity.BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of one worker at one moment."""

    worker: str
    role: str
    incarnation: str
    """Distinguishes the processes that have had the worker's name."""
    seq: int
    """Number among the incarnation's measurements, from 0."""
    kind: MeasurementKind
    """`status` each second, `progress`, `eval` or `final`."""
    time_ns: int
    version: int | None = None
    """The evaluated version."""
    step: int | None = None
    """The optimizer step it belongs to."""
    values: dict[str, float] = field(default_factory=dict)
    """Figures by name; most are cumulative since the process started."""
    labels: dict[str, str] = field(default_factory=dict)
    """`activity` and its text `doing`, host, pid; of an evaluation some prompts with their completions."""


def encode(measurement: Measurement) -> bytes:
    """The payload of a measurement."""
    return CODEC.encode(as_row(measurement))


def decode(value: Payload) -> Measurement:
    """The measurement in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["kind"] in MEASUREMENT_KINDS, f"kind is {row['kind'][:60]!r}, expected one of {', '.join(MEASUREMENT_KINDS)}")
    require_names(row, "worker", "role", "incarnation")
    require_whole(row, "seq", "time_ns", "version", "step")
    worker, role, values = row["worker"], row["role"], row["values"]
    require(worker == role or worker.startswith(f"{role}-"), f"worker {worker!r} is not of role {role!r}")
    accuracy = values.get("greedy_accuracy", 0.0)
    require(math.isfinite(accuracy), f"greedy_accuracy is {accuracy}, expected a finite number")
    require("all_out" not in values or whole(values.get("admitted")) is not None, "'all_out' without a whole number 'admitted'")
    return Measurement(**row)


def headers(measurement: Measurement, *, run: str) -> Headers:
    """The headers of a measurement; `outcome` is its kind."""
    return Headers(
        run=run,
        schema=SCHEMA,
        policy_version_min=measurement.version,
        policy_version_max=measurement.version,
        outcome=measurement.kind,
        worker=measurement.worker,
    )


def check(record: Record, *, run: str) -> Headers:
    """The headers of a record of `run`, without decoding its payload. Raises `Unusable`."""
    return one_of(read_headers(record.headers, record.value, run=run, schema=SCHEMA, required=_REQUIRED), outcomes=MEASUREMENT_KINDS)


def read(record: Record, *, run: str) -> tuple[Headers, Measurement]:
    """Headers and payload of a record of `run`, which must agree. Raises `Unusable`."""
    checked = check(record, run=run)
    measurement = decode(record.value)
    version = measurement.version
    match(checked, outcome=measurement.kind, worker=measurement.worker, policy_version_min=version, policy_version_max=version)
    return checked, measurement
