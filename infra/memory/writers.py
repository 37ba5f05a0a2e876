"""Producers and transactional writers of the in-memory log."""

import threading
from collections.abc import Sequence

from penstock.infra.errors import Fenced, LogError, LostPartition, SendFailed
from penstock.infra.log import Commits, Committed, Membership, Written, check_commits
from penstock.infra.memory.state import State, Transaction
from penstock.topics.wire.record import Outgoing


class MemoryPending:
    """A record that is already written."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def offset(self, timeout_s: float | None = None) -> int:
        """The record's offset."""
        return self._offset

    def done(self) -> bool:
        """Always true."""
        return True

    def error(self) -> Exception | None:
        """Always None."""
        return None


class MemoryProducer:
    """Writes each record at once."""

    def __init__(self, state: State) -> None:
        self._state = state

    def send(self, outgoing: Outgoing) -> MemoryPending:
        """Write a record; raises LogError if the topic or partition does not exist."""
        with self._state.change:
            offset = self._state.part((outgoing.topic, outgoing.partition)).append(outgoing)
            self._state.change.notify_all()
        return MemoryPending(offset)

    def check(self) -> None:
        """Do nothing: no record is ever lost."""

    def flush(self, timeout_s: float = 60.0) -> None:
        """Do nothing: every record is already written."""

    def close(self, timeout_s: float = 3.0) -> None:
        """Nothing is held."""


class MemoryTransactions:
    """The newest object for an id is its only writer; it ends the last transaction of the one before."""

    def __init__(self, state: State, transactional_id: str, *, markers_late_s: float) -> None:
        self._state, self._id, self._token, self._late_s = state, transactional_id, object(), markers_late_s
        self._written = Written()
        with state.change:
            state.writers[transactional_id] = self._token
            self._settle()

    def _settle(self) -> None:
        """Complete the id's last transaction: a broker begins none before the last one has its markers."""
        last = self._state.pending.pop(self._id, None)
        if last is not None:
            last.commit()

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]:
        """Write all of it or nothing and return the records' offsets; raises Fenced, LostPartition or SendFailed."""
        if offsets and member is None:
            raise ValueError("offsets in a transaction need the membership they are committed for")
        check_commits(offsets or {})
        with self._state.change:
            if self._state.writers.get(self._id) is not self._token:
                raise Fenced(f"another process writes as {self._id} now: this one must stop")
            self._settle()
            group = self._state.group(member.group) if offsets and member is not None else None
            if (
                group is not None
                and member is not None
                and (group.generation, True) != (member.generation, member.member_id in group.members)
            ):
                raise LostPartition(f"nothing was written as {self._id}: the consumer group has moved on to another generation")
            try:
                transaction = Transaction(self._state, records)
            except LogError as error:
                raise SendFailed(f"nothing was written as {self._id}: {error}") from error
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
        """Nothing is held."""
