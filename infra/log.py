"""The protocol of the log, implemented by `KafkaLog` and `MemoryLog`; one test file runs on both.

Every call has a time limit and returns a value or raises a `LogError`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.infra.errors import LogError, Unrecoverable
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record

NO_RECORD = "it was deleted or aborted, is the end marker of a transaction, or is not written yet"
"""Reasons for which no committed record is at an offset."""

GIVE_UP_S = 600.0
"""Longest wait of clients for an unreachable broker, unless the run sets kafka.give_up_s."""

TRANSACTION_S = 10.0
"""The broker aborts a transaction that is open for longer: a crashed writer blocks readers of committed records for this long."""

SESSION_S = 6.0
"""A group member that is silent for this long loses its partitions: the least a broker allows by default."""

Partition = tuple[str, int]

Start = int | Literal["earliest", "latest"]
"""Start of a tail: an offset, the first retained record, or the end, for records written from then on."""

MAX_COMMIT_METADATA = 4096
"""[bytes] Longest text that a group may store with a committed offset: the broker's default (offset.metadata.max.bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The offset and metadata a consumer group has committed for one partition."""

    offset: int | None
    """The next record to read; None if nothing was ever committed."""
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A member's identity in its last `Assigned`; the log refuses transactions with that of an earlier generation."""

    group: str
    generation: int
    member_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The member owns exactly these partitions."""

    partitions: Mapping[Partition, Committed]
    membership: Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """The member no longer owns these partitions and receives no more of their records."""

    partitions: frozenset[Partition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Records of owned partitions, in offset order within each partition."""

    records: Sequence[Record]


Event = Assigned | Revoked | Records


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Rule for sharing partitions in a consumer group: each belongs to the first of its pools that has members."""

    own: str
    """The pool of the member with this object; all other fields are equal for all members."""
    by_partition: tuple[tuple[str, ...], ...]
    """Partition number -> its pools, in order of preference."""

    def share_out(self, members: Mapping[str, str]) -> dict[str, list[int]]:
        """Return member -> numbers of its partitions, ascending; `members` has the pool of each member.

        Example:
            Pools(own="a", by_partition=(("a",), ("b", "a"), ("b",))).share_out({"x": "a"})  # -> {"x": [0, 1]}
        """
        shares: dict[str, list[int]] = {member: [] for member in members}
        present, owned = set(members.values()), dict[str, list[int]]()
        for number, pools in enumerate(self.by_partition):
            if (owner := next((pool for pool in pools if pool in present), None)) is not None:
                owned.setdefault(owner, []).append(number)
        for pool, numbers in owned.items():
            group = sorted(member for member, name in members.items() if name == pool)
            for index, number in enumerate(numbers):
                shares[group[index * len(group) // len(numbers)]].append(number)
        return shares


Commits = Mapping[Partition, tuple[int, str]]
"""Partition -> (offset of the next record to read, metadata of at most 4 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Number of replicas of each record, and how many must have it before it is acknowledged; None: by the size of the cluster."""

    replicas: int | None = None
    """If None, three or the number of brokers."""
    in_sync: int | None = None
    """If None, two or the number of replicas."""
    loss_allowed: bool = False
    """True to accept fewer than two in sync on several brokers: the loss of one node can then lose acknowledged records."""

    def on(self, brokers: int) -> tuple[int, int]:
        """Return (replicas, in-sync replicas) on `brokers` brokers. Raises `ValueError` if that is impossible or could lose records."""
        replicas = min(3, brokers) if self.replicas is None else self.replicas
        in_sync = min(2, replicas) if self.in_sync is None else self.in_sync
        if replicas > brokers:
            raise ValueError(f"kafka.replication_factor: {replicas} replicas need as many brokers, {brokers} are up; remove the key")
        if in_sync > replicas:
            raise ValueError(f"kafka.min_insync_replicas: {in_sync} is more than the {replicas} replicas of a topic; remove the key")
        if brokers > 1 and in_sync < 2 and not self.loss_allowed:
            key = "kafka.replication_factor" if replicas < 2 else "kafka.min_insync_replicas"
            raise ValueError(
                f"{key}: with {replicas} replicas, {in_sync} of them in sync, the loss of one of {brokers} brokers could lose acknowledged "
                "records; remove the key, or set kafka.allow_loss = true"
            )
        return replicas, in_sync


FOLLOWING = Copies()
"""As many replicas as the cluster allows."""


def check_commits(offsets: Commits) -> None:
    """Raise `ValueError` for commit metadata that a broker would reject."""
    for (topic, partition), (_, metadata) in offsets.items():
        size = len(metadata.encode())
        if size > MAX_COMMIT_METADATA:
            raise ValueError(f"the commit metadata of {topic}/{partition} has {size} bytes, limit {MAX_COMMIT_METADATA}")


class Written:
    """The newest offset written to each partition: a later record with a lower offset proves that the log has lost records."""

    def __init__(self) -> None:
        self._newest: dict[Partition, int] = {}

    def check(self, records: Sequence[Outgoing], offsets: Sequence[int]) -> None:
        """Record the offsets of new records. Raises `Unrecoverable` if one is not above the newest offset of its partition."""
        for record, offset in zip(records, offsets, strict=True):
            partition = record.topic, record.partition
            if offset <= (newest := self._newest.get(partition, -1)):
                raise Unrecoverable(
                    f"{record.topic}/{record.partition} has lost records: offset {newest} was acknowledged, the next record was written at "
                    f"{offset}. A broker without the newest records became the leader (unclean.leader.election.enable, "
                    "min.insync.replicas), so this process writes no more; see docs/explanation/failures.md"
                )
            self._newest[partition] = offset


class Pending(Protocol):
    """A sent record that may not be acknowledged yet."""

    def offset(self, timeout_s: float | None = None) -> int: ...
    def done(self) -> bool: ...


class Producer(Protocol):
    """Writes single records; safe to share between threads."""

    def send(self, outgoing: Outgoing) -> Pending: ...
    def check(self) -> None: ...
    def flush(self, timeout_s: float = 60.0) -> None: ...
    def close(self, timeout_s: float = 3.0) -> None: ...


class Transactions(Protocol):
    """Writes records and group offsets together or not at all; for one thread.

    Readers see a transaction some milliseconds after `commit` returned; the next owner of the id sees all of it.
    """

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]: ...
    def close(self, timeout_s: float = 3.0) -> None: ...


class Tail(Protocol):
    """Reads named partitions, without a consumer group; for one thread."""

    @property
    def outage_s(self) -> float: ...
    @property
    def partitions(self) -> list[Partition]: ...
    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]: ...
    def read_to_end(self, timeout_s: float = 60.0, *, include_open: bool = False) -> list[Record]: ...
    def add(self, partitions: Mapping[Partition, Start]) -> None: ...
    def seek(self, partition: Partition, offset: int) -> None: ...
    def position(self, partition: Partition) -> int: ...
    def commit(self, offsets: Commits, timeout_s: float = 10.0) -> None: ...
    def committed(self, timeout_s: float = 10.0) -> dict[Partition, Committed]: ...
    def close(self, timeout_s: float = 3.0) -> None: ...


class Member(Protocol):
    """One member of a consumer group; it stays in the group however long its user works between two takes."""

    @property
    def outage_s(self) -> float: ...
    def take(self, timeout_s: float) -> list[Event]: ...
    def commit(self, offsets: Commits) -> bool: ...
    def membership(self) -> Membership | None: ...
    def close(self, timeout_s: float = 3.0) -> None: ...


class Log(Protocol):
    """An append-only log of topics with partitions, groups and transactions.

    During an outage each call waits as long as `wait_out` sets, however short its own time limit, and then raises `LogUnreachable`;
    `give_up_s` of a producer or a writer replaces that limit.
    """

    def wait_out(self, give_up_s: float, *, notify: Callable[[str], None] | None = None) -> None: ...
    def create_topics(self, specs: Mapping[str, TopicSpec], *, copies: Copies = FOLLOWING) -> Sequence[str]: ...
    def topics(self, prefix: str = "") -> list[str]: ...
    def delete_topics(self, names: Iterable[str]) -> None: ...
    def partitions(self, topic: str) -> int | None: ...
    def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]: ...
    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]: ...
    def offsets_at(self, partitions: Iterable[Partition], time_ms: int) -> dict[Partition, int]: ...
    def delete_records(self, before: Mapping[Partition, int]) -> None: ...
    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]: ...
    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, fetch_bytes: int | None = None) -> Tail: ...
    def member(
        self, group: str, topics: Sequence[str], *, max_records: int = 1000, max_bytes: int = 64 << 20, gathers: bool = True,
        session_s: float = SESSION_S, pools: Pools | None = None,
    ) -> Member: ...  # fmt: skip
    def producer(self, *, max_in_flight_bytes: int = 64 << 20, give_up_s: float | None = None, linger_ms: float = 10.0) -> Producer: ...
    def transactions(
        self, transactional_id: str, *, claim: Outgoing | None = None, timeout_s: float = TRANSACTION_S, give_up_s: float | None = None
    ) -> Transactions: ...
    def costs(self) -> dict[str, float]: ...
    def counts(self) -> dict[str, float]: ...
    def close(self) -> None: ...


BATCH = 500
POLL_S = 0.02
"""A transaction's marker at the end of a partition delivers no record: the position is checked this often."""
SILENCE_S = 600.0
"""Timeout for a broker that responds, but sends no record although there are more."""


def drain(
    tail: Tail, ends: Mapping[Partition, int], *, silence_s: float = SILENCE_S, alive: Callable[[], None] = lambda: None
) -> Iterator[Record]:
    """Yield the records of an open tail until it reaches these end offsets; `alive` is called before each poll.

    Raises `LogError` after `silence_s` without a record, not counting outages.
    """
    behind, silent_s = [at for at, end in ends.items() if tail.position(at) < end], 0.0
    while behind:
        alive()
        records = tail.poll(POLL_S, max_records=BATCH)
        silent_s = 0.0 if records or tail.outage_s > 0 else silent_s + POLL_S
        if silent_s >= silence_s:
            unread = ", ".join(f"{topic}/{partition} at {tail.position((topic, partition))}" for topic, partition in behind)
            raise LogError(f"no record arrived for {silence_s:g} s, but these partitions were not read to their end: {unread}")
        yield from records
        behind = [at for at in behind if tail.position(at) < ends[at]]


def read_to_current_end(log: Log, tail: Tail, *, include_open: bool = False) -> Iterator[Record]:
    """Yield the records of an open tail up to the end offsets at the time of the call.

    With `include_open`, waits for the transactions that are open now and yields their records too.
    """
    return drain(tail, log.end_offsets(tail.partitions, committed=not include_open))
