"""`KafkaLog`: the log on Apache Kafka."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any
from weakref import WeakSet

from penstock.infra.errors import LogUnreachable
from penstock.infra.kafka.admin import Admin
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.guards import first_readable
from penstock.infra.kafka.member import KafkaMember
from penstock.infra.kafka.outage import Contact
from penstock.infra.kafka.settings import Connection
from penstock.infra.kafka.tail import KafkaTail, OffsetReader
from penstock.infra.kafka.writers import KafkaProducerOfRecords, KafkaTransactions
from penstock.infra.log import GIVE_UP_S, SESSION_S, TRANSACTION_S, Partition, Pools, Start
from penstock.topics.wire.record import Outgoing, Record

# They warn if a busy machine leaves the client's thread without a core, and if a group's coordinator moves, which the client follows.
for _name in ("kafka.net.selector", "kafka.coordinator"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_LONGEST_S = 7 * 86400.0
"""Limit of client settings, which count milliseconds in 32 bits."""
WAIT_NOTE_S = 30.0
"""Time between two lines about a wait for a broker."""


class KafkaLog(Admin):
    """A connection to one Kafka cluster. Raises `LogUnreachable` if no broker responds within `unreachable_after_s`."""

    def __init__(
        self, bootstrap: str, *, client_id: str = "penstock", security: Mapping[str, Any] | None = None,
        unreachable_after_s: float = 10.0, give_up_s: float = GIVE_UP_S,
    ) -> None:  # fmt: skip
        connection = Connection(
            bootstrap=bootstrap, client_id=client_id, security=dict(security or {}), unreachable_after_s=unreachable_after_s
        )
        super().__init__(connection, CpuCosts(), Contact(bootstrap, give_up_s))
        self.connect()
        self._members: WeakSet[KafkaMember] = WeakSet()
        self._single_records = OffsetReader(self)
        self.bootstrap = bootstrap

    def wait_out(self, give_up_s: float, *, notify: Callable[[str], None] | None = None) -> None:
        """Let clients made from now on wait `give_up_s` for an unreachable broker; `notify` gets a line when an outage starts and ends."""
        self.contact.give_up_s = give_up_s
        if notify is not None:
            self.contact.report_to(notify)

    def beginning_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return partition -> the first offset that retention has not deleted."""
        return self.offsets(partitions, end=False, committed=True)

    def offsets_at(self, partitions: Iterable[Partition], time_ms: int) -> dict[Partition, int]:
        """Return partition -> offset of the first record at or after this time, the end offset if there is none."""
        partitions = list(partitions)
        ends = self.offsets(partitions, end=True, committed=False)
        offsets = self.offsets(partitions, end=False, committed=False, time_ms=time_ms)
        return {partition: offset if offset >= 0 else ends[partition] for partition, offset in offsets.items()}

    def end_offsets(self, partitions: Iterable[Partition], *, committed: bool = True) -> dict[Partition, int]:
        """Return partition -> the offset after its last record; with `committed`, at most the start of the first open transaction."""
        return self.offsets(partitions, end=True, committed=committed)

    def tail(self, starts: Mapping[Partition, Start], *, group: str | None = None, fetch_bytes: int | None = None) -> KafkaTail:
        """Return a reader of exactly these partitions; with `group` it can store offsets but does not join.

        `fetch_bytes`: size of one request to a partition, for a caller that needs few of its records.
        """
        return KafkaTail(self, starts, group=group, read_dead_letters=self.read_dead_letters, fetch_bytes=fetch_bytes)

    def member(
        self, group: str, topics: Sequence[str], *, max_records: int = 1000, max_bytes: int = 64 << 20, gathers: bool = True,
        session_s: float = SESSION_S, pools: Pools | None = None,
    ) -> KafkaMember:  # fmt: skip
        """Return a member of a consumer group; equal partition numbers of topics with equal counts go to one member.

        With `gathers` it waits some milliseconds for more after a poll with few records: cheaper, and later. `pools` limits the
        partitions it may own; either all members of a group have pools or none.
        """
        member = KafkaMember(
            self, group, topics, max_records=max_records, max_bytes=max_bytes, gathers=gathers, session_s=session_s,
            read_dead_letters=self.read_dead_letters, pools=pools,
        )  # fmt: skip
        self._members.add(member)
        return member

    def producer(
        self, *, max_in_flight_bytes: int = 64 << 20, give_up_s: float | None = None, linger_ms: float = 10.0
    ) -> KafkaProducerOfRecords:
        """Return a writer of single records; use `linger_ms` 0 if the caller waits for each record."""
        return KafkaProducerOfRecords(
            self, max_in_flight_bytes=max_in_flight_bytes, give_up_s=self._patience_s(give_up_s), linger_ms=linger_ms
        )

    def read_dead_letters(self, topic: str) -> list[Record]:
        """Return the records of a dead-letter topic, for a reader that has met an unreadable record; none if the topic is missing."""
        if self.partitions(topic) is None:
            return []
        with closing(KafkaTail(self, {(topic, 0): "earliest"}, group=None)) as tail:  # one that does not read this topic at damage
            return tail.read_to_end()

    def first_readable(self, partition: Partition, offset: int) -> int:
        """Return the first offset from `offset` on that is not damaged; `offset` itself if it can be read."""
        return first_readable(self, lambda start: KafkaTail(self, {partition: start}, group=None), partition, offset)

    def _newest(self, topic: str, partition: int, key: bytes | None) -> bytes | None:
        """Return the value of the newest record with this key among all written before the call; None if there is none."""
        with closing(self.tail({(topic, partition): "earliest"})) as tail:
            return next((record.value for record in reversed(tail.read_to_end(include_open=True)) if record.key == key), None)

    def _patience_s(self, give_up_s: float | None) -> float:
        return min(self.contact.give_up_s if give_up_s is None else give_up_s, _LONGEST_S)

    def transactions(
        self, transactional_id: str, *, claim: Outgoing | None = None, timeout_s: float = TRANSACTION_S, give_up_s: float | None = None
    ) -> KafkaTransactions:
        """Return a writer of transactions; it takes the id over from any other process.

        `claim` is written first. A writer that the broker fences continues only if the newest record with the claim's key is its own
        claim, and never without a claim. So the claim's value must be unique to this process.
        """
        return KafkaTransactions(
            self, lambda topic, partition, offset: bool(self._single_records.fetch((topic, partition), [offset], timeout_s=10.0)),
            self._newest, transactional_id=transactional_id, claim=claim, timeout_s=timeout_s, give_up_s=self._patience_s(give_up_s),
        )  # fmt: skip

    def read(self, topic: str, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0) -> list[Record]:
        """Return the committed records at exactly these offsets, in this order. Raises `RecordMissing` with the missing offsets.

        Waits for an open transaction that hides an offset: partitions learn of a commit at different times.
        """
        return self._single_records.read((topic, partition), offsets, timeout_s=timeout_s)

    def costs(self) -> dict[str, float]:
        """Return CPU seconds so far: `send_s` and `poll_s` in calls and members' threads, `io_s` on network threads."""
        return self.cpu.totals()

    def counts(self) -> dict[str, float]:
        """Return events of this log's clients so far, seconds of the broker's silence, and `lag`: records that members have not taken."""
        counts = {name: float(self.contact.counts[name]) for name in ("fenced", "rebalances", "transaction_retries")}
        counts["broker_silent_s"] = self.contact.silent_s
        members = list(self._members)
        return {**counts, "lag": float(sum(member.lag() for member in members))} if members else counts

    def close(self) -> None:
        """Close the log's own clients; users close their tails, members and writers."""
        self._single_records.close()
        super().close()
        self.contact.close()


def await_broker(
    connect: Callable[[], KafkaLog], wait_s: float, *, notify: Callable[[str], None], stop: threading.Event | None = None
) -> KafkaLog:
    """Call `connect` until a broker responds. Raises `LogUnreachable` after `wait_s`, or once `stop` is set."""
    stop, start_s, next_s = stop or threading.Event(), time.monotonic(), 0.0
    while True:
        try:
            return connect()
        except LogUnreachable as error:
            waited_s = time.monotonic() - start_s
            if not wait_s or stop.is_set():
                raise
            if waited_s >= wait_s:
                raise LogUnreachable(f"no broker was reachable within {wait_s:g} s (--wait-broker): {error}") from None
            if waited_s >= next_s:
                notify(f"waiting for a broker, {wait_s - waited_s:.0f} s at most: {error}")
                next_s = waited_s + WAIT_NOTE_S
            stop.wait(min(1.0, wait_s - waited_s))
