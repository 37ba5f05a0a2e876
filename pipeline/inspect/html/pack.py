"""Packs columns of numbers: byte planes, deflate, base64. Only columns with a stated step are rounded."""

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pipeline.inspect.report.summary import finite

LOGPROB_STEP = 0.001
"""[nat] Behaviour logprobs are rounded to multiples of this; the lowest is -65.534."""
NO_LOGPROB = 0xFFFF
Column = npt.NDArray[Any]


def pack(facts: Mapping[str, Any], columns: Mapping[str, Column] | None = None) -> str:
    """Facts and numeric columns [N] as base64: a length, JSON with null for numbers that are not finite, then the columns' byte planes."""
    arrays = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in (columns or {}).items()}
    layout = [[name, f"{array.dtype.kind}{array.dtype.itemsize}", len(array)] for name, array in arrays.items()]
    header = json.dumps({"facts": finite(facts), "columns": layout}, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    head = header.encode("utf-8", "replace")
    return deflated(b"".join([struct.pack("<I", len(head)), head, *map(_planes, arrays.values())]))


def deflated(raw: bytes) -> str:
    """Base64 of a zlib stream, which browsers call `deflate`."""
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def logprobs(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint16]:
    """Logprobs [N] in steps of `LOGPROB_STEP` below zero; `NO_LOGPROB` for NaN.

    Example:
        logprobs(np.array([0.0, -0.6931, np.nan]))  # -> [0, 693, 65535]
    """
    missing = np.isnan(values)
    steps = np.clip(np.rint(np.where(missing, 0.0, -values) / LOGPROB_STEP), 0, NO_LOGPROB - 1)
    return np.where(missing, NO_LOGPROB, steps).astype(np.uint16)


def smallest(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Non-negative numbers as uint16 if all of them fit, otherwise as uint32."""
    return values.astype(np.uint16 if not len(values) or int(values.max()) < 1 << 16 else np.uint32)


def _planes(array: Column) -> bytes:
    """First bytes of all numbers, then their second bytes, and so on: high bytes hardly differ, which compresses well."""
    return array.view(np.uint8).reshape(len(array), array.dtype.itemsize).T.tobytes()
