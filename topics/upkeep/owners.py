"""Claims in `control-ROLE`: which process writes as each of the role's single writers. Single writers -> their rivals.

A process is known by the random token it made at its start, never by a pid, a host or a clock."""

from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

from penstock.topics.wire.checked import require_names, require_whole
from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload, as_row
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import column
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

SCHEMA = "owners/1"
OwnerKind = Literal["taken", "alive", "ended"]
OWNER_KINDS: tuple[OwnerKind, ...] = get_args(OwnerKind)

CODEC = Codec(
    SCHEMA,
    fields=(
        column("writer", pa.string()),
        column("token", pa.string()),
        column("kind", pa.string()),
        column("host", pa.string()),
        column("time_ns", pa.int64()),
    ),
)
_REQUIRED = ("outcome", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What a process says of its place: it has taken it, is alive in it, or has left it."""

    writer: str
    """Name of the place, as `trainer` or `scorer-0`; with the run before it, a transactional id."""
    token: str
    """The process."""
    kind: OwnerKind
    host: str
    """For people only."""
    time_ns: int


def key(owner: Owner) -> bytes:
    """The record's key: compaction keeps the newest of each kind.

    Example:
        key(Owner(writer="trainer", kind="taken", ...))  # -> b"trainer/taken"
    """
    return f"{owner.writer}/{owner.kind}".encode()


def encode(owner: Owner) -> bytes:
    """The payload."""
    return CODEC.encode(as_row(owner))


def decode(value: Payload) -> Owner:
    """The owner in a payload; raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["kind"] in OWNER_KINDS, f"kind is {row['kind'][:60]!r}, expected one of {', '.join(OWNER_KINDS)}")
    require_names(row, "writer", "token")
    require_whole(row, "time_ns")
    return Owner(**row)


def headers(owner: Owner, *, run: str) -> Headers:
    """The headers; `outcome` is the kind, `worker` the name of the place."""
    return Headers(run=run, schema=SCHEMA, outcome=owner.kind, worker=owner.writer)


def check(record: Record, *, run: str) -> Headers:
    """The headers of a record of `run`, its payload untouched; raises `Unusable`."""
    return one_of(read_headers(record.headers, record.value, run=run, schema=SCHEMA, required=_REQUIRED), outcomes=OWNER_KINDS)


def read(record: Record, *, run: str) -> tuple[Headers, Owner]:
    """Headers and payload of a record of `run`, which must agree; raises `Unusable`."""
    checked = check(record, run=run)
    owner = decode(record.value)
    match(checked, outcome=owner.kind, worker=owner.writer)
    return checked, owner
