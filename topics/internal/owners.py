"""Claims in `control-ROLE`: the current owner of each single-writer id of the role. Single writers -> processes that want the same id.

A random token made at its start identifies a process, never a pid, a host or a clock."""

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.topics.wire.checked import require_names, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload
from penstock.topics.wire.errors import require
from penstock.topics.wire.fields import fields_of

SCHEMA = "owners/1"
OwnerKind = Literal["taken", "alive", "ended"]
OWNER_KINDS: tuple[OwnerKind, ...] = get_args(OwnerKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A record of a writer lease: a process has acquired, renewed or released it."""

    writer: str
    """Single-writer id, such as `trainer` or `scorer-0`; prefixed with the run, a transactional id."""
    token: str
    """Random, made by the process at its start."""
    kind: OwnerKind
    """`taken`, `alive` or `ended`."""
    host: str
    """For display only."""
    time_ns: int


CODEC = Codec(SCHEMA, fields=fields_of(Owner))


def key(owner: Owner) -> bytes:
    """Return the record's key, writer id and kind: compaction retains the newest record of each."""
    return f"{owner.writer}/{owner.kind}".encode()


def decode(value: Payload) -> Owner:
    """Return the claim in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require(row["kind"] in OWNER_KINDS, f"kind is {row['kind'][:60]!r}, expected one of {', '.join(OWNER_KINDS)}")
    require_names(row, "writer", "token")
    require_whole(row, "time_ns")
    return Owner(**row)


_FORMAT = Format(CODEC, decode, lambda owner: {"outcome": owner.kind, "worker": owner.writer}, ("outcome", "worker"), OWNER_KINDS)
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
