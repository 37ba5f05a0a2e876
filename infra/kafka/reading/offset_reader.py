"""Reads single records of a partition by their offsets, through one client that seeks between them.

An offset without a committed record is named, with the cause; open transactions are waited for.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from kafka import TopicPartition

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.outage import Contact, Outage
from penstock.infra.kafka.reading import consumer
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import Partition
from penstock.topics.wire.record import Record

_RUN_GAP = 64
"""Offsets further apart than this are fetched with a seek each, rather than by reading the records between them."""

_AFTER_OUTAGE_S = 30.0
"""Minimum time for a read that continues after an outage."""

_AT_ONCE_S = 0.25
"""Existing records arrive within this time; only for missing ones are the partition's first and end offsets looked up."""


class OffsetReader:
    """A client created at the first read; safe to share between threads."""

    def __init__(self, connection: Connection, costs: CpuCosts, contact: Contact, admin: Admin) -> None:
        self._connection, self._costs, self._contact, self._admin = connection, costs, contact, admin
        self._reader: Any = None
        self._outage = Outage(contact)
        self._lock = threading.Lock()

    def read(self, partition: Partition, offsets: Sequence[int], *, timeout_s: float) -> list[Record]:
        """Committed records at exactly these offsets, in this order. Raises `RecordMissing` with the missing offsets."""
        records = self.fetch(partition, sorted(set(offsets)), timeout_s=timeout_s)
        missing = [offset for offset in offsets if offset not in records]
        if missing:
            raise RecordMissing(self._missing(partition, missing))
        return [records[offset] for offset in offsets]

    def fetch(self, partition: Partition, offsets: Sequence[int], *, timeout_s: float) -> dict[int, Record]:
        """Offset -> record, for these ascending offsets; those without a record are omitted."""
        if not offsets:
            return {}
        deadline = time.monotonic() + timeout_s
        records: dict[int, Record] = {}
        self._fetch_runs(partition, offsets, records, deadline, patience_s=_AT_ONCE_S)
        if len(records) == len(offsets):
            return records
        first = self._first(partition)
        end = self._admin.offsets([partition], end=True, committed=False)[partition]
        self._fetch_runs(partition, [offset for offset in offsets if first <= offset < end], records, deadline)
        return records

    def _fetch_runs(
        self, partition: Partition, offsets: Sequence[int], into: dict[int, Record], deadline: float, patience_s: float | None = None
    ) -> None:
        with self._lock:
            if self._reader is None:
                self._reader = self._contact.reach(lambda: consumer.make_consumer(self._connection, self._costs, group=None, jumps=True))
                self._outage = Outage(self._contact)
            with self._costs.count("poll_s"):
                for run in _runs([offset for offset in offsets if offset >= 0 and offset not in into]):
                    self._fetch_run(TopicPartition(*partition), run, into, deadline, patience_s)

    def _fetch_run(self, tp: Any, run: Sequence[int], into: dict[int, Record], deadline: float, patience_s: float | None) -> None:
        """Read the records at the offsets of `run`; with `patience_s`, stops silently after it."""
        offsets = set(run)
        patient_until = float("inf") if patience_s is None else time.monotonic() + patience_s
        self._reader.assign([tp])
        self._reader.seek(tp, run[0])
        while (private_api.position(self._reader, tp) or 0) <= run[-1]:
            now = time.monotonic()
            if now >= patient_until:
                return
            remaining_s = min(deadline, patient_until) - now
            if now >= deadline:
                where = f"offsets {run[0]} to {run[-1]} of {tp.topic}/{tp.partition}"
                raise LogError(f"reading {where} took too long; is the broker running, or a transaction open?")
            records = consumer.poll(self._reader, min(1.0, remaining_s), 500)
            into.update((record.offset, record) for record in records if record.offset in offsets)
            if records:
                self._outage.end()
            elif self._outage.check(self._reader) > 0:
                deadline = time.monotonic() + _AFTER_OUTAGE_S

    def _missing(self, partition: Partition, offsets: Sequence[int]) -> str:
        """Text with the reason why these offsets have no record: deleted, or never written."""
        where, first = f"{partition[0]}/{partition[1]}", self._first(partition)
        deleted, never = [offset for offset in offsets if offset < first], [offset for offset in offsets if offset >= first]
        reasons = []
        if deleted:
            reasons.append(f"{where}: the records at offsets {_shown(deleted)} were deleted, the first existing one is {first}")
        if never:
            reasons.append(f"{where} has no committed record at offset {_shown(never)}")
        return "; ".join(reasons)

    def _first(self, partition: Partition) -> int:
        return self._admin.offsets([partition], end=False, committed=True)[partition]

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            consumer.close_consumer(reader, self._costs, 2.0)


def _shown(offsets: Sequence[int]) -> str:
    """Format offsets as at most ten ranges.

    Example:
        _shown([3, 4, 5, 9])  # -> "3 to 5, 9"
    """
    ranges: list[list[int]] = []
    for offset in sorted(set(offsets)):
        if ranges and offset == ranges[-1][1] + 1:
            ranges[-1][1] = offset
        else:
            ranges.append([offset, offset])
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in ranges]
    return ", ".join(texts[:10]) + (", …" if len(texts) > 10 else "")


def _runs(offsets: Sequence[int]) -> list[list[int]]:
    """Split ascending offsets at each gap that is worth a seek.

    Example:
        _runs([3, 4, 900])  # -> [[3, 4], [900]]
    """
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= _RUN_GAP:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs
