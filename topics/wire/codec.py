"""Payloads as Arrow IPC streams (schema, one record batch of one row, end marker), which any Arrow library reads.

Decoding raises nothing but `Unusable(kind="undecodable")`: Arrow validates every buffer before one of them is looked at.
Encoding writes the message of the batch itself: its metadata differs from a template's in a few dozen numbers only."""

import struct
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple, TypeVar

import pyarrow as pa

from penstock.topics.wire.columns import Block, Payload, Reader, Writer, numbers_of
from penstock.topics.wire.conform import conform
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.flatbuffer import BatchLayout, batch_layout

Row = TypeVar("Row")

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF
_MALFORMED = (pa.ArrowException, ValueError, TypeError, LookupError, OverflowError, OSError, MemoryError, struct.error)
_SHOWN = 200


class Codec:
    """Encodes and decodes the records of one schema, whose name is `<topic>/<version>`."""

    __slots__ = ("_blank", "_head", "_layout", "_metadata", "name", "schema")

    def __init__(self, name: str, *, fields: Iterable[pa.Field]) -> None:
        self.name = name
        self.schema: pa.Schema = pa.schema(fields)
        self._head = self.schema.serialize().to_pybytes()
        # A row of values rather than an empty batch: a flatbuffer leaves out numbers that are zero, and those could not be patched.
        template = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in self.schema], names=self.schema.names)
        message = _split(template.serialize().to_pybytes())
        self._metadata, self._layout = message.metadata.tobytes(), message.layout
        self._blank = _blanked(self._metadata, self._layout)

    def encode(self, columns: Writer) -> bytes:
        """The payload with these columns, which must be those of the schema in its order."""
        layout, metadata = self._layout, bytearray(self._metadata)
        assert (len(columns.nodes), len(columns.sizes)) == (2 * layout.node_count, layout.buffer_count), self.name
        ends = list(accumulate([size + 7 & -8 for size in columns.sizes], initial=0))
        spans = [0] * (2 * layout.buffer_count)
        spans[::2], spans[1::2] = ends[:-1], columns.sizes
        numbers_of("q", len(columns.nodes)).pack_into(metadata, layout.nodes, *columns.nodes)
        numbers_of("q", len(spans)).pack_into(metadata, layout.buffers, *spans)
        numbers_of("q", 1).pack_into(metadata, layout.body, ends[-1])
        return b"".join((self._head, _PREFIX.pack(_CONTINUATION, len(metadata)), metadata, *columns.pieces, _END))

    def decode(self, value: Payload, build: Callable[[Reader], Row]) -> Row:
        """What `build` makes of the columns of `value`; whatever is wrong with it is `Unusable(kind="undecodable")`."""
        try:
            return build(self._open(value))
        except Unusable:
            raise
        except _MALFORMED as error:
            reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
            raise Unusable(f"not a {self.name} payload: {reason}", kind="undecodable") from error

    def _open(self, value: Payload) -> Reader:
        if value[: len(self._head)] == self._head:
            payload = memoryview(value)[len(self._head) :]
            message = self._split(payload)
            if message.rest in (_END, b""):
                _validated(pa.ipc.read_record_batch(pa.py_buffer(payload), self.schema))
                return message.reader()
        return self._open_foreign(value)

    def _split(self, payload: memoryview) -> "_Message":
        """Take a message apart; one with the metadata we write ourselves differs from it in numbers at known places only."""
        start = _PREFIX.size + len(self._blank)
        metadata = payload[_PREFIX.size : start]
        if _PREFIX.unpack_from(payload) != (_CONTINUATION, len(self._blank)) or _blanked(metadata, self._layout) != self._blank:
            return _split(payload)
        return _cut(payload, start, metadata, self._layout)

    def _open_foreign(self, value: Payload) -> Reader:
        """A stream with another schema message: one from another Arrow library, or from a later version of ours."""
        buffer = pa.py_buffer(value)
        messages = pa.ipc.MessageReader.open_stream(buffer)
        kinds = []
        for message in messages:
            kinds.append(message.type)
            if len(kinds) > 2:
                break
            if message.type == "record batch":
                batch_layout(memoryview(message.metadata))
        if kinds != ["schema", "record batch"]:
            raise ValueError(f"expected a schema and one record batch, found {', '.join(kinds) or 'nothing'}")
        with pa.ipc.open_stream(buffer) as stream:
            found = stream.schema
        wanted = [index for index, name in enumerate(found.names) if name in self.schema.names]
        with pa.ipc.open_stream(buffer, options=pa.ipc.IpcReadOptions(included_fields=wanted)) as stream:
            batch = _validated(stream.read_next_batch())
        ours = conform(batch, found=found, expected=self.schema)
        return _split(memoryview(ours.serialize())).reader()


def null_block(fields: Iterable[pa.Field], *, rows: int) -> Block:
    """The columns of `fields` with nothing but nulls in `rows` rows."""
    schema = pa.schema(fields)
    batch = pa.RecordBatch.from_arrays([pa.nulls(rows, field.type) for field in schema], names=schema.names)
    message = _split(memoryview(batch.serialize()))
    spans = message.spans()
    buffers = [bytes(message.body[start : start + size]) for start, size in zip(spans[::2], spans[1::2], strict=True)]
    body = b"".join(buffer + bytes(-len(buffer) % 8) for buffer in buffers)
    return Block(nodes=message.nodes(), sizes=tuple(map(len, buffers)), body=body)


class _Message(NamedTuple):
    """An encapsulated record-batch message, and what follows it."""

    metadata: memoryview
    layout: BatchLayout
    body: memoryview
    rest: memoryview

    def nodes(self) -> tuple[int, ...]:
        return numbers_of("q", 2 * self.layout.node_count).unpack_from(self.metadata, self.layout.nodes)

    def spans(self) -> tuple[int, ...]:
        return numbers_of("q", 2 * self.layout.buffer_count).unpack_from(self.metadata, self.layout.buffers)

    def reader(self) -> Reader:
        return Reader(self.body, nodes=self.nodes(), spans=self.spans())


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    if len(batch) != 1:
        raise ValueError(f"{len(batch)} rows, expected one")
    return batch


def _split(payload: Payload) -> _Message:
    """Take an encapsulated message apart; raises `ValueError` where it is cut off."""
    view = memoryview(payload)
    marker, size = _PREFIX.unpack_from(view)
    if marker != _CONTINUATION or size <= 0:
        raise ValueError("no message begins here")
    start = _PREFIX.size + size
    metadata = view[_PREFIX.size : start]
    return _cut(view, start, metadata, batch_layout(metadata))


def _cut(view: memoryview, start: int, metadata: memoryview, layout: BatchLayout) -> _Message:
    length = numbers_of("q", 1).unpack_from(metadata, layout.body)[0] if layout.body else 0
    if not 0 <= length <= len(view) - start:
        raise ValueError(f"a body of {length} bytes is announced, {len(view) - start} are there")
    return _Message(metadata, layout, view[start : start + length], view[start + length :])


def _blanked(metadata: Payload, layout: BatchLayout) -> bytearray:
    """The metadata with zeros for the numbers that differ from record to record."""
    blank = bytearray(metadata)
    blank[layout.body : layout.body + 8] = bytes(8)
    blank[layout.nodes : layout.nodes + 16 * layout.node_count] = bytes(16 * layout.node_count)
    blank[layout.buffers : layout.buffers + 16 * layout.buffer_count] = bytes(16 * layout.buffer_count)
    return blank
