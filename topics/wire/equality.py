"""Equality of dataclasses with numpy arrays."""

import numpy as np


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
