"""The process that decodes Parquet files for `reader`; requests and file descriptors come over a socket.

pyarrow crashes on some files, and a few bytes may encode gigabytes: both end this process or exceed its limits, not its parent's.
"""

import json
import os
import resource
import select
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.infra.sandbox.keeper.confined import limit
from penstock.infra.sandbox.keeper.process_tree import statm_bytes

REQUEST_BYTES = 1 << 12
DATA = 5
"""Field of `statm` for the memory that RLIMIT_DATA counts."""
REFUSES = (pa.ArrowException, OSError, ValueError, MemoryError, RuntimeError, LookupError, OverflowError)
"""Errors of pyarrow for a file that is not Parquet, and of this module."""


def main() -> None:
    """Serve requests on a socket until its other end is closed. Arguments: its descriptor, and the memory limit in bytes."""
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
        text = json.dumps(response).encode()
        connection.sendall(len(text).to_bytes(8, "little") + text)
        for descriptor in descriptors:
            os.close(descriptor)


def _end_with(connection: socket.socket) -> None:
    """End this process, even while it decodes, when the other end of the socket is closed or its process has ended."""
    closed = select.poll()
    closed.register(connection, 0)
    closed.poll()
    os._exit(0)


def _response(request: dict[str, Any], source: int, sink: int) -> dict[str, Any]:
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


def footer_of(file: pq.ParquetFile) -> dict[str, Any]:
    """The file's own metadata and the bounds of each row group's `offset`, by which a reader chooses row groups."""
    metadata, groups = file.metadata, []
    for number in range(metadata.num_row_groups):
        row_group = metadata.row_group(number)
        columns = (row_group.column(index) for index in range(row_group.num_columns))
        statistics = next((column.statistics for column in columns if column.path_in_schema == "offset"), None)
        bounds = [statistics.min, statistics.max] if statistics is not None and statistics.has_min_max else []
        groups.append(bounds if bounds and all(isinstance(bound, int) for bound in bounds) else None)
    texts = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in (metadata.metadata or {}).items()}
    return {"metadata": {key: value for key, value in texts.items() if key.startswith("penstock.")}, "row_groups": groups}


def _decode(file: pq.ParquetFile, row_group: int | None, sink: int) -> None:
    """Write one row group, or all, to a file of Arrow IPC."""
    schema = pa.schema([field.with_type(_plain(field.type)) for field in file.schema_arrow])
    with os.fdopen(os.dup(sink), "wb") as stream, pa.ipc.new_file(stream, schema) as copy:
        for batch in rows_of(file, row_group):
            copy.write_batch(batch.cast(schema) if batch.schema != schema else batch)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The value type of a dictionary type: repeated values count as often as they occur."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def rows_of(file: pq.ParquetFile, row_group: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of one row group, or of all. Raises one of `REFUSES`."""
    for batch in file.iter_batches(row_groups=None if row_group is None else [row_group], use_threads=False):
        batch.validate()
        yield batch
