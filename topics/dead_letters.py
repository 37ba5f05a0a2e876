"""`dead-letters`: an unusable record, unchanged, with the reason. The role that reads a topic -> operators.

The record is stored so that it can be written to its topic again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.topics.wire.checked import is_name, require_whole
from penstock.topics.wire.codec import Codec, Format
from penstock.topics.wire.columns import Payload, Row, as_row
from penstock.topics.wire.errors import Unusable, require
from penstock.topics.wire.fields import column, fields_of, list_of
from penstock.topics.wire.record import RawHeaders, Record, RecordId

SCHEMA = "dead-letters/1"
_HEADER = pa.struct([column("name", pa.string()), column("value", pa.binary(), nullable=True)])
SKIPPED = "skipped"
"""Kind of a dead letter for an offset range that the operator chose to skip because it cannot be read at all."""
_NEXT = "next"
_ABOUT_GROUPS = ("prompts", "calls", "replies", "rollouts", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An unusable record and why it is unusable."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    kind: str
    """Class of the reason: a kind of `Unusable`, or one of the reader's own."""
    reason: str
    """The reason in words."""
    worker: str
    """The worker that wrote the dead letter."""
    key: bytes | None
    headers: RawHeaders
    value: bytes
    time_ns: int

    @property
    def record_id(self) -> RecordId:
        """Identity of the unusable record in the log."""
        return RecordId(self.topic, self.partition, self.offset)


CODEC = Codec(SCHEMA, fields=fields_of(DeadLetter, headers=list_of(_HEADER)))


def from_record(record: Record, *, kind: str, reason: str, worker: str, time_ns: int) -> DeadLetter:
    """Return the dead letter for a record that cannot be used; `worker` is its writer."""
    reason = reason.encode("utf-8", "replace").decode()  # an error may quote invalid text
    return DeadLetter(**as_row(record), kind=kind, reason=reason, worker=worker, time_ns=time_ns)


def to_record(dead_letter: DeadLetter) -> Record:
    """Return the unusable record as it was, from its dead letter."""
    return Record(**{field: getattr(dead_letter, field) for field in Record.__slots__})


def of_stretch(topic: str, partition: int, offsets: range, *, reason: str, worker: str, time_ns: int) -> DeadLetter:
    """Return the dead letter that lets readers skip an offset range, which cannot be read."""
    after = ((_NEXT, str(offsets.stop).encode()),)
    record = Record(topic=topic, partition=partition, offset=offsets.start, timestamp_ms=0, key=None, headers=after, value=b"")
    return from_record(record, kind=SKIPPED, reason=reason, worker=worker, time_ns=time_ns)


def skipped(dead_letter: DeadLetter) -> range | None:
    """Return the offsets that a dead letter lets readers skip; None if it is about one record."""
    after = dict(dead_letter.headers).get(_NEXT) or b""
    return range(dead_letter.offset, int(after)) if dead_letter.kind == SKIPPED and after.isdigit() and len(after) < 19 else None


def stretches(letters: Iterable[Record], *, run: str) -> list[tuple[tuple[str, int], range]]:
    """Return (topic, partition) and offsets of all ranges that readers skip, from the records of the dead-letter topic of `run`."""
    skips = []
    for record in letters:
        try:
            dead_letter = read(record, run=run)[1]
        except Unusable:
            continue
        if (offsets := skipped(dead_letter)) is not None:
            skips.append(((dead_letter.topic, dead_letter.partition), offsets))
    return skips


def claimed_group(dead_letter: DeadLetter) -> int | None:
    """Return the group number in the unusable record's header, else in its key; None if neither has one."""
    if dead_letter.topic.rpartition(".")[2] not in _ABOUT_GROUPS:
        return None  # keys of other topics are no group numbers
    claim = (dict(dead_letter.headers).get("group") or dead_letter.key or b"").decode("ascii", "replace")
    return int(claim) if claim.isascii() and claim.isdigit() and len(claim) < 19 else None


def decode(value: Payload) -> DeadLetter:
    """Return the dead letter in a payload. Raises `Unusable`."""
    (row,) = CODEC.decode(value)
    require_whole(row, "partition", "offset", "time_ns")
    require(is_name(row["topic"]) and is_name(row["worker"]) and is_name(row["kind"]), "topic, worker or kind is not a name")
    headers = tuple((header["name"], _bytes(header["value"])) for header in row["headers"])
    return DeadLetter(**{**row, "key": _bytes(row["key"]), "headers": headers, "value": bytes(row["value"])})


def _columns(dead_letter: DeadLetter) -> Row:
    return {**as_row(dead_letter), "headers": [{"name": name, "value": value} for name, value in dead_letter.headers]}


def _bytes(value: memoryview | None) -> Any:
    """A copy of a value; `None` for a header without one, from a foreign client."""
    return None if value is None else bytes(value)


_FORMAT = Format(CODEC, decode, lambda row: {"outcome": row.kind, "worker": row.worker}, ("outcome",), columns=_columns)
encode, headers, outgoing, check, read = _FORMAT.encode, _FORMAT.headers, _FORMAT.outgoing, _FORMAT.check, _FORMAT.read
