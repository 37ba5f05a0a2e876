"""Where the numbers stand in an Arrow record-batch message: just enough of its flatbuffer to read and to patch them.

Every look is bounds-checked by `struct`: wrong bytes raise `struct.error` or `ValueError`, nothing else.
Layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc"""

import struct
from typing import NamedTuple

RECORD_BATCH = 3
"""The value of `MessageHeader` for a record batch."""

_MESSAGE_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_BATCH_NODES, _BATCH_BUFFERS, _BATCH_COMPRESSION = 1, 2, 3
_U8, _U16, _I32, _U32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I")
Bytes = bytes | bytearray | memoryview


class BatchLayout(NamedTuple):
    """Positions in the metadata of one record-batch message; nodes and buffers are pairs of int64."""

    body: int
    """Position of the int64 body length; 0 where the message leaves it out, because there is no body."""
    nodes: int
    node_count: int
    buffers: int
    buffer_count: int


def batch_layout(metadata: Bytes) -> BatchLayout:
    """Find the numbers of a record batch in `metadata` (a flatbuffer `Message`, without its length prefix).

    Raises `ValueError` for a compressed body, for one that omits its counts, and for any other kind of message.
    """
    message = _follow(metadata, 0)
    if _U8.unpack_from(metadata, _required(metadata, message, _MESSAGE_TYPE))[0] != RECORD_BATCH:
        raise ValueError("not a record batch")
    batch = _follow(metadata, _required(metadata, message, _MESSAGE_HEADER))
    if _slot(metadata, batch, _BATCH_COMPRESSION):
        raise ValueError("the body is compressed")
    nodes = _follow(metadata, _required(metadata, batch, _BATCH_NODES))
    buffers = _follow(metadata, _required(metadata, batch, _BATCH_BUFFERS))
    return BatchLayout(
        body=_slot(metadata, message, _MESSAGE_BODY_LENGTH),
        nodes=nodes + 4,
        node_count=_U32.unpack_from(metadata, nodes)[0],
        buffers=buffers + 4,
        buffer_count=_U32.unpack_from(metadata, buffers)[0],
    )


def _follow(metadata: Bytes, position: int) -> int:
    target: int = position + _U32.unpack_from(metadata, position)[0]
    return target


def _slot(metadata: Bytes, table: int, field: int) -> int:
    """Position of a table's field, 0 when it is absent (and so has its default)."""
    vtable = table - _I32.unpack_from(metadata, table)[0]
    if vtable < 0:
        raise ValueError("a table lies before its message")
    entry = 4 + 2 * field
    if entry >= _U16.unpack_from(metadata, vtable)[0]:
        return 0
    offset: int = _U16.unpack_from(metadata, vtable + entry)[0]
    return table + offset if offset else 0


def _required(metadata: Bytes, table: int, field: int) -> int:
    position = _slot(metadata, table, field)
    if not position:
        raise ValueError(f"the message leaves out field {field}")
    return position
