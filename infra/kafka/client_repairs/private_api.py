"""Access to private parts of kafka-python: time limits and state that its public calls lack."""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka import KafkaProducer, errors
from kafka.producer import transaction_manager
from kafka.protocol.producer.transaction import WriteTxnMarkersRequest
from kafka.util import Timer

from penstock.topics.wire.record import Record


def io_thread(client: Any) -> threading.Thread:
    """The thread on which a producer, consumer or admin client does its network work."""
    thread: threading.Thread = client._sender if isinstance(client, KafkaProducer) else client._net._io_thread
    return thread


def connected(consumer: Any) -> bool:
    """True if a connection to any broker is up."""
    return any(connection.connected for connection in list(consumer._manager._conns.values()))


def advertised(admin: Any) -> list[tuple[str, str]]:
    """Host and port of each broker, as the cluster has named them to a connected admin client."""
    return [(broker.host, str(broker.port)) for broker in admin._manager.cluster.brokers()]


def set_metadata_backoff(consumer: Any, backoff_ms: int) -> None:
    """Set the interval of a reader's metadata requests; the client passes `retry_backoff_ms` to all its parts but this one."""
    consumer._cluster.config["retry_backoff_ms"] = backoff_ms


def request_metadata(consumer: Any) -> None:
    """Let the client request its topics' leaders again, without waiting for the response."""
    consumer._cluster.request_update()


def await_leaders(consumer: Any, timeout_s: float, *, renew: bool = False) -> None:
    """Request metadata until the assigned partitions have leaders: a poll before that sleeps for all its time. `renew`: at least once."""
    cluster, timer = consumer._cluster, Timer(timeout_s * 1000)
    while renew or any(cluster.leader_for_partition(tp) is None for tp in consumer.assignment()):
        try:
            consumer._net.run(consumer._manager.wait_for, cluster.request_update(), timer.timeout_ms)
        except errors.KafkaError:
            return
        if timer.expired:
            return
        renew = False


def is_idle(consumer: Any) -> bool:
    """True if a consumer is connected, waits for no response, and has delivered all it has received."""
    fetcher = consumer._fetcher
    received = fetcher._completed_fetches or fetcher._next_partition_records or fetcher._next_in_line_exception_metadata
    return connected(consumer) and not received and not fetcher.in_flight_fetches()


def topic_id(consumer: Any, topic: str) -> str | None:
    """The id of a topic in the client's metadata, without a request; None if they lack it."""
    topic_id = consumer._cluster.topic_id(topic)
    return None if topic_id is None else str(topic_id)


def last_received(consumer: Any) -> float:
    """Monotonic time at which a broker last sent anything over a connection that is up; 0.0 if none is up."""
    transports = [connection.transport for connection in list(consumer._manager._conns.values()) if connection.connected]
    return max((transport.last_read for transport in transports if transport is not None), default=0.0)


def poll_once(consumer: Any, timeout_s: float, max_records: int) -> list[Record]:
    """One round of `KafkaConsumer.poll`, as records; it also returns, without a record, once there is an assignment."""
    polled = consumer._poll_once(Timer(timeout_s * 1000), max_records)
    return [_record(record) for records in polled.values() for record in records]


def _record(record: Any) -> Record:
    """Convert a record of the client library; nulls become empty, except the key."""
    return Record(
        topic=record.topic, partition=record.partition, offset=record.offset, timestamp_ms=record.timestamp, key=record.key,
        headers=tuple((name, value or b"") for name, value in record.headers), value=record.value or b"",
    )  # fmt: skip


def position(consumer: Any, topic_partition: Any) -> int | None:
    """The next offset to be delivered, without a request; None while unknown."""
    state = consumer._subscription.assignment.get(topic_partition)
    return None if state is None or state.position is None else state.position.offset


def lag(consumer: Any) -> int:
    """Records between the next offsets of all partitions and their ends, by the newest responses; omits partitions without one."""
    states = list(consumer._subscription.assignment.values())
    pairs = ((state.highwater, state.position) for state in states)
    return sum(max(0, end - position.offset) for end, position in pairs if end is not None and position is not None)


def subscribe(consumer: Any, topics: Sequence[str], listener: Any) -> None:
    """Join the group at the next poll, with the partition counts of the topics already loaded.

    Without this, kafka-python loads the counts while it joins, then sees them as a change and joins a second time.
    """
    for topic in topics:
        consumer.partitions_for_topic(topic)
    consumer.subscribe(topics, listener=listener)
    consumer._coordinator._handle_metadata_update(consumer._cluster)


def has_joined(consumer: Any) -> bool:
    """True if a group member has a completed, current join."""
    return bool(consumer._coordinator.stable())


def fetch_committed(consumer: Any, partitions: Iterable[Any], timeout_s: float) -> Mapping[Any, Any]:
    """Committed offsets and metadata of all partitions, in one request."""
    committed: Mapping[Any, Any] = consumer._coordinator.fetch_committed_offsets(set(partitions), timeout_ms=timeout_s * 1000)
    return committed


def commit_soon(consumer: Any, offsets: Mapping[Any, Any]) -> Any:
    """Send a commit from any thread without waiting; the returned future fails if the member's generation is over."""
    coordinator = consumer._coordinator
    return coordinator._manager.call_soon(coordinator._send_offset_commit_request, offsets)


def producer_identity(producer: Any) -> Any:
    """Producer id and epoch, which prove to the broker that no other process has taken the transactional id since."""
    return producer._transaction_manager.producer_id_and_epoch


def first_error(producer: Any) -> Exception | None:
    """The error that put a transactional producer into its error state; None if it is not in that state."""
    error: Exception | None = producer._transaction_manager.last_error
    return error


def specific(error: Exception) -> Any:
    """Return the Kafka error that a general `KafkaError` names by number in its text, such as "[Error 47]"; other errors unchanged."""
    number = re.search(r"\[Error (\d+)\]", str(error)) if type(error) is errors.KafkaError else None
    return error if number is None else errors.for_code(int(number[1]))()


def init_transactions(producer: Any, identity: Any, timeout_s: float) -> None:
    """Take the transactional id; with an `identity`, only if no other process has taken it since.

    The broker accepts the old id and epoch after it aborted an overdue transaction of ours (KIP-360, KIP-588), and refuses them with
    ProducerFencedError once another process has called `init_transactions`.
    """
    manager = producer._transaction_manager
    with manager._lock:
        manager._transition_to(transaction_manager.TransactionState.INITIALIZING)
        manager._sequence_numbers.clear()
        if identity is not None:
            manager.set_producer_id_and_epoch(identity)
        handler = transaction_manager.InitProducerIdHandler(manager, manager.transaction_timeout_ms, is_epoch_bump=identity is not None)
        handler._is_epoch_bump = False  # a refusal is final: the stock client would request a fresh id and so steal it back
        manager._enqueue_request(handler)
    _wait(producer, handler.result, timeout_s, "taking the transactional id")


def send_offsets(producer: Any, offsets: Mapping[Any, Any], membership: Any, timeout_s: float) -> None:
    """`send_offsets_to_transaction` with a time limit; stock waits without one."""
    _wait(producer, producer._transaction_manager.send_offsets_to_transaction(offsets, membership), timeout_s, "adding offsets")


def commit_transaction(producer: Any, timeout_s: float) -> None:
    """`commit_transaction` with a time limit; stock waits without one."""
    _wait(producer, producer._transaction_manager.begin_commit(), timeout_s, "committing")


def write_end_marker(admin: Any, where: Any, producer_id: int, epoch: int, *, commit: bool) -> None:
    """Write the end of a producer's transaction to a partition, as its coordinator would; the client's own call can only abort."""

    async def write() -> None:
        writable, topic = WriteTxnMarkersRequest.WritableTxnMarker, WriteTxnMarkersRequest.WritableTxnMarker.WritableTxnMarkerTopic
        marker = writable(
            producer_id=producer_id,
            producer_epoch=epoch,
            transaction_result=commit,
            topics=[topic(name=where.topic, partition_indexes=[where.partition])],
            coordinator_epoch=-1,  # an operator's: any coordinator's epoch is newer
        )
        leader = next(iter(await admin._async_get_leader_for_partitions([where])))
        response = await admin._manager.send(WriteTxnMarkersRequest(markers=[marker]), node_id=leader)
        for error in (part.error_code for result in response.markers for named in result.topics for part in named.partitions):
            if error:
                raise errors.for_code(error)(f"{where.topic}/{where.partition}")

    admin._manager.run(write)


def _wait(producer: Any, result: Any, timeout_s: float, what: str) -> None:
    producer._sender.wakeup()
    if not result.wait(timeout_s * 1000):
        raise errors.KafkaTimeoutError(f"{what} took longer than {timeout_s:.1f} s")


def close_producer(producer: Any, timeout_s: float) -> None:
    """Close a producer within `timeout_s` in any state; its own close raises if it cannot flush and leaves its thread running."""
    try:
        producer.close(timeout_s)
    except errors.KafkaError:
        producer._sender.force_close()
        producer._unregister_cleanup()
        producer._closed = True
