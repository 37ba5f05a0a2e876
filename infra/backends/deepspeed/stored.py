"""Reads the files of a DeepSpeed checkpoint without executing code: tensors, plain values and the three classes that ZeRO stores.

Files and folders that belong to other users, or that others may write, are rejected.
"""

import os
from pathlib import Path
from typing import Any

import torch

from penstock.infra.errors import BackendError

OTHERS_WRITE = 0o022


def read(file: Path) -> Any:
    """The content of a file, mapped into memory. Raises `BackendError` if it names other classes or other users may write it."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    for path in (file.parent, file):
        _check_owner(path)
    stored = (LossScaler, ZeroStageEnum, fragment_address)
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in stored}
    if foreign := sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - names):
        raise BackendError(f"{file} is not loaded: it names {foreign[0]}, which DeepSpeed does not store")
    with torch.serialization.safe_globals(list(stored)):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def check(directory: Path) -> None:
    """Raise `BackendError` unless `read` accepts each file of a checkpoint, which DeepSpeed will unpickle."""
    for file in sorted(directory.rglob("*.pt")):
        read(file)


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise BackendError(f"{path} belongs to another user: copy the checkpoint to a folder of your own")
    if status.st_mode & OTHERS_WRITE:
        raise BackendError(f"{path} can be written by other users: chmod -R go-w {path.parent}")
