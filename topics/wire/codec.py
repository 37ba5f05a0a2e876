"""Payloads as Arrow IPC streams (schema, one record batch, end marker), which any Arrow library reads.

Decoding raises only `Unusable(kind="undecodable")`. All buffers are validated before any is read, and compressed ones are refused: a few
bytes can claim to be gigabytes."""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import pyarrow as pa

from penstock.topics.wire.columns import Payload, Row, as_row, columns_of, read_rows
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.headers import Headers, match, one_of, read_headers
from penstock.topics.wire.record import Outgoing, Record

T = TypeVar("T")

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MALFORMED = (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, OSError, MemoryError, struct.error)
_SHOWN = 200


class Codec:
    """Encodes and decodes the records of one schema, named `<topic>/<version>`; a record has 1 to `max_rows` rows."""

    __slots__ = ("_columns", "_head", "max_rows", "name", "schema")

    def __init__(self, name: str, *, fields: Iterable[pa.Field], max_rows: int = 1) -> None:
        self.name = name
        self.schema: pa.Schema = pa.schema(fields)
        self.max_rows = max_rows
        self._columns = columns_of(self.schema)
        self._head: bytes = self.schema.serialize().to_pybytes()

    def encode(self, *rows: Mapping[str, Any]) -> bytes:
        """Return the payload of rows by column name; equal values give equal bytes. Raises `ValueError` for a null that is not allowed."""
        arrays = [column.to_arrow([row.get(column.name) for row in rows]) for column in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        return b"".join((self._head, batch.serialize(), _END))

    def decode(self, value: Payload) -> list[Row]:
        """Return the rows of a payload by column name. Any defect raises `Unusable(kind="undecodable")`."""
        try:
            batch = self._open(value)
            return read_rows(self._columns, list(batch.schema), batch.columns, rows=len(batch))
        except _MALFORMED as error:
            raise self._unusable(error) from error

    def batch(self, value: Payload) -> pa.RecordBatch:
        """Return the rows of a payload as a validated Arrow batch, with the columns of its writer. Any defect raises `Unusable`."""
        try:
            return self._open(value)
        except _MALFORMED as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> Unusable:
        reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        return Unusable(f"not a {self.name} payload: {reason}", kind="undecodable")

    def _open(self, value: Payload) -> pa.RecordBatch:
        """Return the one record batch of a payload, fully validated. Raises one of `_MALFORMED`."""
        messages = list(islice(pa.ipc.MessageReader.open_stream(pa.py_buffer(value)), 3))
        if [message.type for message in messages] != ["schema", "record batch"]:
            kinds = ", ".join(message.type for message in messages)
            raise ValueError(f"expected a schema and one record batch, got {kinds or 'nothing'}")
        ours = value[: len(self._head)] == self._head
        if is_compressed(messages[1].metadata):
            raise ValueError("the Arrow record batch is compressed, which is not allowed")
        batch = pa.ipc.read_record_batch(messages[1], self.schema if ours else pa.ipc.read_schema(messages[0]))
        batch.validate(full=True)
        if not 1 <= len(batch) <= self.max_rows:
            raise ValueError(f"{len(batch)} rows, expected {'one' if self.max_rows == 1 else f'1 to {self.max_rows}'}")
        return batch


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """Records with one row, a dataclass `T`, as a topic carries them: payload and headers."""

    codec: Codec
    decode: Callable[[Payload], T]
    facts: Callable[[T], dict[str, Any]]
    """Row -> its header values by field of `Headers`, which `read` compares with the headers."""
    required: tuple[str, ...] = ()
    """Names of required headers in addition to `run` and `schema`."""
    outcomes: tuple[str, ...] | None = None
    """Allowed values of the header `outcome`; None allows any."""
    columns: Callable[[T], Row] = as_row
    """Row -> its columns by name."""

    def encode(self, row: T) -> bytes:
        """Return the payload of a row."""
        return self.codec.encode(self.columns(row))

    def headers(self, row: T, *, run: str, worker: str | None = None) -> Headers:
        """Return the headers of a row's record; `worker` is the writer of a row that does not name it."""
        return Headers(run=run, schema=self.codec.name, **{"worker": worker, **self.facts(row)})

    def outgoing(self, row: T, *, run: str, topic: str, key: bytes | None, partition: int = 0) -> Outgoing:
        """Return a row of `run` as a record to send to the Kafka topic `topic`."""
        value = self.encode(row)
        return Outgoing(topic=topic, partition=partition, key=key, headers=self.headers(row, run=run).encode(value), value=value)

    def check(self, record: Record, *, run: str) -> Headers:
        """Return the headers of a record of `run`, without decoding its payload. Raises `Unusable`."""
        headers = read_headers(record.headers, record.value, run=run, schema=self.codec.name, required=self.required)
        return headers if self.outcomes is None else one_of(headers, outcomes=self.outcomes)

    def read(self, record: Record, *, run: str, checked: Headers | None = None) -> tuple[Headers, T]:
        """Return headers and row of a record of `run`, which must agree; `checked` are its headers from `check`. Raises `Unusable`."""
        headers, row = checked or self.check(record, run=run), self.decode(record.value)
        match(headers, **self.facts(row))
        return headers, row


def is_compressed(metadata: Payload) -> bool:
    """True if the metadata of a record-batch message declare a compression; pyarrow itself would decompress at once.

    Follows `Message.header` to `RecordBatch.compression`, fields 2 and 3 of their tables: https://flatbuffers.dev/internals
    """
    view = memoryview(metadata)
    message = struct.unpack_from("<I", view)[0]
    header = _field(view, message, 2)
    return bool(_field(view, header + struct.unpack_from("<I", view, header)[0], 3))


def _field(view: memoryview, table: int, number: int) -> int:
    """Return the position of a field in a flatbuffer table; 0 if the table lacks it."""
    vtable = table - struct.unpack_from("<i", view, table)[0]
    size = struct.unpack_from("<H", view, vtable)[0]
    offset = struct.unpack_from("<H", view, vtable + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
    return table + offset if offset else 0
