"""The one copy of a run's newest weights: tensors joined in name order in one buffer, in which a newer version overwrites an older one.

The rule: a copy says which version it holds, or none while it is being changed; nobody reads tensors of a copy that holds none.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.infra.tensors.stream import Hash, TensorBytes, digest, expected_nbytes


@dataclass(slots=True)
class WeightCopy:
    """A version's bytes with the names, dtypes and shapes that give them meaning."""

    version: int = -1
    """The version that it holds; -1 for none."""
    digest: str = ""
    """The digest of that version."""
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    """The tensors' bytes, joined in name order."""
    _layout: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the tensors are read, and while they change under a version that the copy holds."""

    def begin(self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Make room for a whole version of these tensors; memory of the same size is used again. Raises `ValueError` for unknown dtypes."""
        with self._lock:
            self.version, self.digest = -1, ""
        layout = tuple(sorted(zip(names, dtypes, (tuple(map(int, shape)) for shape in shapes), strict=True)))
        size = sum(expected_nbytes(dtype, shape) for _, dtype, shape in layout)
        if size != len(self.data):
            self.data = memoryview(b"")  # the old buffer goes before the new one comes
            self.data = memoryview(bytearray(size))
        self._layout = layout

    def hold(self, version: int, recorded: str) -> None:
        """Say that the bytes are those of a version."""
        self.version, self.digest = version, recorded

    def change(self, write: Callable[[memoryview], None], *, version: int, recorded: str) -> None:
        """Turn the version that is held into another one; `write` overwrites all of what differs, or raises with nothing overwritten."""
        with self._lock:
            write(self.data)
            self.version, self.digest = version, recorded

    @contextmanager
    def reading(self) -> Iterator[tuple[int, list[TensorBytes]]]:
        """The version that is held with its tensors, which do not change inside the block; -1 and none while there is no version."""
        with self._lock:
            yield self.version, self.tensors() if self.version >= 0 else []

    def tensors(self) -> list[TensorBytes]:
        """The tensors, each a view of the copy."""
        tensors, start = [], 0
        for name, dtype, shape in self._layout:
            size = expected_nbytes(dtype, shape)
            tensors.append(TensorBytes(name=name, dtype=dtype, shape=shape, data=self.data[start : start + size]))
            start += size
        return tensors

    def computed(self, hash_name: Hash) -> str:
        """The digest of the bytes that are here."""
        return digest(self.tensors(), hash_name)
