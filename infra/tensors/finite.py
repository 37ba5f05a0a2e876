"""Detects weights that are not finite or too large, before they are published."""

from collections.abc import Iterable
from typing import Final

import numpy as np

from penstock.infra.tensors.stream import TensorBytes

LARGEST: Final = 1e18
"""Magnitude above which the square of an element overflows float32; NaN and infinity are above it too."""
_LIMITS: Final = {
    "float64": ("8", int(np.float64(LARGEST).view(np.int64))),
    "float32": ("4", int(np.float32(LARGEST).view(np.int32))),
    "bfloat16": ("2", int(np.float32(LARGEST).view(np.int32)) >> 16),
    "float16": ("2", 0x7BFF),
}
"""Dtype -> bytes of an element, and the bits of the largest valid one, as integers: the bits of positive floats sort like the floats."""


def broken_tensor(tensors: Iterable[TensorBytes]) -> str | None:
    """Name of the first tensor with an element that is not finite or above `LARGEST`, or None; makes no copy."""
    return next((tensor.name for tensor in tensors if _is_broken(tensor)), None)


def _is_broken(tensor: TensorBytes) -> bool:
    if tensor.dtype not in _LIMITS or not tensor.nbytes:
        return False
    size, limit = _LIMITS[tensor.dtype]
    sign = 1 << (8 * int(size) - 1)
    # Negative floats sort below the others as signed integers, and above them as unsigned ones.
    positive, any_sign = (int(np.frombuffer(tensor.data, f"<{kind}{size}").max()) for kind in "iu")
    return positive > limit or (any_sign >= sign and any_sign - sign > limit)
