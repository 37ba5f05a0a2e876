"""Records in the chunk partitions of `weights` that the trainer did not send: each is set aside or counted as a duplicate.

The rule: every record between two of our own chunks is read once, and reading holds up a version only briefly.
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
"""How long one version waits at most for the gaps between chunks to be read; what is left is read before the next one."""


@dataclass(slots=True)
class ChunkGaps:
    """Follows where our chunks lie, and reads what lies between them."""

    session: Session
    _next: dict[int, int] = field(default_factory=dict)
    """Chunk partition -> offset after our newest chunk there."""
    _unread: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Partition, first offset and end of the gaps that are not read yet."""

    @property
    def ends(self) -> Mapping[int, int]:
        """Chunk partition -> offset after our newest chunk there."""
        return self._next

    def skip(self, manifests: Iterable[Manifest]) -> None:
        """Begin after the chunks of these versions: whoever published them has read the gaps before."""
        for manifest in manifests:
            for partition, offset in zip(manifest.chunk_partitions, manifest.chunk_offsets, strict=True):
                self._next[partition] = max(self._next.get(partition, 0), offset + 1)

    def read_to(self, offsets: Iterable[tuple[int, int]]) -> None:
        """Read the gaps before these (partition, offset) pairs: our newest chunks, or the ends of the partitions."""
        for partition, offset in sorted(offsets):
            begin = self._next.get(partition, 0)
            self._next[partition] = offset + 1
            if begin < offset:
                self._unread.append((partition, begin, offset))
        until = time.monotonic() + READ_LIMIT_S
        while self._unread and time.monotonic() < until:
            partition, begin, end = self._unread.popleft()
            if (position := self._read_gap(partition, begin, end, until=until)) < end:
                self._unread.appendleft((partition, position, end))

    def _read_gap(self, partition: int, begin: int, end: int, *, until: float) -> int:
        """Check the records from `begin` on, a few at a time as each may be large; returns the offset of the first that was not read."""
        place = self.session.topic("weights"), partition
        tail = self.session.log.tail({place: begin})
        try:
            while (position := tail.position(place)) < end and time.monotonic() < until:
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
        else:  # a copy, or a chunk that an earlier trainer had sent when it died
            self.session.reporter.duplicate(f"chunk of version {version} at {record.topic}/{record.partition}/{record.offset}")
