"""Reads named partitions, and single records by their offsets; creates, polls and closes consumers, also for group members."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition, errors

from penstock.infra.errors import Damaged, LogError, RecordMissing
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.admin import Admin
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.guards import ReadDeadLetters, TopicIds, skip_damaged
from penstock.infra.kafka.outage import Outage
from penstock.infra.log import NO_RECORD, Commits, Committed, Partition, Start, check_commits, drain
from penstock.topics.wire.record import Record

GATHER_S = 0.02
"""Wait this long after a poll that returned only a few records: a round trip costs as much as 50 small records."""
GATHER_BELOW = 64
"""A poll that returned more records than this is followed by the next at once."""
GATHER_BYTES = 256 << 10
"""A poll that returned more bytes than this is followed by the next at once: a large record is worth a round trip."""

OFFSETS_TIMEOUT_S = 5.0
"""Timeout for a partition's offsets in the text of an error that is already certain: a broker that has lost it may not respond."""

_METADATA_MS = 5
"""Interval of a new reader's requests for its topics' leaders, at most once a poll: the first response names no topic."""
_SPIN_S, _AWAY_S = 0.02, 0.2
"""Pause after a poll that waited less than this and returned nothing; the second one applies while no broker is connected."""


def make_consumer(admin: Admin, *, group: str | None, **configs: Any) -> Any:
    """Return a consumer with these settings in addition to `settings.consumer`. Raises `LogUnreachable` if no broker responds in time."""
    all_configs = {**settings.consumer(admin.connection, group=group), **configs}
    with admin.cpu.count("io_s"):
        consumer = edge.make(KafkaConsumer, admin.connection, all_configs)
        private_api.set_metadata_backoff(consumer, configs.get("retry_backoff_ms", _METADATA_MS))
    admin.cpu.watch(private_api.io_thread(consumer), "io_s")
    return consumer


def close_consumer(consumer: Any, costs: CpuCosts, timeout_s: float) -> None:
    """Leave the group and close within `timeout_s`: an unreachable broker must not delay the caller."""
    costs.unwatch(private_api.io_thread(consumer))

    def close() -> None:
        try:
            consumer.close(autocommit=False, timeout_ms=int(timeout_s * 1000))
        except (errors.KafkaError, RuntimeError):
            consumer._client.close()

    closer = threading.Thread(target=close, daemon=True, name="log-close")
    closer.start()
    closer.join(timeout_s)


def poll(
    consumer: Any, timeout_s: float, max_records: int, *, read_dead_letters: ReadDeadLetters | None = None, ids: TopicIds | None = None
) -> list[Record]:
    """Poll once; return the records in offset order within each partition, possibly none, even before `timeout_s` or because of an outage.

    Raises `LogError` if the broker refuses, `RecordMissing` if the next record was deleted or lost, and `Damaged` for an unreadable one,
    unless the dead letters let readers skip it. With `ids`, also `LogError` if a topic was deleted or replaced.
    """
    start = time.monotonic()
    records: list[Record] = []
    try:
        records = private_api.poll_once(consumer, timeout_s, max_records)
    except edge.REFUSED as error:
        raise edge.translate(error, "the broker refuses this reader") from error
    except (errors.OffsetOutOfRangeError, errors.LogTruncationError) as error:
        if ids is not None:
            ids.verify()
        raise RecordMissing(_missing(consumer)) from error
    except (errors.CorruptRecordError, errors.UnsupportedCodecError) as error:
        if read_dead_letters is None or not skip_damaged(consumer, read_dead_letters):
            raise Damaged(_damage(consumer, error)) from error
    except (errors.RetriableError, errors.NoOffsetForPartitionError, *edge.UNREACHABLE):
        pass  # no offset: a newly assigned member seeks before its next poll
    if ids is not None:
        ids.check(consumer, idle=not records)
    if not records and timeout_s > 0 and time.monotonic() - start < min(_SPIN_S, timeout_s):
        time.sleep(min(_SPIN_S if private_api.connected(consumer) else _AWAY_S, timeout_s))
    return records


def are_few(records: Sequence[Record]) -> bool:
    """True if it is better to wait for more records like these before the next poll."""
    return 0 < len(records) < GATHER_BELOW and sum(len(record.value) for record in records) < GATHER_BYTES


_CODECS = {"zstd": "zstandard", "lz4": "lz4", "snappy": "python-snappy"}
"""Codec -> the package with which the client decodes it; our writers compress nothing."""


def _damage(consumer: Any, error: Exception) -> str:
    """Describe an unreadable record: its position, and how to skip it or which codec to install."""
    advice = "to let readers skip it, run `penstock topics skip RUN TOPIC PARTITION OFFSET`"
    if not isinstance(error, errors.UnsupportedCodecError):
        return f"a record is damaged: {edge.one_line(error)}; {advice}"
    codec = next((codec for codec in _CODECS if codec in str(error)), None)
    what = f"with {codec}: install {_CODECS[codec]} where workers run" if codec else "with a codec that this client does not support"
    positions = ", ".join(
        f"{tp.topic}/{tp.partition} at offset {private_api.position(consumer, tp)}" for tp in sorted(consumer.assignment())
    )
    return f"another program has written a record compressed {what}; {advice} (position of this reader: {positions})"


def _missing(consumer: Any) -> str:
    """Describe the offsets that a consumer needs but its partitions lack, and the offsets that exist."""
    partitions, timeout_ms = list(consumer.assignment()), int(1000 * OFFSETS_TIMEOUT_S)
    positions = {tp: at for tp in partitions if (at := private_api.position(consumer, tp)) is not None}
    try:
        starts = consumer.beginning_offsets(partitions, timeout_ms=timeout_ms)
        ends = consumer.end_offsets(partitions, timeout_ms=timeout_ms)
    except (errors.KafkaError, KeyError) as error:  # KeyError: the client omits a partition without a leader
        text = ", ".join(f"{tp.topic}/{tp.partition} at offset {at}" for tp, at in sorted(positions.items()))
        return f"a record is missing, and the existing offsets cannot be read ({edge.one_line(error)}); position of this reader: {text}"
    lost = [
        f"{tp.topic}/{tp.partition}: offset {at} is missing, it holds {starts[tp]} to {ends[tp] - 1}"
        for tp, at in positions.items()
        if not starts[tp] <= at <= ends[tp]
    ]
    return f"{'; '.join(lost) or 'an offset is missing'}: records were deleted, or lost by a broker"


def to_kafka(offsets: Commits) -> dict[Any, Any]:
    """Convert commits to the client library's. Raises `ValueError` for metadata that is too long."""
    check_commits(offsets)
    return {TopicPartition(*partition): OffsetAndMetadata(offset, metadata, -1) for partition, (offset, metadata) in offsets.items()}


def to_committed(commit: Any) -> Committed:
    """Convert a committed offset of the client library; None means nothing was committed."""
    return Committed(offset=None) if commit is None else Committed(offset=commit.offset, metadata=commit.metadata or "")


class KafkaTail:
    """Reads named partitions from named offsets, without a consumer group; for one thread."""

    def __init__(
        self, admin: Admin, starts: Mapping[Partition, Start], *, group: str | None, read_dead_letters: ReadDeadLetters | None = None,
        fetch_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._read_dead_letters = read_dead_letters
        self._admin, self._costs, self._group = admin, admin.cpu, group
        self._ids = TopicIds(admin)
        offsets = self._resolve(starts)
        self._few_until = 0.0
        self._reusable = group is None and fetch_bytes is None
        configs = {} if fetch_bytes is None else {"max_partition_fetch_bytes": fetch_bytes}
        self._consumer: Any = (self._reusable and admin.take_spare()) or admin.contact.reach(
            lambda: make_consumer(admin, group=group, **configs)
        )
        self._outage = Outage(admin.contact)
        self._assign(offsets)

    @property
    def outage_s(self) -> float:
        """Seconds since a broker last responded, as of the last poll; 0.0 unless a response is overdue."""
        return self._outage.seconds

    def _resolve(self, starts: Mapping[Partition, Start]) -> dict[Partition, int]:
        """Resolve starts to offsets, so that records written after this call are always read."""
        self._admin.require(starts)
        offsets = {partition: start for partition, start in starts.items() if isinstance(start, int)}
        for word, end in (("earliest", False), ("latest", True)):
            offsets |= self._admin.offsets([partition for partition, start in starts.items() if start == word], end=end, committed=True)
        if odd := [start for partition, start in starts.items() if partition not in offsets]:
            raise ValueError(f"a tail starts at 'earliest', 'latest' or an offset, not at {odd[0]!r}")
        return offsets

    def _assign(self, offsets: Mapping[Partition, int]) -> None:
        """Read these partitions too, from these offsets; moves those that are read already."""
        self._ids.add(topic for topic, _ in offsets)
        read = self._consumer.assignment()
        self._consumer.assign([*read, *(TopicPartition(*partition) for partition in offsets if TopicPartition(*partition) not in read)])
        for partition, offset in offsets.items():
            self._consumer.seek(TopicPartition(*partition), offset)
        private_api.await_leaders(self._consumer, _AWAY_S, renew=True)  # what an earlier tail knew may be of a deleted topic

    def add(self, partitions: Mapping[Partition, Start]) -> None:
        """Read further partitions; one that is already read continues at the new start."""
        self._assign(self._resolve(partitions))

    def poll(self, timeout_s: float, *, max_records: int = 500) -> list[Record]:
        """Return records that arrive within `timeout_s`, in offset order within each partition; possibly none.

        Raises `LogUnreachable` after an outage of the log's `give_up_s`, and the errors of the function `poll`.
        """
        with self._costs.count("poll_s"):
            end = time.monotonic() + timeout_s
            if timeout_s > 0 and (pause := self._few_until - time.monotonic()) > 0:
                time.sleep(min(pause, timeout_s))
            remaining_s = timeout_s
            while not (records := poll(self._consumer, remaining_s, max_records, read_dead_letters=self._read_dead_letters, ids=self._ids)):
                self._outage.check(self._consumer)
                if (remaining_s := end - time.monotonic()) <= 0:
                    break
            if records:
                self._outage.end()
            self._few_until = time.monotonic() + GATHER_S if are_few(records) else 0.0
            return records

    def read_to_end(self, timeout_s: float = 60.0, *, include_open: bool = False) -> list[Record]:
        """Return all records up to the end offsets at the time of the call.

        Raises `LogError` after `timeout_s` without a record, not counting outages. With `include_open`, waits for the transactions that
        are open now and returns their records too.
        """
        ends = self._admin.offsets(self.partitions, end=True, committed=not include_open)
        starts = self._admin.offsets(self.partitions, end=False, committed=True)
        return list(drain(self, {at: end for at, end in ends.items() if starts[at] < end}, silence_s=timeout_s))

    @property
    def partitions(self) -> list[Partition]:
        return [(tp.topic, tp.partition) for tp in self._consumer.assignment()]

    def position(self, partition: Partition) -> int:
        """Return the offset of the next record that this tail delivers. Raises `LogError` for a partition that it does not read."""
        offset = private_api.position(self._consumer, TopicPartition(*partition))
        if offset is None:
            raise LogError(f"{partition[0]}/{partition[1]} is not among the partitions of this reader")
        return offset

    def seek(self, partition: Partition, offset: int) -> None:
        """Continue at `offset`; records before it that were already fetched are not delivered."""
        self._consumer.seek(TopicPartition(*partition), offset)

    def commit(self, offsets: Commits, timeout_s: float = 10.0) -> None:
        """Commit offsets for the group. Raises `LogError` if that fails or there is no group."""
        if self._group is None:
            raise LogError("a reader without a consumer group cannot commit offsets")
        with edge.translated(f"cannot commit offsets of group {self._group}"):
            self._consumer.commit(to_kafka(offsets), timeout_ms=int(timeout_s * 1000))

    def committed(self, timeout_s: float = 10.0) -> dict[Partition, Committed]:
        """Return the group's committed offsets for the partitions of this tail. Raises `LogError`, also without a group."""
        if self._group is None:
            raise LogError("a reader without a consumer group has no committed offsets")
        partitions: Sequence[Any] = list(self._consumer.assignment())
        with edge.translated(f"cannot read committed offsets of group {self._group}"):
            offsets = private_api.fetch_committed(self._consumer, partitions, timeout_s)
        return {(tp.topic, tp.partition): to_committed(offsets.get(tp)) for tp in partitions}

    def close(self, timeout_s: float = 3.0) -> None:
        """Stop reading, within `timeout_s`; an idle consumer is left to the next tail of this log."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None and not (self._reusable and self._admin.keep_spare(consumer)):
            close_consumer(consumer, self._costs, timeout_s)


_RUN_GAP = 64
"""Offsets further apart than this are fetched with a seek each, rather than by reading the records between them."""

_AFTER_OUTAGE_S = 30.0
"""Minimum time for a read that continues after an outage."""

_AT_ONCE_S = 0.25
"""Existing records arrive within this time; only for missing ones are the partition's first and end offsets looked up."""


class OffsetReader:
    """Reads single records by their offsets; its client is created at the first read, and threads may share it."""

    def __init__(self, admin: Admin) -> None:
        self._admin, self._outage = admin, Outage(admin.contact)
        self._reader: Any = None
        self._lock = threading.Lock()

    def read(self, partition: Partition, offsets: Sequence[int], *, timeout_s: float) -> list[Record]:
        """Return the committed records at exactly these offsets, in this order. Raises `RecordMissing` with the missing offsets."""
        records = self.fetch(partition, sorted(set(offsets)), timeout_s=timeout_s)
        missing = [offset for offset in offsets if offset not in records]
        if missing:
            raise RecordMissing(self._missing(partition, missing))
        return [records[offset] for offset in offsets]

    def fetch(self, partition: Partition, offsets: Sequence[int], *, timeout_s: float) -> dict[int, Record]:
        """Return offset -> committed record; offsets (ascending) without a committed record are left out."""
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
        """Read each run of neighbouring offsets into `into`, until the deadline."""
        with self._lock:
            if self._reader is None:
                # Past a deleted offset it continues with the first retained record: the offsets are compared here.
                self._reader = self._admin.contact.reach(lambda: make_consumer(self._admin, group=None, auto_offset_reset="earliest"))
                self._outage = Outage(self._admin.contact)
            with self._admin.cpu.count("poll_s"):
                for run in _runs([offset for offset in offsets if offset >= 0 and offset not in into]):
                    self._fetch_run(TopicPartition(*partition), run, into, deadline, patience_s)

    def _fetch_run(self, tp: Any, run: Sequence[int], into: dict[int, Record], deadline: float, patience_s: float | None) -> None:
        """Add the records at the offsets of `run` to `into`; returns early after `patience_s`. Raises `LogError` at `deadline`."""
        offsets = set(run)
        patient_until = float("inf") if patience_s is None else time.monotonic() + patience_s
        self._reader.assign([tp])
        self._reader.seek(tp, run[0])
        private_api.await_leaders(self._reader, _AT_ONCE_S if patience_s is None else patience_s)
        while (at := private_api.position(self._reader, tp) or 0) <= run[-1]:
            now = time.monotonic()
            if now >= patient_until:
                return
            remaining_s = min(deadline, patient_until) - now
            if now >= deadline:
                where = f"offsets {run[0]} to {run[-1]} of {tp.topic}/{tp.partition}"
                raise LogError(f"reading {where} took too long: no response, or a transaction is open (see `penstock topics unblock`)")
            records = poll(self._reader, min(1.0, remaining_s), min(500, run[-1] - at + 1))
            into.update((record.offset, record) for record in records if record.offset in offsets)
            if records:
                self._outage.end()
            elif self._outage.check(self._reader) > 0:
                deadline = time.monotonic() + _AFTER_OUTAGE_S

    def _missing(self, partition: Partition, offsets: Sequence[int]) -> str:
        """Return the text of an error: which of these offsets have no record because of deletion, and which were never written."""
        where, first = f"{partition[0]}/{partition[1]}", self._first(partition)
        deleted, never = [offset for offset in offsets if offset < first], [offset for offset in offsets if offset >= first]
        reasons = []
        if deleted:
            reasons.append(f"{where}: the records at offsets {_shown(deleted)} were deleted, the first existing one is {first}")
        if never:
            reasons.append(f"{where} has no committed record at offset {_shown(never)}: {NO_RECORD}")
        return "; ".join(reasons)

    def _first(self, partition: Partition) -> int:
        return self._admin.offsets([partition], end=False, committed=True)[partition]

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            close_consumer(reader, self._admin.cpu, 2.0)


def _shown(offsets: Sequence[int]) -> str:
    """Format offsets as at most ten ranges.

    Example:
        _shown([3, 4, 5, 9])  # -> "3 to 5, 9"
    """
    runs = _runs(sorted(set(offsets)), gap=1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts[:10]) + (", …" if len(texts) > 10 else "")


def _runs(offsets: Sequence[int], *, gap: int = _RUN_GAP) -> list[list[int]]:
    """Split ascending offsets where they are more than `gap` apart.

    Example:
        _runs([3, 4, 900])  # -> [[3, 4], [900]]
    """
    runs: list[list[int]] = []
    for offset in offsets:
        if runs and offset - runs[-1][-1] <= gap:
            runs[-1].append(offset)
        else:
            runs.append([offset])
    return runs
