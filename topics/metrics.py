"""`metrics`: one worker's measurements. Every worker -> tracker, live view, report.

A measurement is dated by whoever measured, so that reading it twice gives the same point twice."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import pyarrow as pa

from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload, Reader, Writer
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import column, map_of
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "metrics/1"
MeasurementKind = Literal["status", "progress", "eval", "final"]
MEASUREMENT_KINDS: tuple[MeasurementKind, ...] = get_args(MeasurementKind)
EVERY_RUN_HAS = ("feeder", "rollout", "scorer", "trainer", "tracker")
"""Roles without which a run's measurements are incomplete; others may report as well."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one worker says of itself at one moment."""

    worker: str
    role: str
    incarnation: str
    """Tells the processes that have borne the worker's name apart."""
    seq: int
    """Counts an incarnation's measurements, from 0."""
    kind: MeasurementKind
    time_ns: int
    version: int | None = None
    step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def encode(measurement: Measurement) -> bytes:
    """The payload of a measurement."""
    writer = Writer()
    for text in (measurement.worker, measurement.role, measurement.incarnation):
        writer.texts((text,))
    writer.int64s((measurement.seq,))
    writer.texts((measurement.kind,))
    for number in (measurement.time_ns, measurement.version, measurement.step):
        writer.int64s((number,))
    writer.numbers_by_name(measurement.values)
    writer.texts_by_name(measurement.labels)
    return CODEC.encode(writer)


def decode(value: Payload) -> Measurement:
    """The measurement in a payload; raises `Unusable`."""
    return CODEC.decode(value, _build)


def headers(measurement: Measurement, *, run: str) -> Headers:
    """What a measurement says on its outside; the outcome is its kind."""
    return Headers(
        run=run,
        schema=SCHEMA,
        policy_version_min=measurement.version,
        policy_version_max=measurement.version,
        outcome=measurement.kind,
        worker=measurement.worker,
    )


def check(record: Record, *, run: str) -> Headers:
    """The headers of a record of `run`, its payload untouched; raises `Unusable`."""
    return one_of(read_headers(record.headers, record.value, run=run, schema=SCHEMA, required=_REQUIRED), outcomes=MEASUREMENT_KINDS)


def read(record: Record, *, run: str) -> tuple[Headers, Measurement]:
    """Headers and payload of a record of `run`, which must agree; raises `Unusable`."""
    found = check(record, run=run)
    measurement = decode(record.value)
    version = measurement.version
    match(found, outcome=measurement.kind, worker=measurement.worker, policy_version_min=version, policy_version_max=version)
    return found, measurement


def _build(reader: Reader) -> Measurement:
    worker, role, incarnation, seq, kind = reader.text(), reader.text(), reader.text(), reader.int64(), reader.text()
    require(kind in MEASUREMENT_KINDS, f"kind is {kind[:60]!r}, expected one of {', '.join(MEASUREMENT_KINDS)}")
    return Measurement(
        worker=worker,
        role=role,
        incarnation=incarnation,
        seq=seq,
        kind=kind,  # type: ignore[arg-type]
        time_ns=reader.int64(),
        version=reader.int64s_or_none()[0],
        step=reader.int64s_or_none()[0],
        values=reader.numbers_by_name(),
        labels=reader.texts_by_name(),
    )
