"""Topics, consumer groups and transactional ids of the in-memory log, its tails and its group members.

State is read and changed only under the lock `State.change`. Readers have positions only; the state decides which records are committed.
"""

import bisect
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.log import Assigned, Commits, Committed, Event, Membership, Partition, Pools, Records, Revoked, Start, check_commits
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record

MARKER = 1
"""Offsets that a transaction takes in each partition in addition to its records, as on Kafka: readers must expect gaps."""


@dataclass(slots=True)
class Part:
    """One partition of a topic."""

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
                topic=outgoing.topic, partition=outgoing.partition, offset=offset, timestamp_ms=int(time.time() * 1000),
                key=outgoing.key, headers=tuple(outgoing.headers), value=bytes(outgoing.value),
            )
        )  # fmt: skip
        return offset

    def between(self, first: int, end: int, count: int) -> list[Record]:
        """Return at most `count` records from offset `first` up to below `end`."""
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
        """Make the records visible to readers; no effect if called again."""
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
            raise LogError(f"topic {topic} does not exist, or this user has no permission to see it")
        parts = self.topics[topic][1]
        if not 0 <= number < len(parts):
            raise LogError(f"topic {topic} has no partition {number}; its partitions are 0 to {len(parts) - 1}")
        return parts[number]

    def group(self, name: str) -> Group:
        """Return a consumer group, created when it is first named."""
        return self.groups.setdefault(name, Group())

    def rebalance(self, group: Group) -> None:
        """Start a new generation, in which every member gets a new assignment."""
        group.generation += 1
        self.change.notify_all()


class _Reader:
    """Positions in partitions, from which committed records are read; with `jumps`, a deleted position moves on instead of raising."""

    def __init__(self, state: State, *, jumps: bool = False) -> None:
        self._state, self._jumps = state, jumps
        self.positions: dict[Partition, int] = {}
        self._cuts: dict[Partition, int] = {}
        """Number of times each partition had been truncated when it was last read."""

    def move(self, partition: Partition, offset: int) -> None:
        self.positions[partition] = offset
        self._cuts[partition] = len(self._state.part(partition).cuts)

    def advance(self, limit: int) -> list[Record]:
        """Return up to `limit` committed records in partition order; move positions past them, and past aborted ones to the stable end."""
        records: list[Record] = []
        for partition, position in self.positions.items():
            part = self._state.part(partition)
            first = self._valid(partition, part, position)
            batch = part.between(first, part.stable_end, limit - len(records))
            records += batch
            full = len(records) >= limit
            self.positions[partition] = batch[-1].offset + 1 if full and batch else first if full else max(first, part.stable_end)
            if full:
                break
        return records

    def _valid(self, partition: Partition, part: Part, position: int) -> int:
        """Return the offset to read from: `position`, or the end of a truncation since the last read.

        If it does not exist, the first retained offset with `jumps`, otherwise raises `RecordMissing`.
        """
        seen, self._cuts[partition] = self._cuts[partition], len(part.cuts)
        position = min(position, *part.cuts[seen:]) if part.cuts[seen:] else position
        exists = part.start <= position <= part.end
        if not exists and not self._jumps:
            where = f"{partition[0]}/{partition[1]}"
            raise RecordMissing(
                f"{where}: offset {position} is missing, it holds {part.start} to {part.end - 1}: records were deleted, or lost by a broker"
            )
        return position if exists else part.start


class MemoryTail:
    """Reads named partitions, without a consumer group."""

    outage_s = 0.0

    def __init__(self, state: State, starts: Mapping[Partition, Start], *, group: str | None) -> None:
        self._state, self._group = state, group
        self._reader = _Reader(state)
        self.add(starts)

    def add(self, partitions: Mapping[Partition, Start]) -> None:
        """Read further partitions; one that is already read continues at the new start."""
        with self._state.change:
            for partition, start in partitions.items():
                part = self._state.part(partition)
                if not isinstance(start, int) and start not in ("earliest", "latest"):
                    raise ValueError(f"a tail starts at 'earliest', 'latest' or an offset, not at {start!r}")
                self._reader.move(partition, start if isinstance(start, int) else part.start if start == "earliest" else part.stable_end)

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        with self._state.change:
            return self._state.change.wait_for(lambda: self._reader.advance(max_records), timeout_s)

    def read_to_end(self, timeout_s: float = 60.0, *, include_open: bool = False) -> list[Record]:
        """Return everything up to the current end offsets; with `include_open`, first waits for open transactions."""
        with self._state.change:
            parts = {partition: self._state.part(partition) for partition in self._reader.positions}
            ends = {partition: part.end for partition, part in parts.items()}
            if include_open and not self._state.change.wait_for(
                lambda: all(part.stable_end >= ends[partition] for partition, part in parts.items()), timeout_s
            ):
                raise LogError(f"reading to the end took longer than {timeout_s:.0f} s: a transaction is open")
            return self._reader.advance(1 << 62)

    @property
    def partitions(self) -> list[Partition]:
        return list(self._reader.positions)

    def position(self, partition: Partition) -> int:
        if partition not in self._reader.positions:
            raise LogError(f"{partition[0]}/{partition[1]} is not among the partitions of this reader")
        return self._reader.positions[partition]

    def seek(self, partition: Partition, offset: int) -> None:
        self.position(partition)
        self._reader.move(partition, offset)

    def commit(self, offsets: Commits, timeout_s: float = 10.0) -> None:
        check_commits(offsets)
        if self._group is None:
            raise LogError("a reader without a consumer group cannot commit offsets")
        with self._state.change:
            commits = {partition: Committed(offset=offset, metadata=text) for partition, (offset, text) in offsets.items()}
            self._state.group(self._group).offsets |= commits

    def committed(self, timeout_s: float = 10.0) -> dict[Partition, Committed]:
        if self._group is None:
            raise LogError("a reader without a consumer group has no committed offsets")
        with self._state.change:
            commits = self._state.group(self._group).offsets
            return {partition: commits.get(partition, Committed(offset=None)) for partition in self._reader.positions}

    def close(self, timeout_s: float = 3.0) -> None:
        """Do nothing: there are no resources to close."""


class MemoryMember:
    """One member of a consumer group; its first take after a rebalance returns Revoked, then Assigned, then records."""

    outage_s = 0.0

    def __init__(self, state: State, group: str, topics: Sequence[str], *, max_records: int, pools: Pools | None = None) -> None:
        self._state, self._name, self._topics, self._pools = state, group, tuple(topics), pools
        self._max_records = max_records
        self._reader = _Reader(state, jumps=True)
        self._membership: Membership | None = None
        self._assigned: tuple[Partition, ...] = ()
        self.member_id = f"member-{id(self):x}"
        with state.change:
            for topic in topics:
                state.part((topic, 0))
            self._group = state.group(group)
            if pools is not None:
                self._group.pools[self.member_id] = pools.own
            self._group.members[self.member_id] = self._topics
            state.rebalance(self._group)

    def _share(self) -> list[Partition]:
        """Return this member's partitions: a contiguous range of each topic, as by Kafka's range assignor, or its pool's share."""
        if self._pools is not None:
            numbers = self._pools.share_out({member: self._group.pools[member] for member in self._group.members})[self.member_id]
            return [(topic, number) for topic in self._topics for number in numbers]
        share: list[Partition] = []
        for topic in self._topics:
            readers = [member for member, topics in self._group.members.items() if topic in topics]
            index = readers.index(self.member_id)
            count, extra = divmod(len(self._state.topics[topic][1]), len(readers))
            first = index * count + min(index, extra)
            share += [(topic, number) for number in range(first, first + count + (index < extra))]
        return share

    def take(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        with self._state.change:
            self._state.change.wait_for(lambda: self._advance(events), timeout_s)
        return events

    def _advance(self, events: list[Event]) -> bool:
        """Append a rebalance's `Revoked` and `Assigned`, and new records, to `events`; return True if there are any."""
        if self.member_id not in self._group.members:  # evicted while it was silent: it joins again, as Kafka's members do
            self._group.members[self.member_id] = self._topics
            self._state.rebalance(self._group)
        if self._membership is None or self._membership.generation != self._group.generation:
            if self._membership is not None:
                events.append(Revoked(partitions=frozenset(self._assigned)))
            self._assigned = tuple(self._share())
            self._membership = Membership(group=self._name, generation=self._group.generation, member_id=self.member_id)
            committed = {partition: self._group.offsets.get(partition, Committed(offset=None)) for partition in self._assigned}
            starts = {partition: commit.offset or 0 for partition, commit in committed.items()}
            self._reader.positions = {}
            for partition, start in starts.items():
                self._reader.move(partition, start)
            events.append(Assigned(partitions=committed, membership=self._membership))
        records = self._reader.advance(self._max_records)
        if records:
            events.append(Records(records=records))
        return bool(events)

    def commit(self, offsets: Commits) -> bool:
        """Commit offsets for the group; return False and commit none if a partition is not owned now."""
        check_commits(offsets)
        with self._state.change:
            current = self._membership is not None and self._membership.generation == self._group.generation
            if not current or not set(self._assigned).issuperset(offsets):
                return False
            self._group.offsets |= {partition: Committed(offset=offset, metadata=text) for partition, (offset, text) in offsets.items()}
            return True

    def membership(self) -> Membership | None:
        return self._membership

    def close(self, timeout_s: float = 3.0) -> None:
        with self._state.change:
            if self._group.members.pop(self.member_id, None) is not None:
                self._state.rebalance(self._group)
