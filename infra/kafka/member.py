"""A member of a consumer group, which a thread of its own keeps in the group.

`take` returns Assigned, its Records, then Revoked; after a Revoked no record of its partitions follows.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka import ConsumerRebalanceListener, TopicPartition, errors
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor, ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.coordinator.assignors.range import RangePartitionAssignor

from penstock.infra.errors import LogError
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka import tail as reading
from penstock.infra.kafka.admin import Admin
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.guards import ReadDeadLetters, TopicIds
from penstock.infra.kafka.outage import Outage
from penstock.infra.log import SESSION_S, Assigned, Commits, Event, Membership, Partition, Pools, Records, Revoked
from penstock.topics.wire.record import Record

_RECORD_OVERHEAD = 512
"""[bytes] that a small record occupies beyond its value."""


class Buffer:
    """A bounded queue of events; safe on any thread.

    `revoke` drops the waiting records and commits of the revoked partitions in the same step that queues the `Revoked` event.
    """

    def __init__(self, *, max_records: int, max_bytes: int) -> None:
        self.max_records, self._max_bytes = max_records, max_bytes
        self.membership: Membership | None = None
        self._events: list[Event] = []
        self._records = self._bytes = 0
        self._owned: frozenset[Partition] = frozenset()
        self._uncommitted: dict[Partition, tuple[int, str]] = {}
        self._sending: set[Partition] = set()
        self._failure: LogError | None = None
        self._change = threading.Condition()

    @property
    def full(self) -> bool:
        """True if no more records should be read."""
        return self._records >= self.max_records or self._bytes >= self._max_bytes

    @property
    def waiting(self) -> int:
        """Number of records not taken yet."""
        return self._records

    def put(self, records: Sequence[Record]) -> None:
        """Queue records, except those of partitions no longer owned."""
        with self._change:
            owned = [record for record in records if (record.topic, record.partition) in self._owned]
            if owned:
                self._records += len(owned)
                self._bytes += sum(len(record.value) for record in owned) + _RECORD_OVERHEAD * len(owned)
                self._events.append(Records(records=owned))
                self._change.notify_all()

    def assign(self, assigned: Assigned) -> None:
        with self._change:
            self._owned = frozenset(assigned.partitions)
            self._events.append(assigned)
            self._change.notify_all()

    def revoke(self) -> None:
        """Drop the waiting records and commits of all owned partitions and queue `Revoked`; no effect if no assignment was queued."""
        with self._change:
            if not self._owned and not any(isinstance(event, Assigned) for event in self._events):
                return
            owned, self._owned = self._owned, frozenset()
            self._uncommitted.clear()
            self._sending.clear()
            self._events = [event for event in self._events if not isinstance(event, Records)]
            self._records = self._bytes = 0
            self._events.append(Revoked(partitions=owned))
            self._change.notify_all()

    def end(self, failure: LogError) -> None:
        """Let `take` raise `failure` after the queued events."""
        with self._change:
            self._failure = failure
            self._change.notify_all()

    def wake(self) -> None:
        """Let a waiting thread check its condition again."""
        with self._change:
            self._change.notify_all()

    def take(self, timeout_s: float) -> list[Event]:
        """Return all queued events; waits up to `timeout_s` for the first. Raises the error of `end` once there are no more."""
        with self._change:
            if not self._events and self._failure is None:
                self._change.wait_for(lambda: self._events or self._failure is not None, timeout_s)
            events, self._events = self._events, []
            if not events and self._failure is not None:
                raise self._failure
            self._records = self._bytes = 0
            for event in events:
                if isinstance(event, Assigned):
                    self.membership = event.membership
            self._change.notify_all()
            return events

    def wait_for_room(self, timeout_s: float) -> None:
        """Wait until records are taken, for `timeout_s` at most."""
        with self._change:
            self._change.wait_for(lambda: not self.full, timeout_s)

    def add_commits(self, offsets: Commits) -> bool:
        """Queue offsets to commit; returns False and queues none if a partition is not owned."""
        with self._change:
            if not self._owned.issuperset(offsets):
                return False
            self._uncommitted.update(offsets)
            self._sending.update(offsets)
            return True

    def unsent_commits(self) -> Commits:
        """Commits that must be sent again because they failed; they count as sent from this call on."""
        with self._change:
            unsent = {partition: commit for partition, commit in self._uncommitted.items() if partition not in self._sending}
            self._sending.update(unsent)
            return unsent

    def committed(self, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """Record that the log has stored these offsets."""
        with self._change:
            for partition, stored in offsets.items():
                if self._uncommitted.get(partition) == stored:
                    del self._uncommitted[partition]
                    self._sending.discard(partition)

    def uncommitted(self, offsets: Mapping[Partition, tuple[int, str]], error: BaseException) -> None:
        """Record that a commit failed: it is void if the group is rebalancing, and sent again after an outage."""
        log.debug("commit of %d partitions failed: %s", len(offsets), error)
        with self._change:
            for partition, failed in offsets.items():
                if self._uncommitted.get(partition) == failed:
                    self._sending.discard(partition)


log = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest wait of the polling thread for records; it delays neither commits nor rebalances."""
FULL_S = 0.1
"""Interval between polls while the buffer is full, so that heartbeats continue."""
JOIN_LIMIT_S = 20.0
"""A member that is connected for this long without completing a join is replaced; each further attempt may take twice as long."""
JOIN_GROWTH = 16
"""Most that the limit grows by: hundreds of members need minutes for a join, and never complete it if all start over every 20 s."""


class KafkaMember:
    """A member of a consumer group whose own thread polls; events and commits pass between that thread and the user's."""

    def __init__(
        self, admin: Admin, group: str, topics: Sequence[str], *, max_records: int, max_bytes: int, gathers: bool = True,
        session_s: float = SESSION_S, pools: Pools | None = None, join_limit_s: float = JOIN_LIMIT_S,
        read_dead_letters: ReadDeadLetters | None = None,
    ) -> None:  # fmt: skip
        self._read_dead_letters, self._session_s = read_dead_letters, session_s
        admin.require((topic, 0) for topic in topics)
        self._admin, self._costs, self._contact = admin, admin.cpu, admin.contact
        self._group, self._topics = group, list(topics)
        self._join_limit_s, self._gathers, self._pools = join_limit_s, gathers, pools
        self._ids = TopicIds(admin)
        self._ids.add(topics)
        self._buffer = Buffer(max_records=max_records, max_bytes=max_bytes)
        self._outage = Outage(admin.contact)
        self._incoming: tuple[frozenset[Any], Membership] | None = None
        self._paused: set[Any] = set()
        self._closing = False
        self._consumer: Any = self._contact.reach(self._join)
        self._joined_at, self._attempts = time.monotonic(), 0
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"log-member-{group}")
        self._thread.start()
        self._costs.watch(self._thread, "poll_s")

    @property
    def outage_s(self) -> float:
        """Seconds since a broker last responded; 0.0 unless a response is overdue."""
        return self._outage.seconds

    def take(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; waits up to `timeout_s` for the first. Raises `LogError` once the member has failed."""
        with self._costs.count("poll_s"):
            return self._buffer.take(timeout_s)

    def commit(self, offsets: Commits) -> bool:
        """Commit offsets for the group without waiting; returns False and commits none if a partition is not owned.

        They are sent at once and again after an outage, until newer ones replace them or the partition is revoked.
        """
        converted = reading.to_kafka(offsets)
        if not self._buffer.add_commits(offsets):
            return False
        self._send_commits(converted)
        return True

    def membership(self) -> Membership | None:
        """The membership of the last `Assigned` that was taken; None before. The log refuses transactions with an outdated one."""
        return self._buffer.membership

    def lag(self) -> int:
        """Return the number of records in its partitions that the member has not taken yet, by the brokers' newest responses."""
        return private_api.lag(self._consumer) + self._buffer.waiting

    def close(self, timeout_s: float = 3.0) -> None:
        """Leave the consumer group; wait at most `timeout_s`."""
        self._closing = True
        self._buffer.wake()
        self._thread.join(timeout_s)
        self._costs.unwatch(self._thread)

    # The methods below run on the polling thread.

    def _join(self) -> Any:
        """Return a new consumer, subscribed to the topics, which calls `on_assigned` and `on_revoked` at each rebalance."""
        # Range assigns equal partition numbers of topics with equal counts to one member; sticky assignors do not.
        assignor = RangePartitionAssignor() if self._pools is None else PoolAssignor(self._pools)
        membership = settings.membership(self._session_s, assignor)
        consumer = reading.make_consumer(self._admin, group=self._group, **membership)
        private_api.subscribe(consumer, self._topics, _Listener(self, consumer))
        return consumer

    def _run(self) -> None:
        """Poll until `close`; a Kafka error replaces the consumer, any other is raised by the user's next `take`."""
        try:
            while not self._closing:
                try:
                    self._turn()
                except errors.KafkaError as error:
                    log.warning("consumer group %s: %s; joining again", self._group, edge.one_line(error))
                    self._rejoin()
        except LogError as error:
            self._buffer.end(error)
        except Exception as error:  # the edge of a thread: its user must receive every error
            log.exception("consumer group %s: the thread of this member failed", self._group)
            self._buffer.end(LogError(f"member of group {self._group} failed: {edge.one_line(error)}"))
        finally:
            self._costs.unwatch(self._thread)
            reading.close_consumer(self._consumer, self._costs, 2.0)

    def _turn(self) -> None:
        """Poll once and queue the records; deliver a new assignment, resend failed commits, and check that a join completes."""
        full = self._buffer.full
        self._hold(full)
        records = reading.poll(
            self._consumer, 0 if full else POLL_S, self._buffer.max_records, read_dead_letters=self._read_dead_letters, ids=self._ids
        )
        if records:
            self._buffer.put(records)
            if self._gathers and reading.are_few(records):
                time.sleep(reading.GATHER_S)
        if self._incoming is not None:
            self._deliver_assignment()
        self._send_commits(reading.to_kafka(self._buffer.unsent_commits()))
        self._watch()
        if full:
            self._buffer.wait_for_room(FULL_S)

    def _hold(self, full: bool) -> None:
        """Pause the owned partitions while the buffer is full; the member continues to poll and stays in the group."""
        if full and not self._paused:
            self._paused = self._consumer.assignment() - self._consumer.paused()
            self._consumer.pause(*self._paused)
        elif self._paused and not full:
            self._consumer.resume(*(self._paused & self._consumer.assignment()))
            self._paused = set()

    def _deliver_assignment(self) -> None:
        """Start to read the newly assigned partitions at their committed offsets and queue `Assigned`; in an outage, return early."""
        incoming = self._incoming
        assert incoming is not None
        partitions, membership = incoming
        try:
            offsets = private_api.fetch_committed(self._consumer, partitions, 2.0) if partitions else {}
            starts = self._consumer.beginning_offsets(partitions, timeout_ms=2000) if partitions else {}
        except (errors.RetriableError, KeyError, *edge.UNREACHABLE):  # KeyError: the client omits a partition without a leader
            # The broker is unreachable, or a partition has another leader: the client would request the offsets from the old one for the
            # five minutes that metadata are valid, as nothing is fetched meanwhile. The next turn tries again.
            private_api.request_metadata(self._consumer)
            return
        committed = {(tp.topic, tp.partition): reading.to_committed(offsets.get(tp)) for tp in sorted(partitions)}
        # Always seek: a fetch for an earlier assignment may have moved the position past records that were never delivered.
        for partition, commit in committed.items():
            offset, first = commit.offset, starts[TopicPartition(*partition)]
            if offset is not None and offset < first:
                where = f"{partition[0]}/{partition[1]}"
                self._contact.notify(f"{where}: offsets {offset} to {first - 1} were deleted before they were read; continuing at {first}")
            self._consumer.seek(TopicPartition(*partition), max(first, offset or 0))
        if self._incoming is incoming:
            self._incoming = None
            self._paused = set()
            self._contact.counts["rebalances"] += 1
            self._buffer.assign(Assigned(partitions=committed, membership=membership))
            self._consumer.resume(*partitions)

    def _send_commits(self, offsets: dict[Any, Any]) -> None:
        """Send a commit without waiting; its outcome is recorded in the buffer."""
        if offsets:
            sent = {(tp.topic, tp.partition): (value.offset, value.metadata) for tp, value in offsets.items()}
            future = private_api.commit_soon(self._consumer, offsets)
            future.add_callback(lambda _: self._buffer.committed(sent))
            future.add_errback(lambda error: self._buffer.uncommitted(sent, error))

    def _watch(self) -> None:
        """Replace the consumer if a join does not complete although a broker is connected."""
        now, joined = time.monotonic(), private_api.has_joined(self._consumer)
        outage_s = self._outage.check(self._consumer, due=joined)
        if joined:
            self._attempts = 0
        if outage_s > 0 or joined:
            self._joined_at = now
        elif now - self._joined_at > self._join_limit_s * min(2**self._attempts, JOIN_GROWTH):
            log.warning("consumer group %s: joining has taken %.0f s without success; joining again", self._group, now - self._joined_at)
            self._attempts += 1
            self._rejoin()

    def _rejoin(self) -> None:
        """Replace the consumer by a new one that joins the group. Raises `LogUnreachable` after an outage of `give_up_s`."""
        self.on_revoked(self._consumer)
        reading.close_consumer(self._consumer, self._costs, 2.0)
        self._consumer = self._contact.reach(self._join, ended=lambda: self._closing)
        self._joined_at = time.monotonic()

    # The methods below run on the client's network thread while the polling thread waits in a poll: nothing here may wait for the broker.

    def on_assigned(self, consumer: Any, partitions: Iterable[Any]) -> None:
        """Pause the new partitions until their start offsets are read."""
        assigned = frozenset(partitions)
        consumer.pause(*assigned)
        joined = consumer.group_metadata()
        if consumer is self._consumer:
            self._incoming = (assigned, Membership(group=self._group, generation=joined.generation_id, member_id=joined.member_id))

    def on_revoked(self, consumer: Any) -> None:
        """Release all partitions, as each rebalance does (eager protocol); those that stay return with the next assignment."""
        if consumer is self._consumer:
            self._incoming = None
            self._buffer.revoke()


class _Listener(ConsumerRebalanceListener):
    def __init__(self, member: KafkaMember, consumer: Any) -> None:
        self._member, self._consumer = member, consumer

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._member.on_assigned(self._consumer, assigned)

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._member.on_revoked(self._consumer)

    on_partitions_lost = on_partitions_revoked


class PoolAssignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Shares partitions by `Pools`; every member sends the name of its pool."""

    name = "pools"
    version = 0

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def metadata(self, topics: Sequence[str]) -> Any:
        """The subscription that this member sends when it joins."""
        return ConsumerProtocolSubscription(self.version, list(topics), self._pools.own.encode())

    def assign(self, cluster: Any, members: Sequence[Any]) -> Mapping[str, Any]:
        """Return member id -> its partitions; called in the leader of the group."""
        shares = self._pools.share_out({member.member_id: bytes(member.metadata.user_data or b"").decode() for member in members})
        return {
            member.member_id: ConsumerProtocolAssignment(
                self.version, [(topic, shares[member.member_id]) for topic in sorted(member.metadata.topics)], b""
            )
            for member in members
        }

    def on_assignment(self, assignment: Any, generation: int) -> None:
        """Do nothing: the assignor is stateless."""
