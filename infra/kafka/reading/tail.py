"""Reads named partitions: no group, no rebalance; driven by one caller."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import TopicPartition

from penstock.infra.errors import LogError
from penstock.infra.kafka import errors
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin
from penstock.infra.kafka.cluster.skips import ReadDeadLetters
from penstock.infra.kafka.cluster.topic_ids import TopicIds
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.outage import Contact, Outage
from penstock.infra.kafka.reading import consumer
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import Commits, Committed, Partition, Start
from penstock.topics.wire.record import Record

_LOOK_S = 0.05
"""Interval at which the position is compared with the end: a transaction marker at the end of a partition arrives as no record."""


class KafkaTail:
    """Reads the partitions its caller names, from the offsets its caller passes; for one thread."""

    def __init__(
        self,
        connection: Connection,
        costs: CpuCosts,
        contact: Contact,
        admin: Admin,
        starts: Mapping[Partition, Start],
        *,
        group: str | None,
        read_dead_letters: ReadDeadLetters | None = None,
        fetch_bytes: int | None = None,
    ) -> None:
        self._read_dead_letters = read_dead_letters
        self._admin, self._costs, self._group = admin, costs, group
        self._consumer: Any = None
        self._ids = TopicIds(admin)
        offsets = self._resolve(starts)
        self._few_until = 0.0
        self._consumer = contact.reach(lambda: consumer.make_consumer(connection, costs, group=group, fetch_bytes=fetch_bytes))
        self._outage = Outage(contact)
        self._assign(offsets)

    @property
    def outage_s(self) -> float:
        """Seconds since a broker last responded, as of the last poll; 0.0 unless a response is overdue."""
        return self._outage.seconds

    def _resolve(self, starts: Mapping[Partition, Start]) -> dict[Partition, int]:
        """Resolve starts to offsets, so that records written after this call are always read."""
        self._admin.require(starts)
        offsets = {partition: start for partition, start in starts.items() if isinstance(start, int)}
        earliest = [partition for partition, start in starts.items() if start == "earliest"]
        latest = [partition for partition, start in starts.items() if start == "latest"]
        offsets |= self._admin.offsets(earliest, end=False, committed=True)
        offsets |= self._admin.offsets(latest, end=True, committed=True)
        for partition, start in starts.items():
            if partition not in offsets:
                raise ValueError(f"a tail starts at 'earliest', 'latest' or an offset, not at {start!r}")
        return offsets

    def _assign(self, offsets: Mapping[Partition, int]) -> None:
        self._ids.add(topic for topic, _ in offsets)
        read = self._consumer.assignment()
        self._consumer.assign([*read, *(TopicPartition(*partition) for partition in offsets if TopicPartition(*partition) not in read)])
        for partition, offset in offsets.items():
            self._consumer.seek(TopicPartition(*partition), offset)

    def add(self, partitions: Mapping[Partition, Start]) -> None:
        """Read these partitions too; one that is read already moves to its new start."""
        self._assign(self._resolve(partitions))

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        """Records that arrive within `timeout_s`, in offset order within each partition; possibly none.

        Raises `LogUnreachable` after an outage of the log's `give_up_s`.
        """
        with self._costs.count("poll_s"):
            end = time.monotonic() + timeout_s
            if timeout_s > 0 and (pause := self._few_until - time.monotonic()) > 0:
                time.sleep(min(pause, timeout_s))
            remaining_s = timeout_s
            while not (
                records := consumer.poll(self._consumer, remaining_s, max_records, read_dead_letters=self._read_dead_letters, ids=self._ids)
            ):
                self._outage.check(self._consumer)
                if (remaining_s := end - time.monotonic()) <= 0:
                    break
            if records:
                self._outage.end()
            self._few_until = time.monotonic() + consumer.GATHER_S if consumer.are_few(records) else 0.0
            return records

    def read_to_end(self, timeout_s: float = 60.0, *, include_open: bool = False) -> list[Record]:
        """Everything up to the current end offsets. Raises `LogError` after `timeout_s`, not counting outages.

        With `include_open`, waits for the transactions that are open now and returns their records too.
        """
        deadline = time.monotonic() + timeout_s
        partitions = self.partitions
        ends = self._admin.offsets(partitions, end=True, committed=not include_open)
        starts = self._admin.offsets(partitions, end=False, committed=True)
        behind = {partition for partition in partitions if max(self.position(partition), starts[partition]) < ends[partition]}
        records: list[Record] = []
        while behind:
            if time.monotonic() > deadline:
                positions = ", ".join(f"{topic}/{p} at {self.position((topic, p))} of {ends[topic, p]}" for topic, p in sorted(behind))
                raise LogError(f"reading to the end took longer than {timeout_s:.0f} s: {positions}")
            records += self.poll(min(_LOOK_S, timeout_s), max_records=5000)
            if self.outage_s > 0:
                deadline = time.monotonic() + timeout_s
            behind = {partition for partition in behind if self.position(partition) < ends[partition]}
        return records

    @property
    def partitions(self) -> list[Partition]:
        return [consumer.partition_of(tp) for tp in self._consumer.assignment()]

    def position(self, partition: Partition) -> int:
        """The offset of the next record this tail delivers."""
        offset = private_api.position(self._consumer, TopicPartition(*partition))
        if offset is None:
            raise LogError(f"{partition[0]}/{partition[1]} is not read by this tail")
        return offset

    def seek(self, partition: Partition, offset: int) -> None:
        """Continue at `offset`; records before it that were already fetched are not delivered."""
        self._consumer.seek(TopicPartition(*partition), offset)

    def commit(self, offsets: Commits, timeout_s: float = 10.0) -> None:
        """Commit offsets for the group; raises LogError when that fails or there is no group."""
        if self._group is None:
            raise LogError("a tail without a group cannot commit")
        with errors.translated(f"cannot commit offsets of group {self._group}"):
            self._consumer.commit(consumer.to_kafka(offsets), timeout_ms=int(timeout_s * 1000))

    def committed(self, timeout_s: float = 10.0) -> dict[Partition, Committed]:
        """The group's committed offsets for the partitions of this tail."""
        if self._group is None:
            raise LogError("a tail without a group has no committed offsets")
        partitions: Sequence[Any] = list(self._consumer.assignment())
        with errors.translated(f"cannot read committed offsets of group {self._group}"):
            offsets = private_api.fetch_committed(self._consumer, partitions, timeout_s)
        return {consumer.partition_of(tp): consumer.to_committed(offsets.get(tp)) for tp in partitions}

    def close(self, timeout_s: float = 3.0) -> None:
        """Stop reading, within `timeout_s`."""
        consumer.close_consumer(self._consumer, self._costs, timeout_s)
