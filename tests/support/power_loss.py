"""Power loss, imitated: a broker whose disk keeps only what it was told to keep.

The rule: after `cut` every file has the size it had when it was last synced, files that never were are gone, and so is whatever was
only written through memory; names are as they were (ext4 syncs a new file together with its name).
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.own_broker import OwnBroker

SOURCE = Path(__file__).with_name("synced.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_MAPPED = (".index", ".timeindex")
"""Kafka writes these through memory."""


class PowerBroker(OwnBroker):
    """A broker in `home` whose power can be cut."""

    def __init__(self, home: Path, scratch: Path) -> None:
        assert COMPILER is not None
        super().__init__(home)
        self._notes, self._library = scratch / "synced", scratch / "synced.so"
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE), "-ldl"], check=True)

    @property
    def data(self) -> Path:
        """The broker's storage."""
        return self.home / "broker" / "data"

    def start(self) -> str:
        """Start it with the library that notes what was synced, and return its address."""
        with _environment(LD_PRELOAD=str(self._library), PENSTOCK_SYNCED=str(self._notes)):
            return super().start()

    def cut(self) -> dict[str, int]:
        """Take from the disk what was never synced, after `kill`; returns bytes taken by kind of file."""
        synced: dict[tuple[int, int], int] = {}
        for line in self._notes.read_text().splitlines():
            device, inode, size = map(int, line.split())
            synced[device, inode] = size
        taken: dict[str, int] = {}
        for path in sorted(self.data.rglob("*")):
            if not path.is_file():
                continue
            there = path.stat()
            kept = None if path.suffix in _MAPPED else synced.get((there.st_dev, there.st_ino))
            if kept is None:
                path.unlink()
            elif kept < there.st_size:
                os.truncate(path, kept)
            kind = path.suffix or path.name
            taken[kind] = taken.get(kind, 0) + there.st_size - min(kept or 0, there.st_size)
        return taken


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
