"""Memory that the workers of one machine share: one of them writes a run's weights there, the others only read them.

The rule: nothing has a name in a file system. The memory is a `memfd`, which ends with the last process that has it open; who writes is
decided by an abstract Unix socket, which one process at a time can bind and which is free again when that process is gone, however it
ended. Both belong to one user: the file has mode 0600, and both ends of a connection check the other's user id.
"""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np

from penstock.infra.errors import LogError
from penstock.infra.tensors.weight_copy import NONE

ANSWER_S = 20.0
"""A writer that does not answer for this long is stopped or frozen; the others then do without it."""
READERS_S = 60.0
"""A writer waits no longer than this for the processes that read; one of them may be frozen."""
_HEAD_BYTES = 4096
_DIGEST_BYTES = 256
_LOOK_S = 0.005
_CREDENTIALS = struct.Struct("iII")


def is_supported() -> bool:
    """Whether this system has what is needed, and lets this process use it: Linux, with /proc."""
    if sys.platform != "linux" or not os.path.exists("/proc/self/fd"):
        return False
    try:
        os.close(os.memfd_create("penstock-probe"))
    except OSError:
        return False
    return True


class MachineMemory:
    """One process's end of the memory that the machine's workers share under `name`; see `Memory` for what a copy asks of it."""

    def __init__(self, name: str, *, only_reads: bool = False) -> None:
        """`only_reads`: for a process that will never be the one that writes."""
        self._only_reads = only_reads
        self.no_writer = False
        """Whether nobody was there to write when this process asked last."""
        self._address = "\0penstock-" + hashlib.sha256(f"{os.getuid()} {name}".encode()).hexdigest()[:40]
        self._server: socket.socket | None = None
        self._handing = threading.Lock()
        """Held while the file is handed to another process, and while it is closed."""
        self._file = -1
        self._inode = -1
        self._numbers = np.full(2, NONE, dtype=np.int64)
        """The version, and the bytes of its digest."""
        self._digest = memoryview(bytearray(_DIGEST_BYTES))
        self.data = memoryview(b"")

    @property
    def version(self) -> int:
        """The version that is there; `NONE` while there is none."""
        return int(self._numbers[0])

    @version.setter
    def version(self, version: int) -> None:
        self._numbers[0] = version

    @property
    def digest(self) -> str:
        """The digest of that version."""
        return bytes(self._digest[: max(0, int(self._numbers[1]))]).decode()

    @digest.setter
    def digest(self, digest: str) -> None:
        written = digest.encode()
        self._digest[: len(written)] = written
        self._numbers[1] = len(written)

    def claim(self) -> bool:
        """Become the one that writes, unless another process is; True for the one that is. What is there already stays.

        Raises `OSError` where sockets of this kind are forbidden.
        """
        if self._server is not None:
            return True
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.bind(self._address)
        except OSError as error:
            server.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        server.listen(128)
        self._server = server
        threading.Thread(target=self._serve, args=(server,), daemon=True, name="weights-share").start()
        return True

    def request_file(self) -> int | None:
        """A file of what the writer has, to be mapped by `map`; None if it has nothing that is not mapped here already.

        Raises `TimeoutError` when it does not answer, and `PermissionError` when it is another user's.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            try:
                connection.connect(self._address)
                if not _is_own(connection):
                    raise PermissionError("another user's process has taken the place")
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
            except (ConnectionRefusedError, ConnectionResetError):
                self.no_writer = True  # the writer has just ended: the next claim takes its place
                return None
        self.no_writer = False
        if not files:
            return None
        try:
            if os.fstat(files[0]).st_ino == self._inode:
                return None
            # A lock belongs to an open file, and the one that came is the writer's own.
            return os.open(f"/proc/self/fd/{files[0]}", (os.O_RDONLY if self._only_reads else os.O_RDWR) | os.O_CLOEXEC)
        finally:
            os.close(files[0])

    def map(self, file: int) -> None:
        """Read and write in `file` from now on."""
        self._forget()
        whole = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ | (0 if self._only_reads else mmap.PROT_WRITE)))
        self._numbers = np.frombuffer(whole[:16], dtype=np.int64)
        self._digest = whole[16 : 16 + _DIGEST_BYTES]
        self._file, self._inode, self.data = file, os.fstat(file).st_ino, whole[_HEAD_BYTES:]

    def allot(self, size: int) -> None:
        """Make room for `size` bytes; what was there is lost, for this process, if that is another size."""
        if self._file < 0 or size != len(self.data):
            self._forget()
            file = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
            os.fchmod(file, 0o600)
            os.ftruncate(file, _HEAD_BYTES + size)
            self.map(file)
            self.version = NONE

    @contextlib.contextmanager
    def reading(self) -> Iterator[bool]:
        """Keep the writer out; False inside while it is at work."""
        granted = self._file >= 0 and _locked(self._file, fcntl.LOCK_SH)
        try:
            yield granted
        finally:
            if granted:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep readers out, once those that are there have ended. Raises `LogError`, and leaves the memory to them, if they do not."""
        file, until = self._file, time.monotonic() + READERS_S
        while file >= 0 and not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                self._forget()
                raise LogError(f"a process of this machine has been loading weights for {READERS_S:g} s: they are read anew beside it")
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if file >= 0 and file == self._file:
                fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let another process write; the memory goes with the last process that has it."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)  # ends the wait for connections, which would keep the address
            server.close()
        self._forget()

    def _serve(self, server: socket.socket) -> None:
        """Hand the memory to whoever of the same user asks for it."""
        while self._server is server:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection, self._handing:
                    if _is_own(connection):
                        socket.send_fds(connection, [b"\0"], [self._file] if self._file >= 0 else [])

    def _forget(self) -> None:
        """Let go of the memory, which ends unless another process has it."""
        with self._handing:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._inode, self.data = -1, -1, memoryview(b"")
        self._numbers, self._digest = np.full(2, NONE, dtype=np.int64), memoryview(bytearray(_DIGEST_BYTES))


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_own(connection: socket.socket) -> bool:
    """Whether the other end belongs to this process's user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.geteuid())
