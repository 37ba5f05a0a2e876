"""State of the in-memory log: partitions, consumer groups, transactional ids; read and changed only under the lock `State.change`."""

import bisect
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import LogError
from penstock.infra.log import Committed, Partition
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record

MARKER = 1
"""Offsets that a transaction takes in each partition in addition to its records, as on Kafka: readers must expect gaps."""


@dataclass(slots=True)
class Part:
    """One partition."""

    records: list[Record] = field(default_factory=list)
    start: int = 0
    """The first offset that was not deleted."""
    end: int = 0
    """The offset of the next record."""
    open_transactions: dict["Transaction", int] = field(default_factory=dict)
    """Transactions without a marker here, and the offset of each one's first record."""
    cuts: list[int] = field(default_factory=list)
    """Ends to which the partition was truncated, oldest first."""

    @property
    def stable_end(self) -> int:
        """The last stable offset: readers of committed records get nothing at or after it."""
        return min(self.open_transactions.values(), default=self.end)

    def append(self, outgoing: Outgoing) -> int:
        """Append a record and return its offset."""
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

    def between(self, first: int, end: int, count: int) -> list[Record]:
        """At most `count` records from offset `first` up to below `end`."""
        low = bisect.bisect_left(self.records, first, key=lambda record: record.offset)
        high = bisect.bisect_left(self.records, end, key=lambda record: record.offset)
        return self.records[low : min(high, low + count)]

    def cut(self, end: int) -> None:
        """Lose every record from offset `end` on; the next records reuse their offsets."""
        self.records = self.between(0, end, len(self.records))
        self.open_transactions = {transaction: first for transaction, first in self.open_transactions.items() if first < end}
        self.end = min(self.end, end)
        self.cuts.append(end)


@dataclass(slots=True)
class Group:
    """A consumer group."""

    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Member id -> the topics it reads, in the order of joining."""
    pools: dict[str, str] = field(default_factory=dict)
    """Member id -> its pool, if the group has pools; also of members that have left."""
    offsets: dict[Partition, Committed] = field(default_factory=dict)
    generation: int = 0


class Transaction:
    """Records that, with all later ones, are hidden from readers of committed records until this transaction ends."""

    def __init__(self, state: "State", records: Sequence[Outgoing]) -> None:
        """Write the records. Raises `LogError`, and writes none, if a topic or partition does not exist."""
        self._state = state
        with state.change:
            parts = [state.part((record.topic, record.partition)) for record in records]
            self._parts = list({id(part): part for part in parts}.values())
            for part in self._parts:
                part.open_transactions[self] = part.end
            self.offsets = [part.append(record) for part, record in zip(parts, records, strict=True)]
            self._record_ids = {(id(part), offset) for part, offset in zip(parts, self.offsets, strict=True)}
            state.change.notify_all()

    def commit(self) -> None:
        """Write the markers: readers get the records; without effect the second time."""
        with self._state.change:
            for part in self._parts:
                if part.open_transactions.pop(self, None) is not None:
                    part.end += MARKER
            self._state.change.notify_all()

    def abort(self) -> None:
        """Remove the records; their offsets stay used."""
        with self._state.change:
            for part in self._parts:
                part.records = [record for record in part.records if (id(part), record.offset) not in self._record_ids]
            self.commit()


class State:
    """Topics, groups and writers, shared by all clients of one log."""

    def __init__(self) -> None:
        self.change = threading.Condition(threading.RLock())
        self.topics: dict[str, tuple[TopicSpec, list[Part]]] = {}
        self.groups: dict[str, Group] = {}
        self.writers: dict[str, object] = {}
        """Transactional id -> the token of its newest writer."""
        self.pending: dict[str, Transaction] = {}
        """Transactional id -> its last transaction, committed or about to be."""

    def part(self, partition: Partition) -> Part:
        """Return a partition. Raises `LogError` if it does not exist."""
        topic, number = partition
        if topic not in self.topics:
            raise LogError(f"topic {topic} does not exist (or this user may not see it)")
        parts = self.topics[topic][1]
        if not 0 <= number < len(parts):
            raise LogError(f"topic {topic} has {len(parts)} partitions, there is no partition {number}")
        return parts[number]

    def group(self, name: str) -> Group:
        """Return a consumer group, created when it is first named."""
        return self.groups.setdefault(name, Group())

    def rebalance(self, group: Group) -> None:
        """Start a new generation, in which every member gets a new assignment."""
        group.generation += 1
        self.change.notify_all()
