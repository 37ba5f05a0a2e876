"""Model weights as bytes with names, dtypes and shapes, and their digest.

A digest depends on the tensors, not on how they are divided into chunks; it names its hash function unless that is SHA-256.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
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
LARGEST: Final = 1e18
"""Magnitude above which the square of an element overflows float32; NaN and infinity are above it too."""
_LIMITS: Final = {
    "float64": ("8", int(np.float64(LARGEST).view(np.int64))),
    "float32": ("4", int(np.float32(LARGEST).view(np.int32))),
    "bfloat16": ("2", int(np.float32(LARGEST).view(np.int32)) >> 16),
    "float16": ("2", 0x7BFF),
}
"""Dtype -> bytes of an element, and the bits of the largest valid one, as integers: the bits of positive floats sort like the floats."""

_CACHED_BYTES: Final = 1 << 18
"""Bytes that are read twice: a core's cache has them the second time."""


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
    """Return the size of a tensor in bytes. Raises `ValueError` for an unknown dtype or a negative dimension."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown tensor dtype {dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
    if any(size < 0 for size in shape):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def digest(tensors: Iterable[TensorBytes], hash_name: Hash = HASH) -> str:
    """Return a hash in hex over (name, dtype, shape, bytes) in name order: equal exactly if the weights are equal bit for bit.

    Example:
        digest([], "sha256")  # -> "e3b0c442…"
        digest([])            # -> "blake3:af1349b9…"
    """
    hasher = Hasher(hash_name)
    for tensor in in_name_order(tensors):
        hasher.start(tensor)
        hasher.update(tensor.data)
    return hasher.digest()


class Hasher:
    """The digest of tensors whose bytes come in pieces, in name order."""

    def __init__(self, hash_name: Hash = HASH) -> None:
        self._name, self._hash = hash_name, hashlib.sha256() if hash_name == "sha256" else blake3(max_threads=blake3.AUTO)

    def start(self, tensor: TensorBytes) -> None:
        """Continue with this tensor, all of whose bytes follow."""
        shape = ",".join(map(str, tensor.shape))
        self._hash.update(f"{len(tensor.name)}:{tensor.name};{tensor.dtype};{shape};{tensor.nbytes};".encode())

    def update(self, data: memoryview | bytes) -> None:
        self._hash.update(data)

    def digest(self) -> str:
        return self._hash.hexdigest() if self._name == "sha256" else f"{self._name}:{self._hash.hexdigest()}"


def hash_of(recorded: str) -> Hash:
    """Return the hash function that computed a recorded digest."""
    return "blake3" if recorded.startswith("blake3:") else "sha256"


def broken_tensor(tensors: Iterable[TensorBytes]) -> str | None:
    """Return the name of the first tensor with an element that is not finite or above `LARGEST`, or None; makes no copy."""
    return next((tensor.name for tensor in tensors if _is_broken(tensor)), None)


def _is_broken(tensor: TensorBytes) -> bool:
    """Return True if a tensor has an element that is not finite or above `LARGEST`."""
    if tensor.dtype not in _LIMITS or not tensor.nbytes:
        return False
    size, limit = _LIMITS[tensor.dtype]
    sign, data = 1 << (8 * int(size) - 1), memoryview(tensor.data).cast("B")
    for start in range(0, len(data), _CACHED_BYTES):
        piece = data[start : start + _CACHED_BYTES]
        # Negative floats sort below the others as signed integers, and above them as unsigned ones.
        positive, any_sign = (int(np.frombuffer(piece, f"<{kind}{size}").max()) for kind in "iu")
        if positive > limit or (any_sign >= sign and any_sign - sign > limit):
            return True
    return False


def in_name_order(tensors: Iterable[TensorBytes]) -> list[TensorBytes]:
    """Return the tensors by name. Raises `ValueError` for two of one name, and for one with too few or too many bytes."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"two tensors are named {after.name!r}")
    for tensor in ordered:
        size = memoryview(tensor.data).nbytes
        if size != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {size} bytes, expected {tensor.nbytes} of {tensor.dtype}{list(tensor.shape)}")
    return ordered
