"""Arrow columns as bytes: a `Writer` and a `Reader` that walk the fields of a schema in its own order, depth first.

Both move whole columns, never single tokens. The caller names the columns in the order of its schema; nothing here knows schemas.
Single-row records have two dozen columns, and objects for each would cost ten times what the bytes do.
Layouts: https://arrow.apache.org/docs/format/Columnar.html"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.topics.wire.errors import Unusable

Payload = bytes | memoryview
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]
_PADDING = tuple(bytes(-size & 7) for size in range(8))
Number = TypeVar("Number", bound=np.generic)
Elements = TypeVar("Elements", Int32s, Float32s, Bools, list[int], list[str], list[float], list[float | None])


class Block(NamedTuple):
    """Columns that are already written."""

    nodes: tuple[int, ...]
    """Length and null count of each column, one after the other."""
    sizes: tuple[int, ...]
    """Bytes of each buffer, without its padding."""
    body: bytes
    """The buffers, each padded to 8 bytes."""


class Writer:
    """Collects the nodes and buffers of one record batch; `pieces` are what of the buffers is not empty, padded to 8 bytes."""

    __slots__ = ("nodes", "pieces", "sizes")

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.sizes: list[int] = []
        self.pieces: list[Payload] = []

    def int64s(self, values: Sequence[int | None]) -> None:
        """A column of int64, nullable."""
        self._numbers(values, "q")

    def doubles(self, values: Sequence[float | None]) -> None:
        """A column of double, nullable."""
        self._numbers(values, "d")

    def texts(self, values: Sequence[str | None]) -> None:
        """A column of UTF-8 strings, nullable."""
        self.binaries([value if value is None else value.encode() for value in values])

    def binaries(self, values: Sequence[Payload | None]) -> None:
        """A column of byte strings, nullable."""
        present = values if self._validity(values) else [b"" if value is None else value for value in values]
        data = present[0] if len(present) == 1 else b"".join(present)  # type: ignore[arg-type]
        self._put(_offsets(list(map(len, present))))  # type: ignore[arg-type]
        self._put(data)  # type: ignore[arg-type]

    def lists(self, lengths: Sequence[int]) -> None:
        """A column of lists without nulls; its elements, all rows' after each other, are the next column."""
        self.nodes += (len(lengths), 0)
        self.sizes.append(0)
        self._put(_offsets(lengths))

    def structs(self, length: int) -> None:
        """A column of structs without nulls; its fields are the next columns."""
        self.nodes += (length, 0)
        self.sizes.append(0)

    def numbers_by_name(self, values: Mapping[str, float]) -> None:
        """One row of a map from strings to double."""
        self._names(values)
        self.doubles(list(values.values()))

    def texts_by_name(self, values: Mapping[str, str]) -> None:
        """One row of a map from strings to strings."""
        self._names(values)
        self.texts(list(values.values()))

    def array(self, values: NDArray[Any], *, missing: Bools | None = None) -> None:
        """A column from an array, in its own element type; True in `missing` makes an element null."""
        nulls = 0 if missing is None else int(np.count_nonzero(missing))
        self.nodes += (len(values), nulls)
        self._put(_bits(~missing) if nulls and missing is not None else b"")
        self._put(_bits(values) if values.dtype == np.bool_ else values.tobytes())

    def block(self, block: Block) -> None:
        """Columns written before."""
        self.nodes += block.nodes
        self.sizes += block.sizes
        self.pieces.append(block.body)

    def _names(self, values: Mapping[str, object]) -> None:
        self.lists((len(values),))
        self.structs(len(values))
        self.texts(list(values))

    def _numbers(self, values: Sequence[float | None], code: str) -> None:
        present = values if self._validity(values) else [0 if value is None else value for value in values]
        self._put(numbers_of(code, len(values)).pack(*present))

    def _validity(self, values: Sequence[object]) -> bool:
        """Write node and validity of a column; whether all its values are there."""
        if None not in values:
            self.nodes += (len(values), 0)
            self.sizes.append(0)
            return True
        valid = np.array([value is not None for value in values])
        self.nodes += (len(values), len(values) - int(np.count_nonzero(valid)))
        self._put(_bits(valid))
        return False

    def _put(self, buffer: Payload) -> None:
        size = len(buffer)
        self.sizes.append(size)
        self.pieces.append(buffer)
        if size & 7:
            self.pieces.append(_PADDING[size & 7])


class Reader:
    """Gives out the columns of one record batch that Arrow has validated; `spans` are (offset, length) of its buffers in `body`.

    Raises `Unusable` where a column that may not have nulls has some. Arrays are read-only views of the body.
    """

    __slots__ = ("_body", "_buffer", "_node", "_nodes", "_spans")

    def __init__(self, body: memoryview, *, nodes: tuple[int, ...], spans: tuple[int, ...]) -> None:
        self._body, self._nodes, self._spans = body, nodes, spans
        self._node = self._buffer = 0

    def int64s(self) -> list[int]:
        """A column of int64 without nulls."""
        return list(self._numbers("q"))

    def doubles(self) -> list[float]:
        """A column of double without nulls."""
        return list(self._numbers("d"))

    def int64(self) -> int:
        """The only row of a column of int64 without nulls."""
        number: int = self._numbers("q")[0]
        return number

    def text(self) -> str:
        """The only row of a column of strings without nulls."""
        return self.texts()[0]

    def int64s_or_none(self) -> list[int | None]:
        """A column of int64."""
        return self._numbers_or_none("q")

    def doubles_or_none(self) -> list[float | None]:
        """A column of double."""
        return self._numbers_or_none("d")

    def texts(self) -> list[str]:
        """A column of strings without nulls."""
        return [str(value, "utf-8") for value in self.binaries()]

    def texts_or_none(self) -> list[str | None]:
        """A column of strings."""
        return [None if value is None else str(value, "utf-8") for value in self.binaries_or_none()]

    def binaries(self) -> list[memoryview]:
        """A column of byte strings without nulls."""
        return self._binaries(self._length())

    def binaries_or_none(self) -> list[memoryview | None]:
        """A column of byte strings."""
        length, valid = self._validity()
        values: list[memoryview | None] = [*self._binaries(length)]
        return values if valid is None else [value if there else None for value, there in zip(values, valid.tolist(), strict=True)]

    def lists(self) -> tuple[int, ...]:
        """A column of lists without nulls: row i has the elements from bound i to bound i + 1 of the next column."""
        return self._bounds(self._length())

    def structs(self) -> int:
        """A column of structs without nulls: how many there are; its fields are the next columns."""
        return self._length()

    def ints(self) -> Int32s:
        """A column of int32 without nulls, as an array."""
        return self._array(self._length(), np.int32)

    def floats(self) -> Float32s:
        """A column of float32 as an array; nulls are NaN."""
        length, valid = self._validity()
        values = self._array(length, np.float32)
        return values if valid is None else np.where(valid, values, np.float32("nan"))

    def bools(self) -> Bools:
        """A column of booleans without nulls, as an array."""
        return self._from_bits(self._length())

    def numbers_by_name(self) -> dict[str, float]:
        """One row of a map from strings to double."""
        low, high = self._entries()
        return dict(zip(self.texts()[low:high], self.doubles()[low:high], strict=True))

    def texts_by_name(self) -> dict[str, str]:
        """One row of a map from strings to strings."""
        low, high = self._entries()
        return dict(zip(self.texts()[low:high], self.texts()[low:high], strict=True))

    def skip(self, *, nodes: int, buffers: int) -> None:
        """Go past columns that are not wanted."""
        self._node += 2 * nodes
        self._buffer += 2 * buffers

    def _entries(self) -> tuple[int, ...]:
        bounds = self.lists()
        self.structs()
        return bounds

    def _numbers(self, code: str) -> tuple[Any, ...]:
        length = self._length()
        return numbers_of(code, length).unpack_from(self._body, self._start())

    def _numbers_or_none(self, code: str) -> list[Any]:
        length, valid = self._validity()
        values = numbers_of(code, length).unpack_from(self._body, self._start())
        return list(values) if valid is None else [value if there else None for value, there in zip(values, valid.tolist(), strict=True)]

    def _binaries(self, length: int) -> list[memoryview]:
        bounds, start, body = self._bounds(length), self._start(), self._body
        if length == 1:
            return [body[start + bounds[0] : start + bounds[1]]]
        return [body[start + low : start + high] for low, high in pairwise(bounds)]

    def _bounds(self, length: int) -> tuple[int, ...]:
        start = self._start()
        return numbers_of("i", length + 1).unpack_from(self._body, start) if length else (0,)

    def _length(self) -> int:
        """Go past the validity of a column that may not have nulls; how many rows it has."""
        node = self._node
        length, nulls = self._nodes[node], self._nodes[node + 1]
        if nulls:
            raise Unusable(f"{nulls} of {length} values are null where none may be", kind="undecodable")
        self._node = node + 2
        self._buffer += 2
        return length

    def _validity(self) -> tuple[int, Bools | None]:
        """How many rows the next column has and, where some are null, which are not."""
        node = self._node
        length, nulls = self._nodes[node], self._nodes[node + 1]
        self._node = node + 2
        if nulls:
            return length, self._from_bits(length)
        self._buffer += 2
        return length, None

    def _start(self) -> int:
        """Where the next buffer begins."""
        start = self._spans[self._buffer]
        self._buffer += 2
        return start

    def _array(self, length: int, kind: type[Number]) -> NDArray[Number]:
        start = self._start()
        # Even for no elements numpy wants to begin within the body.
        return np.frombuffer(self._body, kind, length, start) if length else np.empty(0, kind)

    def _from_bits(self, length: int) -> Bools:
        packed = self._array((length + 7) // 8, np.uint8)
        return np.unpackbits(packed, count=length, bitorder="little").view(np.bool_)


def rows(bounds: Sequence[int], values: Elements) -> list[Elements]:
    """The elements of each row of a list column.

    Example:
        rows((0, 2, 3), ["a", "b", "c"])  # -> [["a", "b"], ["c"]]
    """
    if len(bounds) == 2:
        return [values[bounds[0] : bounds[1]]]
    return [values[low:high] for low, high in pairwise(bounds)]


@lru_cache(maxsize=256)
def numbers_of(code: str, count: int) -> struct.Struct:
    """`count` little-endian numbers of one type."""
    return struct.Struct(f"<{count}{code}")


def _offsets(lengths: Sequence[int]) -> bytes:
    return numbers_of("i", len(lengths) + 1).pack(0, *accumulate(lengths))


def _bits(values: NDArray[Any]) -> bytes:
    return np.packbits(values, bitorder="little").tobytes()
