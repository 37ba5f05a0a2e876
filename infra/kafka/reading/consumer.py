"""Makes, polls and closes a consumer, for tails and members alike.

The rule: wait for a broker that is away, quietly and without spinning; only a refusal is an error.
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
"""Likewise for one that returned more bytes: a large record is worth a round trip of its own."""

OFFSETS_TIMEOUT_S = 5.0
"""For an error that is certain, a partition's ends are asked for no longer than this: a broker that has lost it may not answer."""

_METADATA_MS = 5
"""How soon after its first answer, which knows no topic, a reader asks for its topics' leaders; while there is none, once a poll."""
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
    """A consumer; raises LogUnreachable when no broker answers in time.

    One with a session takes part in the group, in a pool where it has `pools`. With `jumps` it goes on with the first kept record where an
    offset is not kept: for a caller that compares offsets itself.
    """
    configs = settings.consumer(connection, group=group)
    if fetch_bytes is not None:
        configs["max_partition_fetch_bytes"] = fetch_bytes
    if jumps:
        configs["auto_offset_reset"] = "earliest"
    began = time.thread_time()
    if session_s is not None:
        configs |= settings.membership(session_s, assignor_of(pools))
    consumer = edge.make(KafkaConsumer, connection, configs)
    private_api.set_metadata_backoff(consumer, _METADATA_MS if session_s is None else configs["retry_backoff_ms"])
    costs.spend("io_s", time.thread_time() - began)
    costs.watch(private_api.io_thread(consumer), "io_s")
    return consumer


def close_consumer(consumer: Any, costs: CpuCosts, timeout_s: float) -> None:
    """Leave the group and close within `timeout_s`: a dead broker must not delay the caller."""
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
    """Records, in offset order within each partition; possibly none, even before `timeout_s` or because the broker is away.

    Raises LogError when the broker refuses, RecordMissing where the next record was deleted or lost, and Damaged for what cannot be read,
    unless `letters` say that it is to be passed over.
    With `ids`, also when a topic is not the one any more that was read first.
    """
    began = time.monotonic()
    records: list[Record] = []
    try:
        records = private_api.poll_once(consumer, timeout_s, max_records)
    except edge.REFUSED as error:
        raise edge.translate(error, "the broker refuses to be read") from error
    except (errors.OffsetOutOfRangeError, errors.LogTruncationError) as error:
        if ids is not None:
            ids.ask()
        raise RecordMissing(_not_there(consumer)) from error
    except errors.InvalidSessionTimeoutError as error:
        limits = "the broker's group.min.session.timeout.ms and group.max.session.timeout.ms"
        raise LogError(f"the broker refuses a session of this length: kafka.session_s has to lie between {limits}") from error
    except (errors.CorruptRecordError, errors.UnsupportedCodecError) as error:
        if read_dead_letters is None or not skip_damaged(consumer, read_dead_letters):
            raise Damaged(_damage(consumer, error)) from error
    except (errors.RetriableError, errors.NoOffsetForPartitionError, *edge.UNREACHABLE):
        pass  # without an offset: a member whose assignment has just come seeks before its next poll
    if ids is not None:
        ids.look(consumer, idle=not records)
    if not records and timeout_s > 0 and time.monotonic() - began < min(_SPIN_S, timeout_s):
        time.sleep(min(_SPIN_S if private_api.connected(consumer) else _AWAY_S, timeout_s))
    return records


def are_few(records: Sequence[Record]) -> bool:
    """Whether it is better to wait for more records like these before the next poll."""
    return 0 < len(records) < GATHER_BELOW and sum(len(record.value) for record in records) < GATHER_BYTES


_CODECS = {"zstd": "zstandard", "lz4": "lz4", "snappy": "python-snappy"}
"""Codec -> the package with which the client reads it; our writers compress nothing."""


def _damage(consumer: Any, error: Exception) -> str:
    """Say what cannot be read, and what to do."""
    advice = "`penstock topics skip RUN TOPIC PARTITION OFFSET` has readers pass it over, where that can be"
    if not isinstance(error, errors.UnsupportedCodecError):
        return f"a record is damaged: {edge.one_line(error)}; {advice}"
    codec = next((codec for codec in _CODECS if codec in str(error)), None)
    what = f"with {codec}: install {_CODECS[codec]} where workers run" if codec else "in a way that the client does not know"
    at = ", ".join(f"{tp.topic}/{tp.partition} at offset {private_api.position(consumer, tp)}" for tp in sorted(consumer.assignment()))
    return f"somebody else has written records compressed {what}; or {advice} (this reader stands in {at})"


def _not_there(consumer: Any) -> str:
    """Say which offset a consumer wants that its partition does not hold, and which ones it holds."""
    places, limit_ms = list(consumer.assignment()), int(1000 * OFFSETS_TIMEOUT_S)
    wanted = {tp: private_api.position(consumer, tp) for tp in places}
    try:
        begins, ends = consumer.beginning_offsets(places, timeout_ms=limit_ms), consumer.end_offsets(places, timeout_ms=limit_ms)
    except (errors.KafkaError, KeyError) as error:  # KeyError: the client leaves out a partition that has no leader just now
        at = ", ".join(f"{tp.topic}/{tp.partition} at offset {at}" for tp, at in sorted(wanted.items()) if at is not None)
        return f"a record that is wanted is not there, and which are is not known ({edge.one_line(error)}): this reader stands in {at}"
    lost = [
        f"{tp.topic}/{tp.partition}: offset {at} is wanted, {begins[tp]} to {ends[tp] - 1} are there"
        for tp, at in wanted.items()
        if at is not None and not begins[tp] <= at <= ends[tp]
    ]
    return f"{'; '.join(lost) or 'an offset was lost'}: records were deleted, or lost with a broker"


def to_kafka(offsets: Commits) -> dict[Any, Any]:
    """Commits as the client library wants them; raises ValueError for metadata that is too long."""
    check_commits(offsets)
    return {TopicPartition(*partition): OffsetAndMetadata(offset, metadata, -1) for partition, (offset, metadata) in offsets.items()}


def partition_of(topic_partition: Any) -> Partition:
    """Convert a partition of the client library."""
    return topic_partition.topic, topic_partition.partition


def to_committed(commit: Any) -> Committed:
    """Convert a committed offset of the client library; None means nothing was committed."""
    return Committed(offset=None) if commit is None else Committed(offset=commit.offset, metadata=commit.metadata or "")


def assignor_of(pools: Pools | None) -> Any:
    """What a member of a group brings along for the one that leads it."""
    # Range gives the same partition numbers of two topics with equal counts to one member; sticky ones do not.
    return RangePartitionAssignor() if pools is None else PoolAssignor(pools)


class PoolAssignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Shares partitions as `Pools` says; every member tells the pool it is in."""

    name = "pools"
    version = 0

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def metadata(self, topics: Sequence[str]) -> Any:
        """What this member sends when it joins."""
        return ConsumerProtocolSubscription(self.version, list(topics), self._pools.own.encode())

    def assign(self, cluster: Any, members: Sequence[Any]) -> Mapping[str, Any]:
        """Member id -> its partitions; called in the member that leads the group."""
        shares = self._pools.share_out({member.member_id: bytes(member.metadata.user_data or b"").decode() for member in members})
        return {
            member.member_id: ConsumerProtocolAssignment(
                self.version, [(topic, shares[member.member_id]) for topic in sorted(member.metadata.topics)], b""
            )
            for member in members
        }

    def on_assignment(self, assignment: Any, generation: int) -> None:
        """Nothing is kept from one assignment to the next."""
