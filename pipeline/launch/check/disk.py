"""The bytes that a run leaves on the disk: published weights and checkpoints, from the sizes in the model's own files.

The rule: an upper bound from headers; no weight is read.
"""

import json
import math
import struct
from pathlib import Path

from penstock.infra.errors import PenstockError
from penstock.pipeline.config.load import Config

OPTIMIZER_BYTES = 12
"""A checkpoint holds a float32 master and two moments of each parameter."""
BYTES_OF = {"float32": 4, "bfloat16": 2}


def parameters(folder: Path) -> int | None:
    """Parameters in the model's safetensors files, by their headers; None without such a file."""
    files = sorted(folder.glob("*.safetensors"))
    return sum(map(_elements, files)) if files else None


def _elements(file: Path) -> int:
    with file.open("rb") as opened:
        try:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        except (struct.error, ValueError, MemoryError, OverflowError) as error:
            raise PenstockError(f"{file} is no safetensors file, or is cut off: copy it again") from error
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def kept_checkpoints(config: Config, *, steps: int) -> int:
    """Checkpoints that lie on the disk at the end of the run."""
    trainer = config.trainer
    if not trainer.checkpoint_every:
        return 0
    written = math.ceil(steps / trainer.checkpoint_every)
    newest = min(written, trainer.checkpoint_keep_last + 1)
    return newest + (steps // trainer.checkpoint_keep_every if trainer.checkpoint_keep_every else 0)


def needed_bytes(config: Config, *, count: int, steps: int, versions: int) -> tuple[int, int]:
    """Bytes of the log's weights and of the checkpoints, for a model of `count` parameters."""
    published = count * BYTES_OF[config.trainer.dtype] * (versions + 1)
    of_one = OPTIMIZER_BYTES + (BYTES_OF[config.trainer.dtype] if config.trainer.export else 0)
    return published, count * of_one * kept_checkpoints(config, steps=steps)
