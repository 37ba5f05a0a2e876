"""A record as the log carries it: bytes and headers, not yet believed."""

from dataclasses import dataclass

RawHeaders = tuple[tuple[str, bytes], ...]
"""Name and value of each header, in the order they were sent; a name may occur more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a consumer delivers."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    headers: RawHeaders
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What a producer is given."""

    topic: str
    partition: int
    key: bytes | None
    headers: RawHeaders
    value: bytes | memoryview


def key_of(number: int) -> bytes:
    """The key of a record about one group or version: its number in decimal.

    Example:
        key_of(17)  # -> b"17"
    """
    return b"%d" % number
