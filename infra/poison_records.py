"""Poison-record guard: an mmapped file names the record being decoded, so that a record that crashed its reader three times is skipped.

A record's count rises each time a process of this name ends while it decodes the record, and is cleared when decoding completes. The kernel
keeps the page when a process is killed; a power failure only loses counts.
"""

import json
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record, RecordId

MAX_CRASHES = 3
"""Number of crashes after which a record is not decoded again."""

_RECORD_ID = struct.Struct("<qqH")
"""Partition, offset and length of the topic's name, which follows; the byte before them is 1 if they are valid."""
_SIZE = mmap.PAGESIZE


class Attempts:
    """Records in a with block which record is being decoded; for one thread, not to be nested.

    Example:
        with attempts.reading(record):  # raises Unusable(kind="killer") for a poison record
            decode(record.value)
    """

    def __init__(self, path: Path | None) -> None:
        """Load the previous process's state at `path`; with None, or a path that is not writable, nothing is stored."""
        self.crashes: dict[RecordId, int] = {}
        """Record -> number of crashes while it was being decoded."""
        self._counts = path.with_name(f"{path.name}.json") if path else None
        self._page = _page(path)
        self._topic = ""
        self._record: Record | None = None
        self._load()

    def reading(self, record: Record) -> "Attempts":
        """Select the record that the block decodes. Raises `Unusable` for a poison record."""
        if self.crashes:
            self._refuse(record)
        self._record = record
        return self

    def __enter__(self) -> None:
        page, record = self._page, self._record
        assert record is not None
        if record.topic != self._topic:
            name = record.topic.encode()
            self._topic = record.topic
            page[1 + _RECORD_ID.size : 1 + _RECORD_ID.size + len(name)] = name
        _RECORD_ID.pack_into(page, 1, record.partition, record.offset, len(self._topic))
        page[0] = 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Unusable):
            return  # any other error ends the process: the page still names the record
        self._page[0] = 0
        if self.crashes and self._record is not None and self._record.id in self.crashes:
            del self.crashes[self._record.id]
            self._save()

    def close(self) -> None:
        self._page.close()

    def _refuse(self, record: Record) -> None:
        count = self.crashes.get(record.id, 0)
        if count >= MAX_CRASHES:
            raise Unusable(f"{count} processes of this name ended while they decoded it", kind="killer")

    def _load(self) -> None:
        if self._counts is not None:
            with suppress(OSError, ValueError, TypeError):  # only a count is lost
                self.crashes = {
                    RecordId(topic, int(p), int(offset)): int(count) for topic, p, offset, count in json.loads(self._counts.read_text())
                }
        if self._page[0] != 1:
            return
        partition, offset, length = _RECORD_ID.unpack_from(self._page, 1)
        topic = self._page[1 + _RECORD_ID.size : 1 + _RECORD_ID.size + length].decode(errors="replace")
        record_id = RecordId(topic, partition, offset)
        self.crashes[record_id] = self.crashes.get(record_id, 0) + 1
        self._save()
        self._page[0] = 0

    def _save(self) -> None:
        if self._counts is None:
            return
        unfinished = self._counts.with_name(f"{self._counts.name}.tmp")
        with suppress(OSError):
            unfinished.write_text(json.dumps([[*record_id, count] for record_id, count in self.crashes.items()]))
            unfinished.replace(self._counts)


def _page(path: Path | None) -> mmap.mmap:
    """A page of the file, or of anonymous memory if the file cannot be opened: then it ends with the process."""
    if path is None:
        return mmap.mmap(-1, _SIZE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return mmap.mmap(-1, _SIZE)
    try:
        os.posix_fallocate(file, 0, _SIZE)  # a full disk raises here, not as SIGBUS at the first write
        return mmap.mmap(file, _SIZE)
    except OSError:
        return mmap.mmap(-1, _SIZE)
    finally:
        os.close(file)
