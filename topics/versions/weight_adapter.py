"""Versions as low-rank changes of version 0: two small matrices for each adapted tensor (LoRA, arXiv 2106.09685).

A version's bytes are its tensors' joined in name order. A block turns one tensor into `W + scale * B A`; all others are as in version 0.
A merge gives the same bits on every machine, because the sums in `B A` are exact.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

DTYPES = ("float32", "bfloat16", "float16")
"""Element types that can be merged; a block has an index into these."""
EXACT_BITS = 53
"""Mantissa of a float64: integers up to 2 to this power, and sums of them, are exact."""

_HEADER = struct.Struct("<QIIIBd")
_PRODUCTS = 1 << 18
"""Products of one multiplication: they fit into a processor's cache, and OpenBLAS uses one thread for so few. Several threads would wait
for each other at every call, on busy cores a hundred times as long as the work takes."""
_COLUMNS = 1 << 10

Buffer = memoryview | bytes | bytearray
Matrix = npt.NDArray[np.float32]


class Block(NamedTuple):
    """The header of a block, followed by A, then B, row-major float32."""

    start: int
    """First byte of the tensor in the version."""
    rows: int
    columns: int
    """The tensor has `rows` x `columns` elements, A `rank` x `columns`, B `rows` x `rank`."""
    rank: int
    dtype: int
    """Index of the element type in `DTYPES`."""
    scale: float

    @property
    def nbytes(self) -> int:
        """Size in bytes of the tensor that the block changes."""
        return self.rows * self.columns * _stored(DTYPES[self.dtype]).itemsize

    @property
    def body(self) -> int:
        """Number of bytes of A and B after the header."""
        return 4 * self.rank * (self.rows + self.columns)


def encode(a: Matrix, b: Matrix, *, start: int, dtype: str, scale: float) -> list[Any]:
    """Return a block that changes a tensor [rows, columns] by A [rank, columns] and B [rows, rank], as buffers to be joined."""
    block = Block(start, len(b), a.shape[1], len(a), DTYPES.index(dtype), scale)
    return [_HEADER.pack(*block), np.ascontiguousarray(a, "<f4"), np.ascontiguousarray(b, "<f4")]


def apply(stream: Buffer, below: memoryview, target: memoryview) -> None:
    """Write the version that `stream` encodes to `target`; `below` contains version 0 and may be `target` itself.

    Raises `ValueError`, with nothing overwritten, for a stream whose blocks do not match or lie outside of `target`.
    """
    if len(below) != len(target):
        raise ValueError(f"LoRA adapters of a version of {len(target)} bytes cannot be applied to a base version of {len(below)} bytes")
    blocks, end = list(read(stream, size=len(target))), 0
    for block, a, b in blocks:
        piece = slice(block.start, block.start + block.nbytes)
        _copy(below[end : block.start], target[end : block.start])
        merge(below[piece], target[piece], a, b, dtype=DTYPES[block.dtype], scale=block.scale)
        end = piece.stop
    _copy(below[end:], target[end:])


def read(stream: Buffer, *, size: int) -> Iterator[tuple[Block, Matrix, Matrix]]:
    """Yield each block of a stream for a version of `size` bytes, with A and B. Raises `ValueError` for a malformed stream."""
    view, at, end = memoryview(stream).cast("B"), 0, 0
    while at < len(view):
        if len(view) - at < _HEADER.size:
            raise ValueError(f"the LoRA adapters ({len(view)} bytes) are truncated within the block header at byte {at}")
        block = Block(*_HEADER.unpack_from(view, at))
        at += _HEADER.size
        if problem := _flaw(block, left=len(view) - at, after=end, size=size):
            raise ValueError(f"LoRA adapter block at byte {at - _HEADER.size}: {problem}")
        factors = np.frombuffer(view[at : at + block.body], "<f4")
        if not np.isfinite(factors).all():
            raise ValueError(f"LoRA adapter block at byte {at - _HEADER.size} contains NaN or infinity")
        a, b = np.split(factors, [block.rank * block.columns])
        yield block, a.reshape(block.rank, block.columns), b.reshape(block.rows, block.rank)
        at, end = at + block.body, block.start + block.nbytes


def merge(below: Buffer, target: memoryview, a: Matrix, b: Matrix, *, dtype: str, scale: float) -> None:
    """Write `W + scale * B A`, rounded to float32 and then to `dtype`; W are the elements of `below`, which may be `target`.

    A's columns and B's rows are first rounded to so few bits below their largest element that every sum of their products is exact in
    float64: then the order of additions, and so threads and BLAS, cannot change the result. A tensor whose B is zero stays unchanged.
    """
    if not b.any():
        _copy(below, target)
        return
    bits = (EXACT_BITS - (len(a) - 1).bit_length()) // 2
    left, right = _on_grid(b, axis=1, bits=bits), _on_grid(a, axis=0, bits=bits)
    shape = len(b), a.shape[1]
    old, new = (np.frombuffer(buffer, _stored(dtype)).reshape(shape) for buffer in (below, target))
    with np.errstate(over="ignore", invalid="ignore"):  # the version's digest detects non-finite values
        for rows, columns in _tiles(shape, len(a)):
            added = np.matmul(left[rows], right[:, columns])
            added *= scale
            added += _floats(old[rows, columns], dtype)
            new[rows, columns] = _rounded(added.astype(np.float32), dtype)


def _tiles(shape: tuple[int, int], rank: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of each tile of a product that is computed at once."""
    wide = min(shape[1], _COLUMNS, max(1, _PRODUCTS // rank))
    high = max(1, _PRODUCTS // (rank * wide))
    for left in range(0, shape[1], wide):
        yield from ((slice(top, top + high), slice(left, left + wide)) for top in range(0, shape[0], high))


def _on_grid(values: Matrix, *, axis: int, bits: int) -> npt.NDArray[np.float64]:
    """Round values to multiples, of at most 2 to the `bits`, of one power of two along an axis."""
    wide = values.astype(np.float64)
    _, exponent = np.frexp(np.abs(wide).max(axis=axis, keepdims=True))
    unit = np.ldexp(1.0, exponent - bits)
    on_grid: npt.NDArray[np.float64] = np.rint(wide / unit) * unit
    return on_grid


def _floats(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else stored


def _rounded(values: Matrix, dtype: str) -> npt.NDArray[Any]:
    """Return the nearest numbers of a type, ties to even, in stored form."""
    if dtype != "bfloat16":
        return values.astype(_stored(dtype))
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _stored(dtype: str) -> np.dtype[Any]:
    """The numpy type of stored elements; numpy has no bfloat16."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")


def _copy(source: Buffer, target: memoryview) -> None:
    if len(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _flaw(block: Block, *, left: int, after: int, size: int) -> str | None:
    """Return why a block with `left` bytes after its header cannot follow one that ends at `after` in `size` bytes; None if it can."""
    if block.dtype >= len(DTYPES) or not np.isfinite(block.scale):
        return f"element type {block.dtype} or scale {block.scale} is not supported"
    if 0 in (block.rows, block.columns, block.rank):
        return f"a matrix of {block.rows} x {block.columns} cannot have rank {block.rank}"
    if block.start < after or block.start + block.nbytes > size:
        return f"bytes {block.start} to {block.start + block.nbytes} are outside the remaining bytes {after} to {size} of the version"
    if block.body > left:
        return f"the block needs {block.body} bytes, but only {left} remain"
    return None
