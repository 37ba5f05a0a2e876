"""Checks the records between the trainer's chunks in `weights`: each is a duplicate or goes to the dead-letter topic.

Each such record is read once; a version waits at most `READ_LIMIT_S` for that.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.pipeline.runtime.session import Session
from penstock.topics import weights
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

READ_LIMIT_S = 5.0
"""Longest time that one version waits for the gaps between chunks; the remaining ones are read before the next version."""


@dataclass(slots=True)
class ChunkGaps:
    """Tracks the offsets of the trainer's chunks and reads the records between them."""

    session: Session
    _next: dict[int, int] = field(default_factory=dict)
    _unread: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Partition, start offset and end offset of the gaps that are not read yet."""

    @property
    def ends(self) -> Mapping[int, int]:
        """Chunk partition -> offset after the trainer's newest chunk."""
        return self._next

    def skip(self, manifests: Iterable[Manifest]) -> None:
        """Start after the chunks of these versions: their publisher has read the gaps before."""
        for manifest in manifests:
            for partition, offset in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True):
                self._next[partition] = max(self._next.get(partition, 0), offset + 1)

    def read_to(self, offsets: Iterable[tuple[int, int]]) -> None:
        """Read the gaps before these (partition, offset) pairs: the newest chunks, or the ends of the partitions."""
        for partition, offset in sorted(offsets):
            start = self._next.get(partition, 0)
            self._next[partition] = offset + 1
            if start < offset:
                self._unread.append((partition, start, offset))
        until = time.monotonic() + READ_LIMIT_S
        while self._unread and time.monotonic() < until:
            partition, start, end = self._unread.popleft()
            if (position := self._read_gap(partition, start, end, until=until)) < end:
                self._unread.appendleft((partition, position, end))

    def _read_gap(self, partition: int, start: int, end: int, *, until: float) -> int:
        """Check the records from `start` on, a few at a time as each may be large; returns the offset of the first unread one."""
        tp = self.session.topic("weights"), partition
        tail = self.session.log.tail({tp: start})
        try:
            while (position := tail.position(tp)) < end and time.monotonic() < until:
                for record in tail.poll(0.2, max_records=100):
                    if record.offset < end:
                        self._check(record)
            return position
        finally:
            tail.close()

    def _check(self, record: Record) -> None:
        try:
            with self.session.dead_letters.decoding(record):
                version = weights.read_chunk(record, run=self.session.run)[1].version
        except Unusable as error:
            self.session.dead_letters.write(record, error)
        else:  # a copy, or a chunk that an earlier trainer sent before it crashed
            self.session.reporter.duplicate(f"chunk of version {version} at {record.topic}/{record.partition}/{record.offset}")
