"""A record as the log carries it: bytes and headers, unchecked."""

from dataclasses import dataclass
from typing import NamedTuple

RawHeaders = tuple[tuple[str, bytes], ...]
"""Name and value of each header, in the order sent; a name may occur more than once."""


class RecordId(NamedTuple):
    """Topic, partition and offset of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that a consumer delivers."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: RawHeaders
    value: bytes

    @property
    def id(self) -> RecordId:
        """The record's identity in the log."""
        return RecordId(self.topic, self.partition, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A record for a producer to send."""

    topic: str
    partition: int
    key: bytes | None
    headers: RawHeaders
    value: bytes | memoryview
