"""The functions `encode`, `check` and `read` of the topics whose records have one row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.topics.wire.codec import Codec
from penstock.topics.wire.columns import Payload, as_row
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Record

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """Records with one row, a dataclass `T`, as a topic carries them: payload and headers."""

    codec: Codec
    decode: Callable[[Payload], T]
    facts: Callable[[T], dict[str, Any]]
    """Row -> its header values by field of `Headers`, as far as `read` compares them with the headers."""
    required: tuple[str, ...] = ()
    """Names of required headers in addition to `run` and `schema`."""
    outcomes: tuple[str, ...] | None = None
    """Allowed values of the header `outcome`; None allows any."""

    def encode(self, row: T) -> bytes:
        """Return the payload of a row."""
        return self.codec.encode(as_row(row))

    def check(self, record: Record, *, run: str) -> Headers:
        """Return the headers of a record of `run`, without decoding its payload. Raises `Unusable`."""
        headers = read_headers(record.headers, record.value, run=run, schema=self.codec.name, required=self.required)
        return headers if self.outcomes is None else one_of(headers, outcomes=self.outcomes)

    def read(self, record: Record, *, run: str, checked: Headers | None = None) -> tuple[Headers, T]:
        """Return headers and row of a record of `run`, which must agree; `checked` are its headers from `check`. Raises `Unusable`."""
        headers, row = checked or self.check(record, run=run), self.decode(record.value)
        match(headers, **self.facts(row))
        return headers, row
