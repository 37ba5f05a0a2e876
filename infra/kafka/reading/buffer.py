"""The queue between a member's polling thread and its user: events in order, and unacknowledged commits."""

import logging
import threading
from collections.abc import Mapping, Sequence

from penstock.infra.errors import LogError
from penstock.infra.log import Assigned, Commits, Event, Membership, Partition, Records, Revoked
from penstock.topics.wire.record import Record

log = logging.getLogger(__name__)

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
        """Let `take` raise `failure` once the queue is empty."""
        with self._change:
            self._failure = failure
            self._change.notify_all()

    def wake(self) -> None:
        """Let a waiting thread check its condition again."""
        with self._change:
            self._change.notify_all()

    def take(self, timeout_s: float) -> list[Event]:
        """All queued events; waits up to `timeout_s` for the first."""
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
        """Commits that failed and have to be sent again; from here on they count as sent."""
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
