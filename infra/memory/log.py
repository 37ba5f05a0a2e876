"""The log within one process: the same interface as `KafkaLog`, for tests and simulations, without a broker.

The rule: one lock makes every step atomic; what a test sees here holds on Kafka too, except for outages and for time.
"""

import bisect
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import Fenced, LogError, LostPartition, RecordMissing, SendFailed
from penstock.infra.log import TRANSACTION_S, Commits, Committed, Membership, Partition, Start, StartAt, check_commits
from penstock.infra.memory.readers import MemoryMember, MemoryTail
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record

MARKER = 1
"""Offsets a transaction takes in each of its partitions beyond its records, as on Kafka: readers must not expect gapless ones."""


@dataclass(slots=True)
class _Part:
    records: list[Record] = field(default_factory=list)
    end: int = 0

    def append(self, outgoing: Outgoing) -> int:
        """Add a record; returns its offset."""
        offset, self.end = self.end, self.end + 1
        self.records.append(
            Record(
                topic=outgoing.topic,
                partition=outgoing.partition,
                offset=offset,
                timestamp_ms=int(time.time() * 1000),
                key=outgoing.key,
                headers=tuple(outgoing.headers),
                value=bytes(outgoing.value),
            )
        )
        return offset

    def since(self, offset: int, count: int) -> list[Record]:
        """At most `count` records from `offset` on."""
        first = bisect.bisect_left(self.records, offset, key=lambda record: record.offset)
        return self.records[first : first + count]


@dataclass(slots=True)
class _Group:
    members: list[MemoryMember] = field(default_factory=list)
    offsets: dict[Partition, Committed] = field(default_factory=dict)
    generation: int = 0


class MemoryLog:
    """Topics, groups and transactional ids in this process's memory; share one object between threads."""

    def __init__(self) -> None:
        self.change = threading.Condition(threading.RLock())
        self._topics: dict[str, tuple[TopicSpec, list[_Part]]] = {}
        self._groups: dict[str, _Group] = {}
        self.writers: dict[str, object] = {}

    def create_topics(self, specs: Mapping[str, TopicSpec], *, replication_factor: int = -1) -> None:
        """Create the topics that are missing; raises LogError when one that exists has other partitions or settings."""
        with self.change:
            for name, spec in specs.items():
                found, _ = self._topics.get(name, (spec, []))
                if found.partitions != spec.partitions:
                    raise LogError(f"topic {name} has {found.partitions} partitions, {spec.partitions} are wanted")
                if dict(found.configs) != dict(spec.configs):
                    raise LogError(f"topic {name} has settings {dict(found.configs)}, wanted are {dict(spec.configs)}")
                self._topics.setdefault(name, (spec, [_Part() for _ in range(spec.partitions)]))
            self.change.notify_all()

    def topics(self, prefix: str = "") -> list[str]:
        """Names of the topics that start with `prefix`, sorted."""
        with self.change:
            return sorted(name for name in self._topics if name.startswith(prefix))

    def delete_topics(self, names: Iterable[str]) -> None:
        """Delete topics with all their records; those that do not exist are no error."""
        with self.change:
            for name in names:
                self._topics.pop(name, None)

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has; None when it does not exist."""
        with self.change:
            return len(self._topics[topic][1]) if topic in self._topics else None

    def part(self, partition: Partition) -> _Part:
        """The partition itself; raises LogError when there is none."""
        topic, number = partition
        count = self.partitions(topic)
        if count is None:
            raise LogError(f"topic {topic} does not exist (or this user may not see it)")
        if not 0 <= number < count:
            raise LogError(f"topic {topic} has {count} partitions, there is no partition {number}")
        return self._topics[topic][1][number]

    def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """The first offset that is still kept, by partition."""
        with self.change:
            return {partition: 0 for partition in partitions if self.part(partition) is not None}

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """One past the last offset, by partition."""
        with self.change:
            return {partition: self.part(partition).end for partition in partitions}

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """The records at exactly these offsets, in the order asked; raises LogError naming those that are missing."""
        with self.change:
            found = {record.offset: record for record in self.part((topic, partition)).records}
        missing = [offset for offset in offsets if offset not in found]
        if missing:
            raise RecordMissing(f"{topic}/{partition} has no committed record at offset {', '.join(map(str, missing[:10]))}")
        return [found[offset] for offset in offsets]

    def group(self, name: str) -> _Group:
        """A consumer group; made when it is first named."""
        return self._groups.setdefault(name, _Group())

    def append_together(self, records: Sequence[Outgoing], marker: int) -> list[int]:
        """Append all records or, when one has no place, none."""
        with self.change:
            parts = [self.part((record.topic, record.partition)) for record in records]
            offsets = [part.append(record) for part, record in zip(parts, records, strict=True)]
            for part in {id(part): part for part in parts}.values():
                part.end += marker
            self.change.notify_all()
            return offsets

    def tail(self, starts: Mapping[Partition, Start], *, committed: bool = True, group: str | None = None) -> MemoryTail:
        """A reader of exactly these partitions; `group` only keeps offsets for it."""
        return MemoryTail(self, starts, group=group)

    def member(
        self, group: str, topics: Sequence[str], *, max_records: int = 1000, max_bytes: int = 64 << 20, start_at: StartAt | None = None
    ) -> MemoryMember:
        """A member of a consumer group; equal partition numbers of topics with equal counts go to one member."""
        return MemoryMember(self, group, topics, max_records=max_records, start_at=start_at)

    def wait_out(self, give_up_s: float, *, say: Callable[[str], None] | None = None) -> None:
        """There is no outage."""

    def producer(self, *, max_in_flight_bytes: int = 64 << 20, give_up_s: float | None = None, linger_ms: float = 10.0) -> "MemoryProducer":
        """A writer of single records."""
        return MemoryProducer(self)

    def transactions(
        self, transactional_id: str, *, timeout_s: float = TRANSACTION_S, give_up_s: float | None = None
    ) -> "MemoryTransactions":
        """A writer of transactions; it takes the id from any other that has it."""
        return MemoryTransactions(self, transactional_id)

    def costs(self) -> dict[str, float]:
        """No CPU time worth counting."""
        return {"send_s": 0.0, "poll_s": 0.0, "io_s": 0.0}

    def close(self) -> None:
        """Nothing is held."""


class MemoryPending:
    """A record that is already written, or refused."""

    def __init__(self, offset: int, failure: LogError | None = None) -> None:
        self._offset, self._failure = offset, failure

    def offset(self, timeout_s: float | None = None) -> int:
        """The record's offset."""
        if self._failure is not None:
            raise self._failure
        return self._offset

    def done(self) -> bool:
        """Always true."""
        return True

    def error(self) -> Exception | None:
        """Why it was not written; None when it was."""
        return self._failure


class MemoryProducer:
    """Writes each record at once."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def send(self, outgoing: Outgoing) -> MemoryPending:
        """Write a record; raises SendFailed or LogError when there is no such topic or partition."""
        return MemoryPending(self._log.append_together([outgoing], 0)[0])

    def check(self) -> None:
        """Nothing is ever lost."""

    def flush(self, timeout_s: float = 60.0) -> None:
        """Everything is written already."""

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing is held."""


class MemoryTransactions:
    """The newest object for an id is its only writer."""

    def __init__(self, log: MemoryLog, transactional_id: str) -> None:
        self._log, self._id, self._token = log, transactional_id, object()
        with log.change:
            log.writers[transactional_id] = self._token

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]:
        """Write all of it or nothing and return the records' offsets; raises Fenced, LostPartition or SendFailed."""
        if offsets and member is None:
            raise ValueError("offsets in a transaction need the membership they are committed for")
        check_commits(offsets or {})
        with self._log.change:
            if self._log.writers.get(self._id) is not self._token:
                raise Fenced(f"another process writes as {self._id} now: this one must stop")
            if offsets and member is not None:
                group = self._log.group(member.group)
                if group.generation != member.generation or member.member_id not in {one.member_id for one in group.members}:
                    raise LostPartition(f"nothing was written as {self._id}: the consumer group has moved on to another generation")
            try:
                written = self._log.append_together(records, MARKER)
            except LogError as error:
                raise SendFailed(f"nothing was written as {self._id}: {error}") from error
            if offsets and member is not None:
                group.offsets |= {partition: Committed(offset=offset, metadata=text) for partition, (offset, text) in offsets.items()}
            return written

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing is held."""
