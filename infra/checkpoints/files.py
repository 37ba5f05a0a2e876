"""Files of a checkpoint: flushed to disk, listed with their digests in a manifest, and verified against it."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.infra.errors import CheckpointError

MANIFEST = "manifest.json"


def sync_directory(directory: Path) -> None:
    """Flush every file below `directory`, and the directories, to the disk."""
    for path in [*sorted(directory.rglob("*")), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Flush one file, or the names in one directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(directory: Path) -> int:
    """List every file in `manifest.json`; returns their total size in bytes."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    entries = {file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
    (directory / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
    return sum(file.stat().st_size for file in [*files, directory / MANIFEST])


def check_file(name: str, file: Path, entry: Mapping[str, object]) -> None:
    """Raise `CheckpointError` unless a file has the size and SHA-256 of its manifest entry."""
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(f"{name} has {size} bytes, in its manifest {entry['bytes']}")
    if _sha256(file) != entry["sha256"]:
        raise CheckpointError(f"{name} is damaged: its SHA-256 is not the one in its manifest")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
