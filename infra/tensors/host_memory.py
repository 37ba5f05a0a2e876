"""Host memory for whole versions: other processes of the machine can map it, and CUDA can copy from and to it at the full rate."""

import contextlib
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from penstock.infra.paths import locked
from penstock.infra.tensors.stream import TensorBytes, expected_nbytes

NONE = -1
"""Version number of memory that has no weights yet."""
HEAD_BYTES = 4096
"""Bytes before the tensors: version, length of its digest, the digest."""
MOST_IDLE = 2
"""Idle buffers that other processes may still be reading; older ones are left to them."""
RECENT = 3
"""Files that stay mapped: a writer that alternates between several has each mapped, and registered with CUDA, once."""
_READ_ONLY = 8
"""CUDA's flag for memory that a device only reads."""
_mapped: weakref.WeakValueDictionary[int, "HostMemory"] = weakref.WeakValueDictionary()
"""Address -> memory that this process has mapped there."""


def is_supported() -> bool:
    """Return True if this process can share memory by memfd and /proc (Linux)."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/fd"):
        return False
    try:
        os.close(os.memfd_create("penstock-probe"))
    except OSError:
        return False
    return True


class HostMemory(mmap.mmap):
    """Memory of `file`, or of this process alone; unmapped with its last view."""

    file: int
    """The `memfd`, which other processes of this user can open by this process's /proc entry; -1 without one."""
    _writable: bool
    _registered: bool | None

    def __new__(cls, file: int = -1, size: int = 0, *, writable: bool = True) -> "HostMemory":
        """Map all of `file`, which is closed with the memory, or `size` bytes of anonymous memory."""
        flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = super().__new__(cls, file, size, flags=flags, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        memory.file, memory._writable, memory._registered = file, writable, None
        _mapped[memory.address] = memory
        return memory

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if getattr(self, "_registered", None) and (torch := sys.modules.get("torch")) is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)
        if getattr(self, "file", -1) >= 0:
            close(self.file)

    @classmethod
    def shared(cls, size: int) -> "HostMemory":
        """Return new memory of a head and `size` bytes, which other processes of this user can map."""
        file = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        os.fchmod(file, 0o600)
        os.ftruncate(file, HEAD_BYTES + size)
        memory = cls(file)
        memory.numbers[:] = NONE
        return memory

    @property
    def address(self) -> int:
        return int(np.frombuffer(self, np.uint8).ctypes.data)

    @property
    def inode(self) -> int:
        """Number of the file, equal in all processes."""
        return os.fstat(self.file).st_ino if self.file >= 0 else -1

    @property
    def numbers(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The version, and the length of its digest in bytes."""
        return np.frombuffer(self, np.int64, count=2)

    @property
    def data(self) -> memoryview:
        """Bytes of the tensors, which follow the header."""
        return memoryview(self)[HEAD_BYTES:]

    def page_lock(self) -> None:
        """Register the memory with CUDA, once, so that devices copy it directly; otherwise copies are slower and synchronous."""
        if self._registered is None:
            import torch

            status = torch.cuda.cudart().cudaHostRegister(self.address, len(self), 0 if self._writable else _READ_ONLY)
            self._registered = int(status) == 0
            if not self._registered:
                with contextlib.suppress(RuntimeError):  # the next kernel reports the refusal as its own error
                    torch.zeros(1, device="cuda")

    def emptied(self) -> bool:
        """Mark the memory as having no version; return False, unchanged, while another process reads it."""
        if self.file < 0:
            return True
        if not locked(self.file, fcntl.LOCK_EX):
            return False
        self.numbers[0] = NONE
        fcntl.flock(self.file, fcntl.LOCK_UN)
        return True


class Mappings:
    """Mappings in this process of memory that other processes share."""

    def __init__(self) -> None:
        self._recent: list[HostMemory] = []

    def of(self, file: int, *, writable: bool) -> HostMemory:
        """Return the memory of `file`, which is closed with the memory; files mapped recently are not mapped again."""
        memory = HostMemory(file, writable=writable)
        memory = next((recent for recent in self._recent if recent.inode == memory.inode), memory)
        self._recent = [*(recent for recent in self._recent if recent is not memory), memory][-RECENT:]
        return memory


class HostBuffers:
    """Memory for copies of one model's weights, reused once no tensor refers to it and no process reads it."""

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: other processes of this user can map the memory."""
        self.shared = shared and is_supported()
        self._idle: list[HostMemory] = []

    def take(self, size: int) -> memoryview:
        """Return memory of `size` bytes with any content; reusable once this view and all its parts are deleted."""
        memory = self._reusable(size) or (HostMemory.shared(size) if self.shared else HostMemory(size=HEAD_BYTES + size))
        array: Any = np.frombuffer(memory, np.uint8)[HEAD_BYTES:]
        weakref.finalize(array, self._idle.append, memory).atexit = False
        return memoryview(array)

    def _reusable(self, size: int) -> HostMemory | None:
        """Return an idle buffer of this size that no process reads, removed from the idle ones; None if there is none."""
        for memory in list(self._idle):
            if len(memory) == HEAD_BYTES + size and memory.emptied():
                self._idle.remove(memory)
                return memory
        del self._idle[:-MOST_IDLE]
        return None

    def copy(self, tensors: Sequence[TensorBytes]) -> list[TensorBytes]:
        """Return a copy of the tensors, joined in name order; the interpreter is free meanwhile."""
        ordered = sorted(tensors, key=lambda tensor: tensor.name)
        layout = [(tensor.name, tensor.dtype, tensor.shape) for tensor in ordered]
        targets = tensors_in(layout, self.take(sum(tensor.nbytes for tensor in ordered)))
        for source, target in zip(ordered, targets, strict=True):
            copy_bytes(target.data, source.data)
        return targets


def allocated(size: int) -> memoryview:
    """Return `size` bytes of this process whose pages are not touched, so that the interpreter does not wait for them."""
    return HostMemory(size=HEAD_BYTES + size).data


def tensors_in(layout: Iterable[tuple[str, str, Sequence[int]]], data: memoryview) -> list[TensorBytes]:
    """Return tensors of these names, dtypes and shapes, one after the other in `data`."""
    tensors, start = [], 0
    for name, dtype, shape in layout:
        end = start + expected_nbytes(dtype, shape)
        tensors.append(TensorBytes(name=name, dtype=dtype, shape=tuple(shape), data=data[start:end]))
        start = end
    return tensors


def copy_bytes(target: memoryview | bytes, source: memoryview | bytes) -> None:
    """Copy bytes without the interpreter lock, which the assignment of a slice holds."""
    np.copyto(_bytes_of(target), _bytes_of(source))


def located(data: memoryview | bytes) -> tuple[HostMemory | None, int]:
    """Return the `HostMemory` that contains these bytes and their offset in it; None and 0 for other memory."""
    start = _bytes_of(data).ctypes.data
    for address, memory in list(_mapped.items()):
        if address <= start < address + len(memory):
            return memory, start - address
    return None, 0


def shared_table(tensors: Sequence[TensorBytes]) -> tuple[HostMemory, list[int]] | None:
    """Return the one shared memory that contains all these tensors, and the offset of each; None if there is none."""
    offsets, shared = list[int](), None
    for tensor in tensors:
        memory, offset = located(tensor.data) if tensor.nbytes else (shared, 0)
        if tensor.nbytes and (memory is None or memory.file < 0 or (shared is not None and memory is not shared)):
            return None
        shared = memory
        offsets.append(offset)
    return None if shared is None else (shared, offsets)


def filled_memory(tensors: Sequence[TensorBytes]) -> HostMemory | None:
    """Return the shared memory that consists of a head and these tensors, one after the other; None if there is none."""
    table, start = shared_table(tensors), HEAD_BYTES
    if table is None:
        return None
    for tensor, offset in zip(tensors, table[1], strict=True):
        if tensor.nbytes and offset != start:
            return None
        start += tensor.nbytes
    return table[0] if start == len(table[0]) else None


def _bytes_of(data: memoryview | bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.asarray(memoryview(data)).reshape(-1).view(np.uint8)
