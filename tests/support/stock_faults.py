"""Faults of the client library, shown in a process each: `python -m tests.support.stock_faults FAULT stock|repaired BOOTSTRAP TOPIC`.

Prints one JSON object; with `repaired` the same steps are taken after `faults.apply()`. Not a test by itself.
"""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, RequestTimedOutError
from kafka.future import Future
from kafka.net import manager as net_manager
from kafka.net.transport import KafkaSSLTransport
from kafka.protocol.consumer import SyncGroupRequest
from kafka.protocol.producer import ProduceRequest
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from tests.support.bare_clients import python_client


def _with_late_answers(bootstrap: str, topic: str, *, late_s: float, which: Callable[[int], bool]) -> tuple[Any, list[Any]]:
    """A lone member of a new group; its chosen SyncGroup answers reach it late. Also the answers so far."""
    consumer = KafkaConsumer(topic, **python_client(bootstrap), group_id=uuid.uuid4().hex, metadata_max_age_ms=300)
    manager = consumer._coordinator._manager
    send, answers = manager.send, []

    def late(request: Any, *args: Any, **options: Any) -> Any:
        future = send(request, *args, **options)
        if not isinstance(request, SyncGroupRequest):
            return future
        answers.append(future)
        if not which(len(answers)):
            return future
        delayed = Future()
        future.add_callback(lambda value: manager._net.call_later(late_s, lambda: delayed.success(value)))
        future.add_errback(delayed.failure)
        return delayed

    manager.send = late
    return consumer, answers


def late_second_join(bootstrap: str, topic: str) -> dict[str, Any]:
    """The topic of a lone member grows by two partitions, the answer to that join comes late, polls last 100 ms: does it own them ever?"""
    late: list[int] = []
    consumer, answers = _with_late_answers(bootstrap, topic, late_s=0.15, which=lambda number: number in late)
    coordinator = consumer._coordinator
    consumer.partitions_for_topic(topic)
    _poll_until(consumer, 20, 1000, lambda: coordinator.stable() and len(consumer.assignment()) == 2)
    _poll_until(consumer, 2, 500, lambda: False)  # whatever joins there are at the start are over
    late.append(len(answers) + 1)
    admin = KafkaAdminClient(**python_client(bootstrap))
    admin.create_partitions({topic: 4})
    admin.close()
    _poll_until(consumer, 5, 100, lambda: coordinator.stable() and len(consumer.assignment()) == 4)
    return {"stable": coordinator.stable(), "late_joins": len(answers) >= late[0], "owned": len(consumer.assignment())}


def _poll_until(consumer: Any, limit_s: float, timeout_ms: int, done: Callable[[], bool]) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not done():
        consumer.poll(timeout_ms=timeout_ms)


def short_polls(bootstrap: str, topic: str) -> dict[str, Any]:
    """A lone member polled with no time to wait, so that its joins end between two polls: how many does it need?"""
    consumer, answers = _with_late_answers(bootstrap, topic, late_s=0.02, which=lambda _: True)
    end = time.monotonic() + 4
    while time.monotonic() < end and not consumer.assignment():
        consumer.poll(timeout_ms=0)
        time.sleep(0.1)
    return {"joins": len(answers), "owned": len(consumer.assignment())}


def refused_record(bootstrap: str, topic: str) -> dict[str, Any]:
    """An idempotent producer after one record that the broker refuses as too large: do later ones arrive?"""
    producer = KafkaProducer(**python_client(bootstrap), max_request_size=32 << 20, delivery_timeout_ms=4000, request_timeout_ms=2000)
    return {"outcomes": [_sent(producer, topic, value) for value in (b"a", bytes(2 << 20), b"b", b"c")]}


def _sent(producer: Any, topic: str, value: bytes) -> str:
    try:
        producer.send(topic, value, partition=0).get(6)
    except KafkaError as error:
        return type(error).__name__
    return "written"


def commit_without_its_record(bootstrap: str, topic: str) -> dict[str, Any]:
    """A transaction with a refused record, aborted; then one more: is everything there that was committed?"""
    producer = KafkaProducer(
        **python_client(bootstrap), transactional_id=uuid.uuid4().hex, max_request_size=32 << 20, retry_backoff_ms=2, max_block_ms=5000
    )
    producer.init_transactions()
    committed = []
    for number in range(3):
        producer.begin_transaction()
        producer.send(topic, bytes(2 << 20), partition=0)
        try:
            producer.commit_transaction()
        except KafkaError:
            producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, b"%d" % number, partition=0)
        try:
            producer.commit_transaction()
        except KafkaError:
            break
        committed.append(str(number))
    reader = KafkaConsumer(**python_client(bootstrap), isolation_level="read_committed", auto_offset_reset="earliest")
    reader.assign([TopicPartition(topic, 0)])
    found: list[str] = []
    end = time.monotonic() + 4
    while time.monotonic() < end and len(found) < len(committed):
        found += [bytes(record.value).decode() for records in reader.poll(timeout_ms=500).values() for record in records]
    return {"committed": committed, "found": found}


def stalled_broker(bootstrap: str, topic: str) -> dict[str, Any]:
    """An idempotent producer, no request of which is answered until a record has run out of time: do later ones arrive?"""
    producer = KafkaProducer(**python_client(bootstrap), delivery_timeout_ms=1500, request_timeout_ms=700)
    outcomes = [_sent(producer, topic, b"a")]
    manager = producer._sender._client._manager
    send = manager.send

    def unanswered(request: Any, *args: Any, **options: Any) -> Any:
        if isinstance(request, ProduceRequest):
            return Future().failure(RequestTimedOutError())
        return send(request, *args, **options)

    manager.send = unanswered
    outcomes.append(_sent(producer, topic, b"b"))
    manager.send = send
    return {"outcomes": [*outcomes, _sent(producer, topic, b"c"), _sent(producer, topic, b"d")]}


class _Foreign(str):
    """A header name whose bytes are not UTF-8."""

    def encode(self, *_: Any) -> bytes:
        return b"\xff\xfe"


def foreign_header_name(bootstrap: str, topic: str) -> dict[str, Any]:
    """A record with a header name that is not UTF-8, then another one: what does a reader get?"""
    producer = KafkaProducer(**python_client(bootstrap))
    for value, name in ((b"foreign", _Foreign("name")), (b"next", "name")):
        producer.send(topic, value, partition=0, headers=[(name, b"1")]).get(10)
    reader = KafkaConsumer(**python_client(bootstrap), auto_offset_reset="earliest")
    reader.assign([TopicPartition(topic, 0)])
    values: list[str] = []
    names: list[str] = []

    def read() -> None:
        while len(values) < 2:
            try:
                polled = reader.poll(timeout_ms=500)
            except KafkaError:
                continue
            for record in [record for records in polled.values() for record in records]:
                values.append(bytes(record.value).decode())
                names.append(record.headers[0][0])

    reading = threading.Thread(target=read, daemon=True)  # the second poll of a stock reader does not return
    reading.start()
    reading.join(6)
    return {"values": values, "names": names}


def small_reads(bootstrap: str, topic: str) -> dict[str, Any]:
    """A record of 900 kB is fetched: the largest piece that was taken from a socket at once."""
    pieces: list[int] = []

    class Counted(socket.socket):
        def recv(self, *arguments: Any) -> bytes:
            piece = super().recv(*arguments)
            pieces.append(len(piece))
            return piece

    socket.socket = Counted  # type: ignore[misc]
    KafkaProducer(**python_client(bootstrap)).send(topic, bytes(900_000), partition=0).get(10)
    reader = KafkaConsumer(**python_client(bootstrap), auto_offset_reset="earliest")
    reader.assign([TopicPartition(topic, 0)])
    received: list[bytes] = []
    end = time.monotonic() + 10
    while time.monotonic() < end and not received:
        received = [bytes(record.value) for records in reader.poll(timeout_ms=500).values() for record in records]
    return {"received": len(received[0]), "more_than_a_page": max(pieces) > 4096}


def tls_copies(_bootstrap: str, _topic: str) -> dict[str, Any]:
    """A request of 1 MiB is sent over TLS, 16 KiB at a time: how many bytes are copied on the way?"""
    copied: list[int] = []

    class Peer:
        def send(self, data: Any) -> int:
            copied.append(0 if isinstance(data, memoryview) else len(data))
            return min(len(data), 16 << 10)

    secure = SimpleNamespace(_sock=Peer(), _write_buffer=deque([bytes(1 << 20)]))
    sent, error = KafkaSSLTransport._sock_send(secure)
    return {"sent": sent, "error": error, "copied_mib": sum(copied[1:]) >> 20}


def inflated_batch(bootstrap: str, topic: str) -> dict[str, Any]:
    """A batch of 65 MiB that is 65 KiB long, as a broker would deliver it: does the reader inflate it?"""
    del bootstrap, topic  # it is in the reader's memory
    builder = DefaultRecordBatchBuilder(2, DefaultRecordBatch.CODEC_GZIP, False, -1, -1, -1, 200 << 20)
    builder.append(0, 0, None, bytes(65 << 20), [])
    built = bytes(builder.build())
    try:
        return {"small": len(built) < 1 << 20, "inflated_mib": sum(len(record.value) for record in DefaultRecordBatch(built)) >> 20}
    except KafkaError as error:
        return {"small": len(built) < 1 << 20, "error": type(error).__name__}


def unlisted_leader(bootstrap: str, topic: str) -> dict[str, Any]:
    """For one poll the metadata name a leader that is not among the brokers, as while one comes back: is anything read afterwards?"""
    producer = KafkaProducer(**python_client(bootstrap))
    producer.send(topic, b"record", partition=0).get(20)
    producer.close()
    consumer = KafkaConsumer(**python_client(bootstrap), auto_offset_reset="earliest", consumer_timeout_ms=4000)
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek(TopicPartition(topic, 0), 0)
    cluster = consumer._client.cluster
    consumer.partitions_for_topic(topic)
    listed, cluster._brokers = cluster._brokers, {}
    consumer._client._manager._conns.clear()  # nor is there a connection to it
    with contextlib.suppress(KafkaError):
        consumer.poll(timeout_ms=0)
    cluster._brokers = listed
    read = [record.value.decode() for record in consumer]
    consumer.close()
    return {"read": read}


def silent_broker(bootstrap: str, topic: str) -> dict[str, Any]:
    """Of two bootstrap addresses the first to be tried accepts connections and sends nothing, like a frozen broker: does a client open?"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        turns = itertools.count()  # the client shuffles its addresses, then chooses one at random
        net_manager.random.choice = lambda brokers: sorted(brokers, key=lambda one: one.port != port)[min(next(turns), 1)]  # type: ignore[method-assign,assignment]
        client = {**python_client(bootstrap), "bootstrap_servers": [f"127.0.0.1:{port}", bootstrap]}
        try:
            consumer = KafkaConsumer(**client, bootstrap_timeout_ms=4000)
        except KafkaError as error:
            return {"opened": False, "error": type(error).__name__}
        partitions = consumer.partitions_for_topic(topic)
        consumer.close()
    return {"opened": True, "partitions": len(partitions or ())}


FAULTS = {
    fault.__name__: fault
    for fault in (
        late_second_join,
        short_polls,
        refused_record,
        stalled_broker,
        commit_without_its_record,
        foreign_header_name,
        small_reads,
        tls_copies,
        inflated_batch,
        unlisted_leader,
        silent_broker,
    )
}

if __name__ == "__main__":
    if sys.argv[2] == "repaired":
        from penstock.infra.kafka.client_repairs import faults

        faults.apply()
    print(json.dumps(FAULTS[sys.argv[1]](sys.argv[3], sys.argv[4])), flush=True)
    os._exit(0)  # a stuck client must not hold its process
