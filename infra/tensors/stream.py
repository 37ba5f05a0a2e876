"""Model weights as bytes with names, dtypes and shapes, and their digest.

A digest depends on the tensors, not on how they are divided into chunks; it names its hash function unless that is SHA-256.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blake3 import blake3

Hash = Literal["blake3", "sha256"]
"""BLAKE3 hashes 1 KiB blocks in parallel, on all cores (AVX-512: four times as fast as SHA-256 in hardware on one core)."""
HASH: Hash = "blake3"
"""Hash function of new runs; a run never changes its hash function."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Dtype name -> bytes of an element on the wire, little-endian; bfloat16, which numpy lacks, is handled as raw bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """One tensor: row-major little-endian bytes with dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes

    @property
    def nbytes(self) -> int:
        """Size in bytes according to `dtype` and `shape`."""
        return expected_nbytes(self.dtype, self.shape)


def expected_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor in bytes. Raises `ValueError` for an unknown dtype or a negative dimension."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown tensor dtype {dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def digest(tensors: Iterable[TensorBytes], hash_name: Hash = HASH) -> str:
    """Hash in hex over (name, dtype, shape, bytes) in name order: equal exactly if the weights are equal bit for bit.

    Example:
        digest([], "sha256")  # -> "e3b0c442…"
        digest([])            # -> "blake3:af1349b9…"
    """
    hasher: Any = hashlib.sha256() if hash_name == "sha256" else blake3(max_threads=blake3.AUTO)
    for tensor in _in_name_order(tensors):
        shape = ",".join(map(str, tensor.shape))
        hasher.update(f"{len(tensor.name)}:{tensor.name};{tensor.dtype};{shape};{tensor.nbytes};".encode())
        hasher.update(tensor.data)
    return hasher.hexdigest() if hash_name == "sha256" else f"{hash_name}:{hasher.hexdigest()}"


def hash_of(recorded: str) -> Hash:
    """The hash function of a recorded digest.

    Example:
        hash_of("blake3:af13…")  # -> "blake3"
        hash_of("e3b0…")         # -> "sha256"
    """
    return "blake3" if recorded.startswith("blake3:") else "sha256"


def _in_name_order(tensors: Iterable[TensorBytes]) -> list[TensorBytes]:
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"two tensors are named {after.name!r}")
    for tensor in ordered:
        size = memoryview(tensor.data).nbytes
        if size != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {size} bytes, expected {tensor.nbytes} of {tensor.dtype}{list(tensor.shape)}")
    return ordered
