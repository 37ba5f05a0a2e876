"""Memory for a run's weights that the workers of one machine share: one writes it, the others read it.

Nothing has a name in a file system. The memory is a `memfd`, freed when its last process exits. The writer is the process that has bound
an abstract Unix socket, which is free again when that process exits for any reason. Both belong to one user: the file has mode 0600, and
both ends of a connection check the other's user id.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np

from penstock.infra.errors import LogError
from penstock.infra.paths import locked
from penstock.infra.tensors.host_memory import NONE, HostMemory, Mappings

RESPONSE_TIMEOUT_S = 20.0
"""Timeout for a response of the writer, after which readers load weights themselves."""
READERS_S = 60.0
"""Timeout of a writer that waits for readers, one of which may be frozen."""
_DIGEST_BYTES = 256
_POLL_S = 0.005
_CREDENTIALS = struct.Struct("iII")


class MachineMemory:
    """One process's view of the memory that the machine's workers share under `name`; implements `Memory`."""

    def __init__(self, name: str, *, only_reads: bool = False) -> None:
        """Attach to no memory yet; `only_reads` is for a process that never becomes the writer."""
        self._only_reads = only_reads
        self.no_writer = False
        """True if there was no writer at the last request."""
        self._address = "\0penstock-" + hashlib.sha256(f"{os.getuid()} {name}".encode()).hexdigest()[:40]
        self._server: socket.socket | None = None
        self._sending = threading.Lock()
        """Held while the file is sent to another process, and while it is closed."""
        self._memory: HostMemory | None = None
        self._leave()

    @property
    def version(self) -> int:
        """Version in the memory; `NONE` while there is none."""
        return int(self._numbers[0])

    @version.setter
    def version(self, version: int) -> None:
        self._numbers[0] = version

    @property
    def digest(self) -> str:
        return bytes(self._digest[: max(0, int(self._numbers[1]))]).decode()

    @digest.setter
    def digest(self, digest: str) -> None:
        written = digest.encode()
        self._digest[: len(written)] = written
        self._numbers[1] = len(written)

    def claim(self) -> bool:
        """Become the writer unless another process is; return True if this process is the writer. The content is unchanged.

        Raises `OSError` if abstract sockets are forbidden.
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
        """Return the descriptor of the writer's file, to be passed to `map`; None if there is none or it is mapped already.

        Raises `TimeoutError` if the writer does not respond, and `PermissionError` if it belongs to another user.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(RESPONSE_TIMEOUT_S)
            try:
                connection.connect(self._address)
                if not _is_own(connection):
                    raise PermissionError("the process that offers the weights belongs to another user")
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
            except (ConnectionRefusedError, ConnectionResetError):
                self.no_writer = True  # the writer has exited, so that the next `claim` succeeds
                return None
        self.no_writer = False
        if not files:
            return None
        try:
            inode = os.fstat(files[0]).st_ino
            if self._memory is not None and inode == self._memory.inode:
                return None
            # A lock belongs to an open file description, and the received one is the writer's.
            return os.open(f"/proc/self/fd/{files[0]}", (os.O_RDONLY if self._only_reads else os.O_RDWR) | os.O_CLOEXEC)
        finally:
            os.close(files[0])

    def map(self, file: int) -> None:
        self.use(self._mappings.of(file, writable=not self._only_reads))

    def use(self, memory: HostMemory) -> None:
        """Use memory of this process, and send its file to those that request it."""
        with self._sending:
            self._memory = memory
        self._numbers, self._digest, self.data = memory.numbers, memoryview(memory)[16 : 16 + _DIGEST_BYTES], memory.data

    def allot(self, size: int) -> None:
        """Allocate `size` bytes; if the size changes, the content is lost for this process."""
        if self._memory is None or size != len(self.data):
            self._leave()
            self.use(HostMemory.shared(size))

    @contextlib.contextmanager
    def reading(self) -> Iterator[bool]:
        """Lock out the writer; yields False while it is writing."""
        memory = self._memory
        granted = memory is not None and locked(memory.file, fcntl.LOCK_SH)
        try:
            yield granted
        finally:
            if memory is not None and granted:
                fcntl.flock(memory.file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Wait for current readers and lock out others. Raises `LogError` after `READERS_S`, and releases the memory to the readers."""
        memory, until = self._memory, time.monotonic() + READERS_S
        while memory is not None and not locked(memory.file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                self._leave()
                raise LogError(
                    f"other workers still copy the shared weights after {READERS_S:g} s: this version is written to other memory"
                )
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            if memory is not None:
                fcntl.flock(memory.file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Stop writing and unmap the memory, which is freed when its last process does so."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)  # ends `accept`, which would keep the address in use
            server.close()
        self._leave()

    def _serve(self, server: socket.socket) -> None:
        """Send the file to processes of the same user that request it."""
        while self._server is server:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection, self._sending:
                    if _is_own(connection):
                        socket.send_fds(connection, [b"\0"], [self._memory.file] if self._memory is not None else [])

    def _leave(self) -> None:
        """Stop using the memory; it is unmapped with its last view."""
        with self._sending:
            self._memory = None
        self._mappings = Mappings()
        self.data = memoryview(b"")
        self._numbers = np.full(2, NONE, dtype=np.int64)
        """The version, and the length of its digest in bytes."""
        self._digest = memoryview(bytearray(_DIGEST_BYTES))


def _is_own(connection: socket.socket) -> bool:
    """True if the other end belongs to this process's user."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(peer)[1] == os.geteuid())
