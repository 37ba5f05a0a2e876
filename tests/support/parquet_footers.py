"""Footers of Parquet files, written by hand: https://github.com/apache/parquet-format, thrift's compact protocol."""

import struct
from collections.abc import Sequence


def varint(number: int) -> bytes:
    """An unsigned number, seven bits a byte."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def zigzag(number: int) -> bytes:
    """A signed number of 64 bits."""
    return varint((number << 1) ^ (number >> 63))


def group(children: int) -> bytes:
    """A schema element: a required group named "a"."""
    return b"\x35" + zigzag(0) + b"\x18\x01a\x15" + zigzag(children) + b"\0"


LEAF = b"\x15" + zigzag(1) + b"\x25" + zigzag(0) + b"\x18\x01b\0"
"""A schema element: a required column of int32 named "b"."""


def file_of(elements: Sequence[bytes], *, rows: int = 0) -> bytes:
    """A file without row groups."""
    footer = b"\x15\x04\x19\xfc" + varint(len(elements)) + b"".join(elements) + b"\x16" + zigzag(rows) + b"\x19\x0c\0"
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def nested(depth: int) -> bytes:
    """A file whose one column is in so many groups."""
    return file_of([group(1)] * (depth + 1) + [LEAF])
