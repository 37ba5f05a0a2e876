"""Columns of a schema: Python and numpy values as Arrow arrays, and back.

In memory, lists of int32, float and bool are numpy arrays, other lists tuples, structs and maps dicts. Buffers are laid out here because
`pyarrow.array` and `Array.to_numpy` import pandas, which slows the start of every worker.
Layouts: https://arrow.apache.org/docs/format/Columnar.html"""

from array import array as machine_array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Payload = bytes | memoryview
Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

Row = dict[str, Any]
_ARRAYS: dict[pa.DataType, type[np.generic]] = {pa.int32(): np.int32, pa.float32(): np.float32, pa.bool_(): np.bool_}
_NUMBERS: dict[pa.DataType, str] = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


class Column:
    """A column of a schema, a field of a struct or the elements of a list. Base class; itself for strings."""

    blank: Any = ""
    """The value in the buffers under a null; structs and maps have no nulls."""

    def __init__(self, field: pa.Field) -> None:
        self.name: str = field.name
        self.type: pa.DataType = field.type
        self.nullable: bool = field.nullable

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        """Convert one value per row to an array; `None` is null. Raises `ValueError` for a null in a column without nulls."""
        validity, nulls = None, sum(value is None for value in values)
        if nulls:
            if not self.nullable:
                raise ValueError(f"{self.name!r} may not be null")
            if nulls == len(values):
                return pa.nulls(nulls, self.type)
            validity = _bits([value is not None for value in values])
            values = [self.blank if value is None else value for value in values]
        buffers, children = self._layout(values)
        return pa.Array.from_buffers(self.type, len(values), [validity, *buffers], nulls, 0, children)

    def from_arrow(self, array: pa.Array, *, path: str) -> Sequence[Any]:
        """Return the values of a validated array, None for null. Raises `ValueError`, naming `path`, for another type or a forbidden null.

        Byte strings and numpy arrays are read-only views of the array, except bool and nulls as NaN. A struct may lack nullable fields,
        which read as `None`, and may have unknown nullable ones, which are ignored.
        """
        nulls = array.null_count
        if nulls:
            if not self.nullable:
                raise ValueError(f"{nulls} of {len(array)} values of {path} are null, which is not allowed")
            if nulls == len(array):
                return [None] * nulls
        if array.type != self.type and not self._takes(array.type):
            raise ValueError(f"column {path} is {str(array.type)[:100]}, expected {str(self.type)[:100]}")
        values = self._values(array, path)
        if not nulls:
            return values
        return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]

    def _layout(self, values: Sequence[Any]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        """Return the buffers, except the validity bitmap, and the child arrays of an array of values without `None`."""
        data = [value.encode() for value in values]
        return [_offsets(data), pa.py_buffer(b"".join(data))], []

    def _values(self, array: pa.Array, path: str) -> Sequence[Any]:
        """Return the values of an array whose type `_takes` accepts; any value where it is null."""
        return array.to_pylist()  # type: ignore[no-any-return]

    def _takes(self, kind: pa.DataType) -> bool:
        """Return True if the column can read arrays of type `kind`, which differs from the column's own."""
        return False


class Binaries(Column):
    """Byte strings, read as `memoryview`s of the payload."""

    blank = b""

    def _layout(self, values: Sequence[Any]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        return [_offsets(values), pa.py_buffer(values[0] if len(values) == 1 else b"".join(values))], []

    def _values(self, array: pa.Array, path: str) -> Sequence[Any]:
        """Return views of the array's bytes, without a copy."""
        if not len(array):
            return []  # its buffers may be absent
        _, offsets, data = array.buffers()
        view = memoryview(data).cast("B") if data else memoryview(b"")
        bounds = np.frombuffer(offsets, np.int32, array.offset + len(array) + 1)[array.offset :].tolist()
        return [view[low:high] for low, high in pairwise(bounds)]


class Numbers(Column):
    """Numbers of type int32, int64 or double."""

    blank = 0

    def _layout(self, values: Sequence[Any]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        return [pa.py_buffer(machine_array(_NUMBERS[self.type], values))], []


class Structs(Column):
    """Structs as dicts by field name."""

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self.fields = columns_of(field.type)

    def _layout(self, values: Sequence[Row]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        return [], [field.to_arrow([value.get(field.name) for value in values]) for field in self.fields]

    def _values(self, array: pa.Array, path: str) -> Sequence[Any]:
        arrays = [array.field(index) for index in range(len(array.type))]
        return read_rows(self.fields, list(array.type), arrays, rows=len(array), path=f"{path}.")

    def _takes(self, kind: pa.DataType) -> bool:
        return pa.types.is_struct(kind)


class Lists(Column):
    """Lists, read as tuples."""

    blank = ()

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self.item = column_of(field.type.value_field)

    def _layout(self, values: Sequence[Any]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        return [_offsets(values)], [self._joined(values)]

    def _values(self, array: pa.Array, path: str) -> Sequence[Any]:
        elements = self._elements(array.values, path)
        return [elements[low:high] for low, high in _bounds(array)]

    def _takes(self, kind: pa.DataType) -> bool:
        return pa.types.is_list(kind)

    def _joined(self, values: Sequence[Any]) -> pa.Array:
        return self.item.to_arrow(list(chain.from_iterable(values)))

    def _elements(self, array: pa.Array, path: str) -> Any:
        return tuple(self.item.from_arrow(array, path=path))


class Arrays(Lists):
    """Lists of int32, float or bool, numpy arrays in memory; nulls, which only float may have, are NaN."""

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self.dtype = _ARRAYS[self.item.type]

    def _joined(self, values: Sequence[Any]) -> pa.Array:
        """Return the elements of all lists as one array, in which NaN becomes null if nulls are allowed."""
        arrays = [np.asarray(value, self.dtype) for value in values]
        joined: NDArray[Any] = np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate([np.empty(0, self.dtype), *arrays])
        missing = np.isnan(joined) if self.item.nullable else np.empty(0, np.bool_)
        nulls = int(np.count_nonzero(missing))
        buffers = [_bits(~missing) if nulls else None, _bits(joined) if self.dtype is np.bool_ else pa.py_buffer(joined)]
        return pa.Array.from_buffers(self.item.type, len(joined), buffers, nulls, 0)

    def _elements(self, array: pa.Array, path: str) -> Any:
        """Return the elements of all lists in one numpy array, if possible a view; nulls are NaN."""
        size, nulls = len(array), array.null_count
        if not size or array.type != self.item.type or (nulls and not self.item.nullable):
            self.item.from_arrow(array, path=path)
            return np.empty(0, self.dtype)
        data, end = array.buffers()[1], array.offset + size
        if self.dtype is np.bool_:
            return np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")[array.offset :].view(np.bool_)
        values = np.frombuffer(data, self.dtype, end)[array.offset :]
        return np.where(array.is_valid().to_pylist(), values, self.dtype("nan")) if nulls else values


class Maps(Column):
    """Maps from strings as dicts."""

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        kind = field.type
        self.entries = Structs(pa.field("entries", pa.struct([kind.key_field, kind.item_field]), nullable=False))

    def _layout(self, values: Sequence[Any]) -> tuple[list[pa.Buffer], list[pa.Array]]:
        key, item = self.entries.fields
        pairs = [{key.name: name, item.name: value} for row in values for name, value in row.items()]
        return [_offsets(values)], [self.entries.to_arrow(pairs)]

    def _values(self, array: pa.Array, path: str) -> Sequence[Any]:
        key, item = self.entries.fields
        pairs = list(zip(key.from_arrow(array.keys, path=path), item.from_arrow(array.items, path=path), strict=True))
        return [dict(pairs[low:high]) for low, high in _bounds(array)]

    def _takes(self, kind: pa.DataType) -> bool:
        return pa.types.is_map(kind)


class Reserved(Column):
    """A struct or map for later releases: this release writes null and does not read its values."""

    def to_arrow(self, values: Sequence[Any]) -> pa.Array:
        assert not any(value is not None for value in values), self.name
        return pa.nulls(len(values), self.type)

    def from_arrow(self, array: pa.Array, *, path: str) -> Sequence[Any]:
        """`None` for each row: unused nested values could take many times the memory of the payload."""
        return [None] * len(array)


def column_of(field: pa.Field) -> Column:
    """Return the column that writes and reads the values of a schema's field."""
    kind = field.type
    if field.nullable and pa.types.is_nested(kind) and not pa.types.is_list(kind):
        return Reserved(field)
    if pa.types.is_list(kind):
        return (Arrays if kind.value_type in _ARRAYS else Lists)(field)
    if pa.types.is_struct(kind):
        return Structs(field)
    if pa.types.is_map(kind):
        return Maps(field)
    if pa.types.is_binary(kind):
        return Binaries(field)
    return (Column if pa.types.is_string(kind) else Numbers)(field)


def columns_of(fields: Iterable[pa.Field]) -> tuple[Column, ...]:
    """Return the columns of the fields of a schema or struct."""
    return tuple(map(column_of, fields))


def read_rows(columns: Sequence[Column], fields: Sequence[pa.Field], arrays: Sequence[pa.Array], *, rows: int, path: str = "") -> list[Row]:
    """Return the rows, as dicts by column name, of `arrays` with the schema `fields`. Raises `ValueError`, as `Column.from_arrow` does.

    Missing nullable columns read as `None`; unknown nullable fields are ignored.
    """
    present = {field.name: array for field, array in zip(fields, arrays, strict=True)}
    if len(present) != len(fields):
        raise ValueError("two columns have the same name")
    names = {column.name for column in columns}
    for field in fields:
        if field.name not in names and not field.nullable:
            raise ValueError(f"unknown column {path}{field.name!r} may not be null, so it cannot be ignored")
    values = []
    for column in columns:
        array = present.get(column.name)
        if array is None and not column.nullable:
            raise ValueError(f"column {path}{column.name!r} is missing")
        values.append([None] * rows if array is None else column.from_arrow(array, path=f"{path}{column.name!r}"))
    keys = [column.name for column in columns]
    return [dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True)]


def as_row(record: Any) -> Row:
    """Return the fields of a dataclass by name, without copying their values."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _bounds(array: pa.Array) -> Iterable[tuple[int, int]]:
    return pairwise(array.offsets.to_pylist()) if len(array) else ()


def _offsets(values: Sequence[Any]) -> pa.Buffer:
    return pa.py_buffer(machine_array("i", (0, *accumulate(map(len, values)))))


def _bits(values: Any) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
