"""Creates, polls and closes consumers, for tails and members.

Polling waits out an outage quietly and without spinning; only a refusal of the broker is an error.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition, errors
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor, ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.coordinator.assignors.range import RangePartitionAssignor

from penstock.infra.errors import Damaged, LogError, RecordMissing
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.skips import ReadDeadLetters, skip_damaged
from penstock.infra.kafka.cluster.topic_ids import TopicIds
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import Commits, Committed, Partition, Pools, check_commits
from penstock.topics.wire.record import Record

GATHER_S = 0.02
"""Wait this long after a poll that returned only a few records: a round trip costs as much as 50 small records."""
GATHER_BELOW = 64
"""A poll that returned more records than this is followed by the next at once."""
GATHER_BYTES = 256 << 10
"""The same for one that returned more bytes: a large record is worth a round trip of its own."""

OFFSETS_TIMEOUT_S = 5.0
"""Timeout for a partition's offsets in the text of an error that is already certain: a broker that has lost it may not respond."""

_METADATA_MS = 5
"""Interval of a new reader's requests for its topics' leaders, at most once a poll: the first response names no topic."""
_SPIN_S, _AWAY_S = 0.02, 0.2
"""Pause after a poll that waited less than this and returned nothing; the second one applies while no broker is connected."""


def make_consumer(
    connection: Connection,
    costs: CpuCosts,
    *,
    group: str | None,
    session_s: float | None = None,
    pools: Pools | None = None,
    jumps: bool = False,
    fetch_bytes: int | None = None,
) -> Any:
    """Return a consumer. Raises `LogUnreachable` if no broker responds in time.

    With `session_s` it joins the group, in a pool if it has `pools`. With `jumps` it continues with the first retained record if an
    offset was deleted: for a caller that compares offsets itself.
    """
    configs = settings.consumer(connection, group=group)
    if fetch_bytes is not None:
        configs["max_partition_fetch_bytes"] = fetch_bytes
    if jumps:
        configs["auto_offset_reset"] = "earliest"
    with costs.count("io_s"):
        if session_s is not None:
            configs |= settings.membership(session_s, assignor_of(pools))
        consumer = edge.make(KafkaConsumer, connection, configs)
        private_api.set_metadata_backoff(consumer, _METADATA_MS if session_s is None else configs["retry_backoff_ms"])
    costs.watch(private_api.io_thread(consumer), "io_s")
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
    """Return records, in offset order within each partition; possibly none, even before `timeout_s` or because of an outage.

    Raises `LogError` if the broker refuses, `RecordMissing` if the next record was deleted or lost, and `Damaged` for an unreadable
    one, unless the dead letters tell readers to skip it. With `ids`, also `LogError` if a topic was deleted or replaced.
    """
    start = time.monotonic()
    records: list[Record] = []
    try:
        records = private_api.poll_once(consumer, timeout_s, max_records)
    except edge.REFUSED as error:
        raise edge.translate(error, "the broker refuses to be read") from error
    except (errors.OffsetOutOfRangeError, errors.LogTruncationError) as error:
        if ids is not None:
            ids.verify()
        raise RecordMissing(_missing(consumer)) from error
    except errors.InvalidSessionTimeoutError as error:
        limits = "the broker's group.min.session.timeout.ms and group.max.session.timeout.ms"
        raise LogError(f"the broker refuses a session of this length: kafka.session_s has to lie between {limits}") from error
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
    advice = "`penstock topics skip RUN TOPIC PARTITION OFFSET` makes readers skip it, if that is possible"
    if not isinstance(error, errors.UnsupportedCodecError):
        return f"a record is damaged: {edge.one_line(error)}; {advice}"
    codec = next((codec for codec in _CODECS if codec in str(error)), None)
    what = f"with {codec}: install {_CODECS[codec]} where workers run" if codec else "in a way that the client does not know"
    positions = ", ".join(
        f"{tp.topic}/{tp.partition} at offset {private_api.position(consumer, tp)}" for tp in sorted(consumer.assignment())
    )
    return f"another program has written records compressed {what}; or {advice} (position of this reader: {positions})"


def _missing(consumer: Any) -> str:
    """Text with the offset that a consumer needs and its partition does not have, and the existing offsets."""
    partitions, timeout_ms = list(consumer.assignment()), int(1000 * OFFSETS_TIMEOUT_S)
    positions = {tp: at for tp in partitions if (at := private_api.position(consumer, tp)) is not None}
    try:
        starts = consumer.beginning_offsets(partitions, timeout_ms=timeout_ms)
        ends = consumer.end_offsets(partitions, timeout_ms=timeout_ms)
    except (errors.KafkaError, KeyError) as error:  # KeyError: the client omits a partition without a leader
        text = ", ".join(f"{tp.topic}/{tp.partition} at offset {at}" for tp, at in sorted(positions.items()))
        return f"a record is missing, and which ones exist is unknown ({edge.one_line(error)}): position of this reader: {text}"
    lost = [
        f"{tp.topic}/{tp.partition}: offset {at} is missing, it has {starts[tp]} to {ends[tp] - 1}"
        for tp, at in positions.items()
        if not starts[tp] <= at <= ends[tp]
    ]
    return f"{'; '.join(lost) or 'an offset was lost'}: records were deleted, or lost with a broker"


def to_kafka(offsets: Commits) -> dict[Any, Any]:
    """Commits as the client library takes them. Raises `ValueError` for metadata that is too long."""
    check_commits(offsets)
    return {TopicPartition(*partition): OffsetAndMetadata(offset, metadata, -1) for partition, (offset, metadata) in offsets.items()}


def partition_of(topic_partition: Any) -> Partition:
    """Convert a partition of the client library."""
    return topic_partition.topic, topic_partition.partition


def to_committed(commit: Any) -> Committed:
    """Convert a committed offset of the client library; None means nothing was committed."""
    return Committed(offset=None) if commit is None else Committed(offset=commit.offset, metadata=commit.metadata or "")


def assignor_of(pools: Pools | None) -> Any:
    """The assignor of a member: even ranges, or the pools of the members."""
    # Range assigns equal partition numbers of topics with equal counts to one member; sticky assignors do not.
    return RangePartitionAssignor() if pools is None else PoolAssignor(pools)


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
        """Member id -> its partitions; called in the leader of the group."""
        shares = self._pools.share_out({member.member_id: bytes(member.metadata.user_data or b"").decode() for member in members})
        return {
            member.member_id: ConsumerProtocolAssignment(
                self.version, [(topic, shares[member.member_id]) for topic in sorted(member.metadata.topics)], b""
            )
            for member in members
        }

    def on_assignment(self, assignment: Any, generation: int) -> None:
        """Do nothing: the assignor is stateless."""
