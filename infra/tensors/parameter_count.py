"""Parameter count and vocabulary size of a model, from its configuration and file headers without reading weights."""

import json
import math
import struct
from pathlib import Path

from penstock.infra.errors import PenstockError


def parameters(folder: Path) -> int | None:
    """Return the number of parameters in a model's safetensors files; None without any. Raises `PenstockError` for a damaged one."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_elements, files)) if files else None


def vocabulary(folder: Path) -> int | None:
    """Return the rows of the model's embedding according to `config.json`; None if they are not stated there."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _elements(file: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file, from its header. Raises `PenstockError` if it is damaged."""
    damaged = PenstockError(f"{file} is not a safetensors file, or is truncated: copy it again")
    with file.open("rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((entry["data_offsets"][1] for entry in tensors), default=0)
            count = sum(math.prod(entry["shape"]) for entry in tensors)
        except (struct.error, ValueError, MemoryError, OverflowError, AttributeError, TypeError, LookupError) as error:
            raise damaged from error
    if file.stat().st_size < 8 + length + end:
        raise damaged
    return count
