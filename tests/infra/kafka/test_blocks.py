"""Records read in blocks against the same records read one by one."""

import socket
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from penstock.infra.errors import LogError
from penstock.infra.kafka import fetch
from penstock.infra.kafka.blocks import Batch, Block, parse, varint
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Record
from tests.infra.kafka.test_record_format import Rows, _records, build, read
from tests.support.log_helpers import outgoing, settle


@pytest.fixture
def log(broker: str) -> Iterator[KafkaLog]:
    found = KafkaLog(broker, client_id="test")
    yield found
    found.close()


def parsed(raw: bytes) -> Block:
    whole = DefaultRecordBatch(raw)
    return parse("t", 3, raw, [Batch(whole._pos, len(raw), whole.records_count, 0, whole.first_timestamp, None)])


@given(_records)
@settings(max_examples=60, deadline=None)
def test_a_block_says_of_every_record_what_reading_it_alone_says(rows: Rows) -> None:
    raw = build(rows, packed=True)
    assert parsed(raw).records() == read(raw)


@given(_records, st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_our_error_and_nothing_worse(rows: Rows, data: st.DataObject) -> None:
    raw = bytearray(build(rows, packed=True))
    start = DefaultRecordBatch(bytes(raw))._pos
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(start, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        records = parsed(bytes(raw)).records()
    except LogError:
        return
    assert len(records) == len(rows)


@given(st.integers(0, 2**31 - 1))
def test_lengths_come_back_and_those_that_contradict_each_other_are_one_clear_error(number: int) -> None:
    body = b"\x00" + varint(number) + varint(0) + varint(-1) + varint(0) + varint(0)
    data = varint(len(body)) + body
    assert parse("t", 0, data, [Batch(0, len(data), 1, 0, 0, None)]).times_ms.tolist() == [number]
    with pytest.raises(LogError, match=r"^t/0: a record is damaged: its lengths contradict each other$"):
        parse("t", 0, data + b"?", [Batch(0, len(data) + 1, 1, 0, 0, None)])


def in_blocks(log: KafkaLog, topic: str, first: int, end: int) -> list[Record]:
    reader = log.blocks()
    found = [record for block in reader.read(topic, 0, first=first, end=end) for record in block.records()]
    reader.close()
    return found


@pytest.mark.parametrize("config", [{}, {"compression.type": "gzip"}, {"message.timestamp.type": "LogAppendTime"}])
def test_a_partition_is_read_between_two_offsets_as_the_log_reads_it(
    log: KafkaLog, run_id: str, config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{run_id}.t"
    log.create_topics({topic: TopicSpec(name=topic, partitions=1, configs=config)})
    transactions, producer = log.transactions(f"{run_id}.test"), log.producer()
    aborting = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": f"{run_id}.aborting"})
    aborting.init_transactions()
    offsets = []
    for number in range(6):
        offsets += [producer.send(outgoing(topic, bytes([number]) * 30_000, key=b"k")).offset(30.0) for _ in range(3)]
        aborting.begin_transaction()
        aborting.produce(topic, value=b"never", partition=0)
        aborting.flush()
        transactions.commit([outgoing(topic, b"together")])
        aborting.abort_transaction()
    producer.close()
    transactions.close()
    settle(log, topic)
    end = log.end_offsets([(topic, 0)])[topic, 0]
    monkeypatch.setattr(fetch, "ANSWER_BYTES", 70_000)  # some answers
    whole = in_blocks(log, topic, 0, end)
    assert [record.value for record in whole].count(b"together") == 6 and b"never" not in [record.value for record in whole]
    assert whole == log.read(topic, 0, [record.offset for record in whole])
    assert {record.offset for record in whole} > set(offsets)
    assert in_blocks(log, topic, offsets[1], offsets[-1]) == [record for record in whole if offsets[1] <= record.offset < offsets[-1]]


def test_a_lost_connection_loses_and_repeats_nothing(log: KafkaLog, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = f"{run_id}.t"
    log.create_topics({topic: TopicSpec(name=topic, partitions=2, configs={})})
    producer = log.producer(linger_ms=0)
    for partition in range(2):
        for number in range(20):
            producer.send(outgoing(topic, bytes([number]) * 30_000, partition=partition)).offset(30.0)
    producer.close()
    monkeypatch.setattr(fetch, "ANSWER_BYTES", 40_000)
    reader, found = log.blocks(), []
    for block in reader.read(topic, 0, first=0, end=20):
        found += [record.value[0] for record in block.records()]
        if len(found) in (3, 9):
            assert reader._socket is not None
            reader._socket.shutdown(socket.SHUT_RDWR)
    assert found == list(range(20))
    next(reader.read(topic, 0, first=0, end=20))  # given up: its next answer is nobody's
    assert [record.value[0] for block in reader.read(topic, 1, first=7, end=20) for record in block.records()] == list(range(7, 20))
    with pytest.raises(LogError, match=f"^{topic}/1 cannot be read at offset 30: .*OffsetOutOfRange"):
        next(reader.read(topic, 1, first=30, end=40))
    reader.close()
