"""The number of a model's parameters and tokens, by its configuration and the headers of its files: no weight is read."""

import json
import math
import struct
from pathlib import Path

from penstock.infra.errors import PenstockError


def parameters(folder: Path) -> int | None:
    """Parameters in the model's safetensors files, by their headers; None without such a file."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_elements, files)) if files else None


def vocabulary(folder: Path) -> int | None:
    """Rows of the model's embedding, by its `config.json`; None if that does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _elements(file: Path) -> int:
    damaged = PenstockError(f"{file} is no safetensors file, or is cut off: copy it again")
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
