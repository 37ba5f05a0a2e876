"""The one copy of a run's newest weights: tensors joined in name order in one buffer, in which a newer version overwrites an older one.

The rule: a copy says which version it holds, or none while it is being changed; nobody reads tensors of a copy that holds none.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from penstock.infra.tensors.stream import Hash, TensorBytes, digest, expected_nbytes

NONE = -1
"""The version of a copy that holds none."""


class Memory(Protocol):
    """Where a copy lies: in this process, or where other processes of the machine see it, too."""

    version: int
    """The version that is there; `NONE` while there is none."""
    digest: str
    data: memoryview

    def allot(self, size: int) -> None:
        """Make room for `size` bytes; what was there is lost if that is another size."""

    def reading(self) -> AbstractContextManager[bool]:
        """Keep all writers out; False inside while one is at work."""

    def writing(self) -> AbstractContextManager[None]:
        """Keep all readers out."""


class OwnMemory:
    """Memory of this process alone."""

    def __init__(self) -> None:
        self.version, self.digest, self.data = NONE, "", memoryview(b"")

    def allot(self, size: int) -> None:
        """Make room for `size` bytes; the old buffer goes before the new one comes."""
        if size != len(self.data):
            self.data = memoryview(b"")
            self.data = memoryview(bytearray(size))

    def reading(self) -> AbstractContextManager[bool]:
        """Nothing to do: no other process writes here."""
        return nullcontext(True)

    def writing(self) -> AbstractContextManager[None]:
        """Nothing to do: no other process reads here."""
        return nullcontext()


class WeightCopy:
    """A version's bytes with the names, dtypes and shapes that give them meaning; for several threads."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory: Memory = memory or OwnMemory()
        self._layout: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        self._size = 0
        self.lock = threading.Lock()
        """Held while this process reads the tensors, changes them, or has them elsewhere."""

    @property
    def version(self) -> int:
        """The version that it holds; `NONE` for none."""
        return self._memory.version

    def holds(self, version: int, digest: str) -> bool:
        """Whether it holds this version, with this digest."""
        return (self.version, self.digest) == (version, digest)

    @property
    def digest(self) -> str:
        """The digest of that version."""
        return self._memory.digest

    @property
    def data(self) -> memoryview:
        """The tensors' bytes, joined in name order."""
        return self._memory.data

    def lay_out(self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Say which tensors the bytes are. Raises `ValueError` for unknown dtypes."""
        self._layout = tuple(sorted(zip(names, dtypes, (tuple(map(int, shape)) for shape in shapes), strict=True)))
        self._size = sum(expected_nbytes(dtype, shape) for _, dtype, shape in self._layout)

    def allocate(self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Make room for a whole version of these tensors, and hold none until `hold`; memory of the same size is used again.

        Raises `ValueError` for unknown dtypes.
        """
        with self.lock:
            self.lay_out(names=names, dtypes=dtypes, shapes=shapes)
            self._memory.version = NONE
            with self._memory.writing():  # whoever reads the old version now is waited for
                self._memory.allot(self._size)

    def change(self, write: Callable[[memoryview], None]) -> None:
        """Overwrite bytes of the version that is held, and hold none until `hold`; `write` raises `ValueError` with nothing overwritten."""
        with self.lock:
            version, self._memory.version = self._memory.version, NONE
            with self._memory.writing():
                try:
                    write(self._memory.data)
                except ValueError:
                    self._memory.version = version
                    raise

    def hold(self, version: int, recorded: str) -> None:
        """Say that the bytes are those of a version."""
        self._memory.digest, self._memory.version = recorded, version

    @contextmanager
    def reading(self) -> Iterator[tuple[int, list[TensorBytes]]]:
        """The version that is held with its tensors, which do not change inside the block; `NONE` and none while there is no version."""
        with self.lock, self._memory.reading() as granted:
            version = self._memory.version if granted and len(self.data) == self._size else NONE
            yield version, self.tensors() if version != NONE else []

    def tensors(self) -> list[TensorBytes]:
        """The tensors, each a view of the copy."""
        tensors, start, data = [], 0, self._memory.data
        for name, dtype, shape in self._layout:
            size = expected_nbytes(dtype, shape)
            tensors.append(TensorBytes(name=name, dtype=dtype, shape=shape, data=data[start : start + size]))
            start += size
        return tensors

    def computed(self, hash_name: Hash) -> str:
        """The digest of the bytes that are here."""
        return digest(self.tensors(), hash_name)
