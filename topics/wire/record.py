"""A record as the log carries it: bytes and headers, unchecked."""

from dataclasses import dataclass

RawHeaders = tuple[tuple[str, bytes], ...]
"""Name and value of each header, in the order they were sent; a name may occur more than once."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A record for a producer to send."""

    topic: str
    partition: int
    key: bytes | None
    headers: RawHeaders
    value: bytes | memoryview
