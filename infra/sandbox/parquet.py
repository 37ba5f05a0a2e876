"""Untrusted Parquet files, decoded by a child process with limits of memory, size and time.

pyarrow crashes on some files, and a few bytes may encode gigabytes: both end the child or exceed its limits, not its parent's. Such a file
is refused; the next request gets a new child. An idle child ends.
"""

import atexit
import contextlib
import json
import mmap
import os
import resource
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox.keeper import limit, statm_bytes

MEMORY_BYTES = 4 << 30
"""[bytes] Memory that the child may use beyond that at its start."""
LEAST_BYTES = 1 << 30
RATIO = 1000
"""Largest decoded size of one byte of the file, if that is more than `LEAST_BYTES` in total."""
LEAST_S = 120.0
BYTES_PER_S = 1 << 20
"""The time limit grows by one second for each of these."""
IDLE_S = 2.0
"""Longest wait of a child for the next request."""
_MAIN = f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.infra.sandbox.parquet import main; main()"


class Refused(ValueError):
    """A file that cannot be read; the message is one line with the file's name."""


class _Decoder:
    """The child process that decodes for this process; used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._idle: threading.Timer | None = None

    def request(self, request: dict[str, Any], *, source: int, sink: int, limit_s: float) -> dict[str, Any]:
        """Send a request with the files `source` and `sink` to the child and return its response.

        Raises `Refused`, without the file's name, if the child refuses the file, exits or takes longer than `limit_s`.
        """
        with self._lock, self._busy():
            connection = self._started()
            connection.settimeout(limit_s)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], [source, sink])
                with connection.makefile("rb") as stream:
                    line = stream.readline()
                if not line.endswith(b"\n"):
                    raise ConnectionResetError
                response: dict[str, Any] = json.loads(line)
            except TimeoutError:
                assert self._process is not None
                self._process.kill()
                self.end()
                raise Refused(f"decoding took longer than {limit_s:.0f} s") from None
            except OSError:
                status = self.end()
                how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
                raise Refused(f"the process that decodes it exited with {how}") from None
            except BaseException:  # Ctrl-C: the response is still to come
                self.end()
                raise
        if "refused" in response:
            raise Refused(response["refused"])
        return response

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """In the block, the child is not idle; afterwards it has `IDLE_S` until it is ended."""
        if self._idle is not None:
            self._idle.cancel()
        try:
            yield
        finally:
            self._idle = threading.Timer(IDLE_S, self._end_idle)
            self._idle.daemon = True
            self._idle.start()

    def _end_idle(self) -> None:
        with self._lock:
            self.end()

    def _started(self) -> socket.socket:
        """Return the connection to the running child, started if necessary."""
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self.end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), str(MEMORY_BYTES)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C goes to this process only
            )
        self._connection = ours
        return ours

    def end(self) -> int | None:
        """End the child, if there is one; returns its exit status if it had already exited."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def forget(self) -> None:
        """Drop the child in a forked process: it belongs to the parent."""
        self.__init__()  # type: ignore[misc]


_decoder = _Decoder()
atexit.register(_decoder.end)
os.register_at_fork(after_in_child=_decoder.forget)


def footer(path: Path) -> dict[str, Any]:
    """Return the file's `metadata` with keys "penstock.…", and for each of its `row_groups` [lowest, highest] `offset` or None.

    Raises `Refused`.
    """
    with _opened(path) as source:
        return _decoder.request({"kind": "footer"}, source=source.fileno(), sink=source.fileno(), limit_s=_limit(source))


def rows(path: Path, row_group: int | None = None) -> pa.Table:
    """Return the rows of a file, or of one row group, mapped from a temporary file that ends with the process. Raises `Refused`."""
    with _opened(path) as source, _sink() as sink:
        request = {"kind": "rows", "row_group": row_group, "most": max(LEAST_BYTES, RATIO * os.fstat(source.fileno()).st_size)}
        _decoder.request(request, source=source.fileno(), sink=sink.fileno(), limit_s=_limit(source))
        try:
            return pa.ipc.open_file(_mapped(sink)).read_all()
        except (pa.ArrowException, OSError) as error:  # of a schema that is nested too deeply
            raise Refused(" ".join(str(error).split())) from error


def _sink() -> IO[bytes]:
    """Open an unnamed temporary file; in memory if there is no directory for temporary files."""
    try:
        return tempfile.TemporaryFile(prefix="penstock-")
    except OSError:
        return os.fdopen(os.memfd_create("penstock-rows"), "w+b")


def _mapped(file: IO[bytes]) -> "pa.NativeFile | pa.Buffer":
    try:
        return pa.memory_map(f"/proc/self/fd/{file.fileno()}")
    except OSError:  # no /proc; this map has a descriptor open for as long as it is used
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises `Refused` for a link, a pipe, a device or a folder, without opening it, and `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Refused(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for the block, whose `Refused` is raised with the file's name."""
    try:
        source = regular(path.resolve())
    except OSError as error:
        raise Refused(f"{path}: cannot read it: {error.strerror}") from error
    with source:
        try:
            yield source
        except Refused as error:
            raise Refused(f"{path}: not a readable Parquet file: {error}") from error


def _limit(file: IO[bytes]) -> float:
    return LEAST_S + os.fstat(file.fileno()).st_size / BYTES_PER_S


REQUEST_BYTES = 1 << 12
DATA = 5
"""Field of `statm` for the memory that RLIMIT_DATA counts."""
REFUSES = (pa.ArrowException, OSError, ValueError, MemoryError, RuntimeError, LookupError, OverflowError)
"""Errors of pyarrow for a file that is not Parquet, and of this module."""


def main() -> None:
    """Run the child: serve requests on a socket until its other end is closed.

    Arguments of the program: the socket's descriptor, and the memory limit in bytes.
    """
    import pyarrow.parquet  # noqa: F401  (before the limits)

    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    limit(resource.RLIMIT_DATA, statm_bytes(os.getpid(), DATA) + int(sys.argv[2]))
    limit(resource.RLIMIT_CORE, 0)
    pa.set_cpu_count(1)
    while True:
        request, descriptors, *_ = socket.recv_fds(connection, REQUEST_BYTES, 2)
        if not request:
            return
        try:
            response = _response(json.loads(request), *descriptors)
        except REFUSES as error:
            response = {"refused": " ".join(str(error).split())[:1000] or type(error).__name__}
        connection.sendall(json.dumps(response).encode() + b"\n")
        for descriptor in descriptors:
            os.close(descriptor)


def _end_with(connection: socket.socket) -> None:
    """End this process, even while it decodes, when the other end of the socket is closed or its process has ended."""
    closed = select.poll()
    closed.register(connection, 0)
    closed.poll()
    os._exit(0)


def _response(request: dict[str, Any], source: int, sink: int) -> dict[str, Any]:
    """Execute a request on the open files in the child; return the footer, or {} once the rows are written. Raises one of `REFUSES`."""
    import pyarrow.parquet as pq

    with os.fdopen(os.dup(source), "rb") as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
        if request["kind"] == "footer":
            return footer_of(file)
        most = request["most"]
        limit(resource.RLIMIT_FSIZE, most, for_good=False)
        try:
            _decode(file, request["row_group"], sink)
        except OSError as error:
            if os.fstat(sink).st_size < most:
                raise
            raise ValueError(f"it decodes to more than {most:,} bytes") from error
    return {}


def footer_of(file: Any) -> dict[str, Any]:
    """Return metadata and the bounds of each row group's `offset`, by which a reader chooses row groups."""
    metadata, groups = file.metadata, []
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        columns = (row_group.column(index) for index in range(row_group.num_columns))
        statistics = next((column.statistics for column in columns if column.path_in_schema == "offset"), None)
        bounds = [statistics.min, statistics.max] if statistics is not None and statistics.has_min_max else []
        groups.append(bounds if bounds and all(isinstance(bound, int) for bound in bounds) else None)
    texts = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in (metadata.metadata or {}).items()}
    return {"metadata": {key: value for key, value in texts.items() if key.startswith("penstock.")}, "row_groups": groups}


def _decode(file: Any, row_group: int | None, sink: int) -> None:
    """Write one row group, or all, to a file of Arrow IPC."""
    schema = pa.schema([field.with_type(_plain(field.type)) for field in file.schema_arrow])
    with os.fdopen(os.dup(sink), "wb") as stream, pa.ipc.new_file(stream, schema) as copy:
        for batch in rows_of(file, row_group):
            copy.write_batch(batch.cast(schema) if batch.schema != schema else batch)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the value type of a dictionary type, so that repeated values count as often as they occur; other types unchanged."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def rows_of(file: Any, row_group: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of one row group, or of all. Raises one of `REFUSES`."""
    for batch in file.iter_batches(row_groups=None if row_group is None else [row_group], use_threads=False):
        batch.validate()
        yield batch
