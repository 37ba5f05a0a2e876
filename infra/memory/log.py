"""The log within one process: the interface of `KafkaLog` without a broker, for tests and simulations.

One lock makes every step atomic. Methods behave like those of `KafkaLog` and its clients, except for outages and time.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.infra.errors import Fenced, LogError, LostPartition, RecordMissing, SendFailed
from penstock.infra.log import (
    FOLLOWING,
    NO_RECORD,
    SESSION_S,
    TRANSACTION_S,
    Commits,
    Committed,
    Copies,
    Membership,
    Partition,
    Pools,
    Start,
    Written,
    check_commits,
)
from penstock.infra.memory.state import MemoryMember, MemoryTail, Part, State, Transaction
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record


class MemoryPending:
    """A record that is already written."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self, timeout_s: float | None = None) -> int:
        return self._offset

    def done(self) -> bool:
        return True


class MemoryProducer:
    """Writes each record at once."""

    def __init__(self, state: State) -> None:
        self._state = state

    def send(self, outgoing: Outgoing) -> MemoryPending:
        with self._state.change:
            offset = self._state.part((outgoing.topic, outgoing.partition)).append(outgoing)
            self._state.change.notify_all()
        return MemoryPending(offset)

    def check(self) -> None:
        """Do nothing: no record is ever lost."""

    def flush(self, timeout_s: float = 60.0) -> None:
        """Do nothing: every record is already written."""

    def close(self, timeout_s: float = 3.0) -> None:
        """Do nothing: there are no resources to close."""


class MemoryTransactions:
    """Writes transactions with one id; a new instance for the id completes its predecessor's transaction and fences it."""

    def __init__(self, state: State, transactional_id: str, *, markers_late_s: float) -> None:
        self._state, self._id, self._token, self._late_s = state, transactional_id, object(), markers_late_s
        self._written = Written()
        with state.change:
            state.writers[transactional_id] = self._token
            self._settle()

    def _settle(self) -> None:
        """Complete the last transaction of this id, as a broker does before it starts the next."""
        last = self._state.pending.pop(self._id, None)
        if last is not None:
            last.commit()

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]:
        """Write everything or nothing and return the records' offsets. Raises the errors of `KafkaTransactions.commit`."""
        if offsets and member is None:
            raise ValueError("offsets can be committed in a transaction only together with the consumer group's generation")
        check_commits(offsets or {})
        with self._state.change:
            if self._state.writers.get(self._id) is not self._token:
                raise Fenced(f"another process now writes with the transactional id {self._id}: this process must stop")
            self._settle()
            group = self._state.group(member.group) if offsets and member is not None else None
            if group and member and (group.generation != member.generation or member.member_id not in group.members):
                raise LostPartition(f"the transaction of {self._id} wrote nothing: the consumer group has moved on to another generation")
            try:
                transaction = Transaction(self._state, records)
            except LogError as error:
                raise SendFailed(f"the transaction of {self._id} wrote nothing: {error}") from error
            if group is not None:
                group.offsets |= {
                    partition: Committed(offset=offset, metadata=text) for partition, (offset, text) in (offsets or {}).items()
                }
            if self._late_s:
                self._state.pending[self._id] = transaction
                marker = threading.Timer(self._late_s, transaction.commit)
                marker.daemon = True
                marker.start()
            else:
                transaction.commit()
            self._written.check(records, transaction.offsets)
            return transaction.offsets

    def close(self, timeout_s: float = 3.0) -> None:
        """Do nothing: there are no resources to close."""


class MemoryLog:
    """Topics, groups and transactional ids in this process's memory; share one object between threads.

    `markers_late_s`: delay between a commit and its visibility to readers, as on a broker that is slow to write markers.
    """

    def __init__(self, *, markers_late_s: float = 0.0) -> None:
        self._state, self._markers_late_s = State(), markers_late_s

    def open_transaction(self, records: Sequence[Outgoing]) -> Transaction:
        """Write `records` as another process would that has not committed them yet: they block readers of committed records."""
        return Transaction(self._state, records)

    def truncate(self, partition: Partition, end: int) -> None:
        """Lose the records from offset `end` on, as when a lagging replica becomes the leader (unclean.leader.election)."""
        with self._state.change:
            self._state.part(partition).cut(end)
            self._state.change.notify_all()

    def evict(self, group: str, member_id: str) -> None:
        """Remove a member of a group, as a broker does after its session timeout."""
        with self._state.change:
            if self._state.group(group).members.pop(member_id, None) is not None:
                self._state.rebalance(self._state.group(group))

    def create_topics(self, specs: Mapping[str, TopicSpec], *, copies: Copies = FOLLOWING) -> list[str]:
        """Create the missing topics. Raises `LogError` if an existing one has other partitions or settings."""
        with self._state.change:
            for name, spec in specs.items():
                existing, _ = self._state.topics.get(name, (spec, []))
                if existing.partitions != spec.partitions:
                    raise LogError(f"topic {name} has {existing.partitions} partitions, expected {spec.partitions}")
                if dict(existing.configs) != dict(spec.configs):
                    raise LogError(f"topic {name} has settings {dict(existing.configs)}, expected {dict(spec.configs)}")
                self._state.topics.setdefault(name, (spec, [Part() for _ in range(spec.partitions)]))
            self._state.change.notify_all()
        return []

    def topics(self, prefix: str = "") -> list[str]:
        with self._state.change:
            return sorted(name for name in self._state.topics if name.startswith(prefix))

    def delete_topics(self, names: Iterable[str]) -> None:
        with self._state.change:
            for name in names:
                self._state.topics.pop(name, None)

    def partitions(self, topic: str) -> int | None:
        with self._state.change:
            return len(self._state.topics[topic][1]) if topic in self._state.topics else None

    def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        with self._state.change:
            return {partition: self._state.part(partition).start for partition in partitions}

    def offsets_at(self, partitions: Iterable[Partition], time_ms: int) -> dict[Partition, int]:
        """Return partition -> offset of the first record at or after this time, the end offset if there is none."""
        with self._state.change:
            parts = {partition: self._state.part(partition) for partition in partitions}
            return {
                partition: min((record.offset for record in part.records if record.timestamp_ms >= time_ms), default=part.end)
                for partition, part in parts.items()
            }

    def delete_records(self, before: Mapping[Partition, int]) -> None:
        with self._state.change:
            for partition, offset in before.items():
                part = self._state.part(partition)
                part.start = max(part.start, min(offset, part.end))
                part.records = [record for record in part.records if record.offset >= part.start]

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        with self._state.change:
            parts = {partition: self._state.part(partition) for partition in partitions}
            return {partition: part.stable_end if committed else part.end for partition, part in parts.items()}

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """Return the committed records at exactly these offsets, in this order. Raises `RecordMissing`, or `LogError` after `timeout_s`."""
        where = f"{topic}/{partition}"
        with self._state.change:
            part = self._state.part((topic, partition))
            if not self._state.change.wait_for(
                lambda: max(offsets, default=-1) < part.stable_end or part.stable_end == part.end, timeout_s
            ):
                raise LogError(f"reading {where} took too long: a transaction is still open")
            records = {record.offset: record for record in part.records}
        missing = [offset for offset in offsets if offset not in records]
        if missing:
            raise RecordMissing(f"{where} has no committed record at offset {', '.join(map(str, missing[:10]))}: {NO_RECORD}")
        return [records[offset] for offset in offsets]

    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, fetch_bytes: int | None = None) -> MemoryTail:
        """Return a reader of exactly these partitions; with `group` it can store offsets. It prefetches nothing."""
        return MemoryTail(self._state, starts, group=group)

    def member(
        self, group: str, topics: Sequence[str], *, max_records: int = 1000, max_bytes: int = 64 << 20, gathers: bool = True,
        session_s: float = SESSION_S, pools: Pools | None = None,
    ) -> MemoryMember:  # fmt: skip
        return MemoryMember(self._state, group, topics, max_records=max_records, pools=pools)

    def wait_out(self, give_up_s: float, *, notify: Callable[[str], None] | None = None) -> None:
        """Do nothing: there are no outages."""

    def producer(self, *, max_in_flight_bytes: int = 64 << 20, give_up_s: float | None = None, linger_ms: float = 10.0) -> MemoryProducer:
        return MemoryProducer(self._state)

    def transactions(
        self, transactional_id: str, *, claim: Outgoing | None = None, timeout_s: float = TRANSACTION_S, give_up_s: float | None = None
    ) -> MemoryTransactions:
        """Return a writer of transactions, which takes the id from any other writer and writes `claim` first."""
        writer = MemoryTransactions(self._state, transactional_id, markers_late_s=self._markers_late_s)
        if claim is not None:
            writer.commit([claim])
        return writer

    def costs(self) -> dict[str, float]:
        """Zeros: the CPU time of the in-memory log does not matter."""
        return {"send_s": 0.0, "poll_s": 0.0, "io_s": 0.0}

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: there are no resources to close."""
