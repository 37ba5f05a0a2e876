"""A copy of a run's newest weights: tensors joined in name order in one buffer, which a newer version overwrites.

The copy has no version while it is being changed; its tensors are read only while it has one.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from penstock.infra.tensors.host_memory import NONE, allocated, tensors_in
from penstock.infra.tensors.stream import Hash, TensorBytes, digest, expected_nbytes


class Memory(Protocol):
    """Memory for the copy: private to this process, or shared with other processes of the machine."""

    version: int
    """Version in the memory; `NONE` while there is none."""
    digest: str
    data: memoryview

    def allot(self, size: int) -> None:
        """Allocate `size` bytes; if the size changes, the content is lost."""

    def reading(self) -> AbstractContextManager[bool]:
        """Lock out writers; yields False while one is writing."""

    def writing(self) -> AbstractContextManager[None]:
        """Lock out readers."""


class OwnMemory:
    """Memory that only this process uses."""

    def __init__(self) -> None:
        self.version, self.digest, self.data = NONE, "", memoryview(b"")

    def allot(self, size: int) -> None:
        """Allocate `size` bytes, after freeing the old buffer."""
        if size != len(self.data):
            self.data = memoryview(b"")
            self.data = allocated(size)

    def reading(self) -> AbstractContextManager[bool]:
        """No lock, because no other process writes here."""
        return nullcontext(True)

    def writing(self) -> AbstractContextManager[None]:
        """No lock, because no other process reads here."""
        return nullcontext()


class WeightCopy:
    """The bytes of a weight version with names, dtypes and shapes of its tensors; thread-safe."""

    def __init__(self, memory: Memory | None = None) -> None:
        self._memory: Memory = memory or OwnMemory()
        self._layout: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
        self._size = 0
        self.lock = threading.Lock()
        """Held while this process reads the tensors, changes them, or passes them on."""

    @property
    def version(self) -> int:
        """Version of the copy, or `NONE`."""
        return self._memory.version

    def holds(self, version: int, digest: str) -> bool:
        """Return True if the copy is this version, with this digest."""
        return (self.version, self.digest) == (version, digest)

    @property
    def digest(self) -> str:
        return self._memory.digest

    @property
    def data(self) -> memoryview:
        """The tensors' bytes, joined in name order."""
        return self._memory.data

    def lay_out(self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Set the layout of the bytes. Raises `ValueError` for unknown dtypes."""
        self._layout = tuple(sorted(zip(names, dtypes, (tuple(map(int, shape)) for shape in shapes), strict=True)))
        self._size = sum(expected_nbytes(dtype, shape) for _, dtype, shape in self._layout)

    def allocate(self, *, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Allocate memory for a full version of these tensors; the copy has no version until `hold`. Memory of the same size is reused.

        Raises `ValueError` for unknown dtypes.
        """
        with self.lock:
            self.lay_out(names=names, dtypes=dtypes, shapes=shapes)
            self._memory.version = NONE
            with self._memory.writing():  # waits for readers of the old version
                self._memory.allot(self._size)

    def change(self, write: Callable[[memoryview], None]) -> None:
        """Overwrite bytes of the current version; the copy has no version until `hold`. A `ValueError` of `write` leaves it unchanged."""
        with self.lock:
            version, self._memory.version = self._memory.version, NONE
            with self._memory.writing():
                try:
                    write(self._memory.data)
                except ValueError:
                    self._memory.version = version
                    raise

    def hold(self, version: int, recorded: str) -> None:
        """Set the version of the bytes, and its digest."""
        self._memory.digest, self._memory.version = recorded, version

    @contextmanager
    def reading(self) -> Iterator[tuple[int, list[TensorBytes]]]:
        """Yield the version and its tensors, which do not change inside the block; `NONE` and an empty list without a version."""
        with self.lock, self._memory.reading() as granted:
            version = self._memory.version if granted and len(self.data) == self._size else NONE
            yield version, self.tensors() if version != NONE else []

    def tensors(self) -> list[TensorBytes]:
        """Return the tensors, each a view of the copy."""
        return tensors_in(self._layout, self._memory.data)

    def computed(self, hash_name: Hash) -> str:
        """Return the digest computed from the bytes, to be compared with the recorded one."""
        return digest(self.tensors(), hash_name)
