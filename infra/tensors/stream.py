"""Model weights as bytes: names, dtypes, shapes and one stream that can be cut anywhere.

The rule: a digest is of the tensors, never of how they were cut, and what does not fit its digest is not handed out.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 8 * 2**20  # half of the broker's record limit: a chunk always fits, whatever its headers

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Dtype name -> bytes an element takes on the wire, little-endian; bfloat16 is a name and raw bytes, so numpy need not know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """One tensor: row-major little-endian bytes with the dtype and shape that give them meaning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    @property
    def nbytes(self) -> int:
        """How many bytes `dtype` and `shape` call for."""
        return expected_nbytes(self.dtype, self.shape)


def expected_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; `ValueError` for an unknown dtype or a negative dimension."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown tensor dtype {dtype!r}: known are {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def digest(tensors: Iterable[TensorBytes]) -> str:
    """Hex SHA-256 over (name, dtype, shape, bytes) in name order: equal exactly when the weights are equal bit for bit."""
    sha = hashlib.sha256()
    for tensor in _in_name_order(tensors):
        shape = ",".join(map(str, tensor.shape))
        sha.update(f"{len(tensor.name)}:{tensor.name};{tensor.dtype};{shape};{tensor.nbytes};".encode())
        sha.update(tensor.data)
    return sha.hexdigest()


def split(tensors: Iterable[TensorBytes], *, max_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Cut the tensors' bytes, joined in name order, into chunks of `max_bytes` (the last one is shorter, none is empty)."""
    if max_bytes < 1:
        raise ValueError(f"a chunk needs at least one byte, not {max_bytes}")
    chunk = bytearray()
    for tensor in _in_name_order(tensors):
        data = memoryview(tensor.data).cast("B")
        start = 0
        while start < len(data):
            taken = data[start : start + max_bytes - len(chunk)]
            chunk += taken
            start += len(taken)
            if len(chunk) == max_bytes:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)


def join(
    chunks: Iterable[bytes | memoryview],
    *,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    expected_digest: str | None = None,
) -> list[TensorBytes]:
    """Put the tensors of a manifest together again, in name order.

    `names[i]` has `dtypes[i]` and `shapes[i]`, in any order; the chunks are those of `split`, in order.
    Raises `ValueError` when sizes or the digest do not fit, so nobody ever sees half a version.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"a manifest with {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
    stream = memoryview(b"".join(chunks))
    fields = sorted(zip(names, dtypes, (tuple(map(int, shape)) for shape in shapes), strict=True))
    sizes = [expected_nbytes(dtype, shape) for _, dtype, shape in fields]
    if sum(sizes) != len(stream):
        raise ValueError(f"the chunks hold {len(stream)} bytes where the manifest's tensors take {sum(sizes)}")
    tensors, start = [], 0
    for (name, dtype, shape), size in zip(fields, sizes, strict=True):
        tensors.append(TensorBytes(name=name, dtype=dtype, shape=shape, data=stream[start : start + size]))
        start += size
    if expected_digest is not None and (found := digest(tensors)) != expected_digest:
        raise ValueError(f"the weights' digest is {found}, the manifest says {expected_digest}")
    return tensors


def _in_name_order(tensors: Iterable[TensorBytes]) -> list[TensorBytes]:
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"two tensors are named {after.name!r}")
    for tensor in ordered:
        held = memoryview(tensor.data).nbytes
        if held != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {held} bytes where {tensor.dtype}{list(tensor.shape)} takes {tensor.nbytes}")
    return ordered
