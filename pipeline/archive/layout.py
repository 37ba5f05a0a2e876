"""Schemas of an archive's tables: one row per record (in `rollouts` one per sample) with its offset, key and payload columns.

Payload columns keep their names and types. A payload column whose name the record columns use has the prefix `payload_`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC, topic_name
from penstock.topics.groups import Part
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.headers import Headers, match
from penstock.topics.wire.record import Record

HEADER = pa.struct([("name", pa.string()), ("value", pa.binary())])
RECORD = (
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
    pa.field("key", pa.binary()),
)
ORIGINAL = (pa.field("headers", pa.list_(HEADER)), pa.field("raw", pa.binary()), pa.field("problem", pa.string()))
"""`headers` and `raw` (payload bytes) are null if they can be restored from the other columns; `problem` is why a record is unusable."""

_TAKEN = frozenset(field.name for field in (*RECORD, *ORIGINAL))
VERSIONS = (pa.field("policy_version_min", pa.int64()), pa.field("policy_version_max", pa.int64()))
WORKER = pa.field("worker", pa.string())
GROUP_FACTS = (
    pa.field("tokens", pa.int64()),
    pa.field("reward_mean", pa.float64()),
    pa.field("sha256", pa.string()),
    pa.field("no_reward", pa.int64()),
)
_GROUP_FACTS = tuple(field.name for field in GROUP_FACTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One table of an archive, and the functions that read and write its records."""

    name: str
    topic: str
    codec: Codec
    facts: tuple[pa.Field, ...]
    """Columns from record headers. Except for `worker`, they also follow from the payload."""
    read: Callable[..., Any]
    """(record, run=) -> (headers, payload); raises `Unusable`."""
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    headers: Callable[..., Headers]
    """(payload, run=, worker=, value=) -> headers of a record."""

    @property
    def payload(self) -> dict[str, str]:
        """Table column -> payload column."""
        return {(f"payload_{name}" if name in _TAKEN else name): name for name in self.codec.schema.names}

    @property
    def schema(self) -> pa.Schema:
        types = [self.codec.schema.field(name).type for name in self.payload.values()]
        columns = [pa.field(name, relaxed(kind)) for name, kind in zip(self.payload, types, strict=True)]
        return pa.schema([*RECORD, *columns, *self.facts, *ORIGINAL])

    def kafka_name(self, run: str) -> str:
        return self.topic if self.topic == RUNS_TOPIC else topic_name(run, self.topic)


def relaxed(kind: pa.DataType) -> pa.DataType:
    """Return the type with all nested fields nullable, as other Parquet writers produce them."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, relaxed(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, relaxed(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(relaxed(kind.value_type))
    return kind


def _read_part(record: Record, *, run: str) -> tuple[Headers, Part]:
    """Read one part of a group record; headers about the whole group are checked only if there is just one part."""
    headers, part = groups.check(record, run=run), groups.decode_part(record.value)
    match(headers, group=part.group.group, outcome=part.group.outcome, part=part.part, parts=part.parts)
    if part.parts == 1:
        expected = groups.headers(part.group, run=run, sha256=groups.digest([record.value]))
        match(headers, **{name: getattr(expected, name) for name in ("policy_version_min", "policy_version_max", "samples", *_GROUP_FACTS)})
    return headers, part


def _with_worker(headers: Callable[..., Headers]) -> Callable[..., Headers]:
    """Adapt a headers function of records whose worker is only in a header."""
    return lambda payload, *, run, worker, **_: headers(payload, run=run, worker=worker)


def _plain(headers: Callable[..., Headers]) -> Callable[..., Headers]:
    """Adapt a headers function of records whose worker is in the payload or nowhere."""
    return lambda payload, *, run, **_: headers(payload, run=run)


def _kind(name: str, module: Any, headers: Callable[..., Headers], *facts: pa.Field, **functions: Any) -> Kind:
    """Define a table from the module of a topic; `functions` override the module's codec, read, decode and encode."""
    own = {"codec": module.CODEC, "read": module.read, "decode": module.decode, "encode": module.encode}
    return Kind(name=name, headers=headers, facts=facts, **{"topic": name, **own, **functions})


_PARTS = {
    "read": _read_part,
    "decode": groups.decode_part,
    "encode": lambda part: groups.encode(part.group, part=part.part, parts=part.parts),
}
_SAMPLES = {"read": rollouts.read_all, "decode": rollouts.decode_all, "encode": lambda samples: rollouts.encode(*samples)}
_CHUNKS = {"codec": weights.CHUNK_CODEC, "read": weights.read_chunk, "decode": weights.decode_chunk, "encode": weights.encode_chunk}

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("runs", runs, _plain(runs.headers), topic=RUNS_TOPIC),
        _kind("run", runs, _plain(runs.headers)),
        _kind("dead-letters", dead_letters, _plain(dead_letters.headers)),
        _kind("metrics", metrics, _plain(metrics.headers)),
        _kind("ledger", ledger, _with_worker(ledger.headers), WORKER),
        _kind(
            "groups",
            groups,
            lambda part, *, run, worker, value: groups.headers(part.group, run=run, worker=worker, sha256=groups.digest([value])),
            WORKER,
            *VERSIONS,
            *GROUP_FACTS,
            **_PARTS,
        ),
        _kind("rollouts", rollouts, lambda samples, *, run, **_: rollouts.headers(*samples, run=run), *VERSIONS, **_SAMPLES),
        _kind("prompts", prompts, _with_worker(prompts.headers), WORKER),
        _kind("weights", weights, _with_worker(weights.headers), WORKER),
        _kind("chunks", weights, _with_worker(weights.chunk_headers), WORKER, topic="weights", **_CHUNKS),
    )
}
"""Tables by name. End offsets are read in this order, referring records first, so that the records they refer to are archived too."""


def kind_of(topic: str, partition: int) -> Kind:
    """Return the table for a topic's partition; `topic` is the name without the run. `kind_of("weights", 1).name` is "chunks"."""
    if topic == RUNS_TOPIC:
        return KINDS["runs"]
    return KINDS["chunks" if topic == "weights" and partition else topic]
