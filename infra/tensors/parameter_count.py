"""Parameter count and vocabulary size of a model, from its configuration and file headers without reading weights."""

import json
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

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
    try:
        with safe_open(file, framework="np") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise PenstockError(f"{file} is not a safetensors file, or is truncated: copy it again") from error
