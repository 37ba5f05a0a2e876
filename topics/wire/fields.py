"""Record dataclasses: their columns, not nullable by default, and equality by value if they hold numpy arrays."""

import types
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

from penstock.topics.wire.columns import Bools, Float32s, Int32s


def column(name: str, kind: pa.DataType, *, nullable: bool = False) -> pa.Field:
    """Return a field of a schema or struct, not nullable by default."""
    return pa.field(name, kind, nullable=nullable)


def list_of(kind: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    """Return the type of lists with elements of `kind`, which may be null if `nullable`."""
    return pa.list_(pa.field("item", kind, nullable=nullable))


def fields_of(record: type, **kinds: pa.DataType) -> tuple[pa.Field, ...]:
    """Return a column for each field of a dataclass, in order; `kinds` has types by field where the annotation does not determine them."""
    return tuple(
        column(name, kinds.get(name) or _arrow(hint), nullable=type(None) in get_args(hint))
        for name, hint in get_type_hints(record).items()
    )


_ARROW: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    Int32s: list_of(pa.int32()),
    Float32s: list_of(pa.float32()),
    Bools: list_of(pa.bool_()),
}


def _arrow(hint: Any) -> pa.DataType:
    """Return the Arrow type of an annotation. Raises `KeyError` for one that has none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _arrow(inner[0])
    if origin is Literal:
        return pa.string()
    if origin is tuple and inner[1:] == (...,):
        return list_of(_arrow(inner[0]), nullable=type(None) in get_args(inner[0]))
    if origin is dict:
        return pa.map_(pa.string(), column("value", _arrow(inner[1])))
    return pa.struct(fields_of(hint)) if isinstance(hint, type) and is_dataclass(hint) else _ARROW[hint]


class ByValue:
    """Base of dataclasses with numpy arrays: equal if class, fields, element types and values are equal; NaN equals NaN."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        fields: tuple[str, ...] = tuple(self.__dataclass_fields__)  # type: ignore[attr-defined]
        return all(_same(getattr(self, field), getattr(other, field)) for field in fields)


def _same(left: object, right: object) -> bool:
    if not isinstance(left, np.ndarray) or not isinstance(right, np.ndarray):
        return left == right
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
