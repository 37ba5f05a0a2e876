"""The queue between a member's polling thread and its user: events in order, and commits that are not acknowledged yet.

The rule: revoking drops the revoked partitions' waiting records and commits in the same step that queues the Revoked event.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from penstock.infra.errors import LogError
from penstock.infra.log import Assigned, Commits, Event, Membership, Partition, Records, Revoked
from penstock.topics.wire.record import Record

log = logging.getLogger(__name__)

_RECORD_OVERHEAD = 512
"""[bytes] a small record holds in memory beyond its value."""


class Buffer:
    """A bounded queue of events; every method is safe on any thread."""

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
        """True if nothing more should be read."""
        return self._records >= self.max_records or self._bytes >= self._max_bytes

    @property
    def waiting(self) -> int:
        """Records that were not taken yet."""
        return self._records

    def put(self, records: Sequence[Record]) -> None:
        """Queue records; those of partitions no longer owned are dropped."""
        with self._change:
            kept = [record for record in records if (record.topic, record.partition) in self._owned]
            if kept:
                self._records += len(kept)
                self._bytes += sum(len(record.value) for record in kept) + _RECORD_OVERHEAD * len(kept)
                self._events.append(Records(records=kept))
                self._change.notify_all()

    def assign(self, assigned: Assigned) -> None:
        """Own these partitions from now on."""
        with self._change:
            self._owned = frozenset(assigned.partitions)
            self._events.append(assigned)
            self._change.notify_all()

    def revoke(self) -> None:
        """Own nothing from now on."""
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
        """Let every later `take` raise `failure` once the queue is empty."""
        with self._change:
            self._failure = failure
            self._change.notify_all()

    def wake(self) -> None:
        """Wake a waiting thread, so that it checks its condition again."""
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
        """Remember offsets to commit; returns False and remembers none if a partition is not owned."""
        with self._change:
            if not self._owned.issuperset(offsets):
                return False
            self._uncommitted.update(offsets)
            self._sending.update(offsets)
            return True

    def unsent_commits(self) -> Commits:
        """Commits that failed and have to be sent again; from now on they count as sent."""
        with self._change:
            again = {partition: wanted for partition, wanted in self._uncommitted.items() if partition not in self._sending}
            self._sending.update(again)
            return again

    def committed(self, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """Note that the log has stored these offsets."""
        with self._change:
            for partition, noted in offsets.items():
                if self._uncommitted.get(partition) == noted:
                    del self._uncommitted[partition]
                    self._sending.discard(partition)

    def uncommitted(self, offsets: Mapping[Partition, tuple[int, str]], error: BaseException) -> None:
        """Note that a commit failed: it is void if the group is rebalancing, and sent again if the broker is away."""
        log.debug("commit of %d partitions failed: %s", len(offsets), error)
        with self._change:
            for partition, failed in offsets.items():
                if self._uncommitted.get(partition) == failed:
                    self._sending.discard(partition)
