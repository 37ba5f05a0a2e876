"""Arrow arrays from numpy's and from Python's values, and runs of values of different lengths.

The rule: buffers are put together here; `pyarrow.array` looks at its first argument with pandas, whose import takes half a second.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Numbers, texts, bytes, or lists of structs of these (as dicts), each of which may be None."""
    there = np.array([value is not None for value in values], np.bool_)
    if pa.types.is_list(kind):
        items = [item for value in values for item in value or ()]
        fields = [array([item[field.name] for item in items], field.type) for field in kind.value_type]
        structs = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
        sizes = np.array([len(value or ()) for value in values], np.int64)
        return pa.Array.from_buffers(kind, len(values), [_validity(there), pa.py_buffer(bounds(sizes))], children=[structs])
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        encoded = [(value.encode() if isinstance(value, str) else value) or b"" for value in values]
        sizes = np.array([len(value) for value in encoded], np.int64)
        return texts(np.frombuffer(b"".join(encoded), np.uint8), sizes, kind, there=there)
    number = f"{'f' if pa.types.is_floating(kind) else 'i'}{kind.bit_width // 8}"
    return fixed(np.array([0 if value is None else value for value in values], number), kind, there=there)


def fixed(values: NDArray[Any], kind: pa.DataType, *, there: Flags | None = None) -> pa.Array:
    """Numbers or times as they lie in memory, or booleans; null where `there` is not."""
    held = np.packbits(values, bitorder="little") if pa.types.is_boolean(kind) else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [_validity(there), pa.py_buffer(held)])


def texts(octets: NDArray[np.uint8], sizes: Ints, kind: pa.DataType, *, there: Flags | None = None) -> pa.Array:
    """Texts or bytes that lie one after the other."""
    return pa.Array.from_buffers(kind, len(sizes), [_validity(there), pa.py_buffer(bounds(sizes)), pa.py_buffer(octets)])


def lists(values: pa.Array, lengths: Ints) -> pa.Array:
    """Lists of values that lie one after the other."""
    return pa.Array.from_buffers(pa.list_(values.type), len(lengths), [None, pa.py_buffer(bounds(lengths))], children=[values])


def _validity(there: Flags | None) -> pa.Buffer | None:
    return None if there is None or there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))


def bounds(lengths: Ints) -> NDArray[np.int32]:
    """Where each run begins, and the end of the last."""
    found = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=found[1:])
    return found


def runs(values: NDArray[Any], begins: Ints, counts: Ints) -> NDArray[Any]:
    """`counts` values from each of `begins` on, one run after the other."""
    return values[places(begins, counts)]


def places(begins: Ints, counts: Ints) -> Ints:
    """The indices of these runs."""
    ends = np.cumsum(counts)
    found: Ints = np.repeat(begins - ends + counts, counts)
    found += np.arange(len(found))
    return found


def any_of(flags: Flags, lengths: Ints) -> Flags:
    """Whether any flag of each run is set."""
    if not flags.any():
        return np.zeros(len(lengths), np.bool_)
    total = np.concatenate([[0], np.cumsum(flags)])
    last = np.cumsum(lengths)
    found: Flags = total[last] > total[last - lengths]
    return found
