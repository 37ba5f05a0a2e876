"""Partitions read and written in bulk against the same records read one by one."""

import json
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.infra.errors import LogError
from penstock.infra.kafka import bulk
from penstock.infra.kafka.bulk import BulkReader, BulkWriter
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection
from penstock.topics.wire.record import Record
from tests.support.bare_clients import c_client
from tests.support.log_helpers import make_topics, outgoing, settle, write


@pytest.fixture
def reader(log: KafkaLog) -> Iterator[BulkReader]:
    opened = BulkReader(log.connection)
    yield opened
    opened.close()


def appended(writer: BulkWriter, record: Record) -> None:
    writer.append(record)
    writer.flush()


def test_blocks_hold_the_committed_records_between_two_offsets(
    log: KafkaLog, reader: BulkReader, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BLOCK_RECORDS", 7)
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"%d" % number for number in range(20)])
    transactions = log.transactions(f"{run_id}.writer")
    transactions.commit([outgoing(topic, b"together", partition=0)])
    transactions.close()
    settle(log, topic)
    tail = log.tail({(topic, 0): "earliest"})
    records = tail.read_to_end(30.0)
    tail.close()
    end = log.end_offsets([(topic, 0)])[topic, 0]
    assert end == records[-1].offset + 2  # the mark of the transaction
    blocks = list(reader.read(topic, 0, first=0, end=end))
    assert [len(block) for block in blocks] == [7, 7, 7]
    assert [record for block in blocks for record in block] == records
    assert [record for block in reader.read(topic, 0, first=3, end=12) for record in block] == records[3:12]


def test_a_block_is_full_at_its_bytes_too(log: KafkaLog, reader: BulkReader, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BLOCK_BYTES", 2500)
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"x" * 1000] * 7)
    assert [len(block) for block in reader.read(topic, 0, first=0, end=7)] == [3, 3, 1]


def test_offsets_that_were_deleted_are_an_error_and_not_a_gap(log: KafkaLog, reader: BulkReader, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"%d" % number for number in range(5)])
    admin = AdminClient(c_client(log.bootstrap))
    for future in admin.delete_records([TopicPartition(topic, 0, 3)]).values():
        future.result(60)
    with pytest.raises(LogError, match=rf"^{topic}/0 cannot be read: "):
        list(reader.read(topic, 0, first=0, end=5))


def test_records_are_appended_with_their_timestamps_and_a_refused_one_is_an_error(log: KafkaLog, reader: BulkReader, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    records = [
        Record(topic=topic, partition=1, offset=n, timestamp_ms=1_600_000_000_000 + n, key=None, headers=(("a", b"\xff"),), value=b"%d" % n)
        for n in range(50)
    ]
    writer = BulkWriter(log.connection)
    for record in records:
        writer.append(record)
    writer.flush()
    assert [record for block in reader.read(topic, 1, first=0, end=50) for record in block] == records
    lost = Record(topic=topic, partition=99, offset=0, timestamp_ms=1, key=None, headers=(), value=b"")
    with pytest.raises(LogError, match=f"^{topic}"):
        appended(writer, lost)


def test_a_broker_that_does_not_answer_is_named_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "SILENT_S", 1.0)
    reader = BulkReader(Connection(bootstrap="127.0.0.1:9", client_id="test"))
    with pytest.raises(LogError, match=r"no record of t/0 arrived for 1 s: .*127\.0\.0\.1:9"):
        list(reader.read("t", 0, first=0, end=5))
    reader.close()


def test_one_request_at_a_time_is_on_its_way_to_a_broker(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    waiting: list[int] = []

    def look(statistics: str) -> None:
        waiting.extend(broker["waitresp_cnt"] for broker in json.loads(statistics)["brokers"].values())

    producer = Producer({**bulk.writing(log.connection), "batch.size": 1000, "linger.ms": 0, "statistics.interval.ms": 2, "stats_cb": look})
    for _ in range(500):
        producer.produce(topic, partition=0, value=b"x" * 900)
        producer.poll(0)
    assert not producer.flush(60.0)
    assert max(waiting) == 1
    assert log.end_offsets([(topic, 0)])[topic, 0] == 500
