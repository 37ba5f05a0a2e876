"""A batch that is damaged on the broker's disk stops every reader, until a person has told them to pass over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.infra.errors import Damaged
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Records
from penstock.pipeline.cli.app import app
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.source import Unreadable
from penstock.pipeline.runtime.dead_letters import skip
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TopicSpec, topics_of
from tests.support.a_run import RecordBuilder
from tests.support.bare_clients import c_client
from tests.support.log_helpers import WAIT_S, outgoing, write

BATCHES, EACH = 5, 3
DAMAGED = 2
"""The batch in whose first record a bit is turned."""
GOOD = [b"%d.%d" % (batch, number) for batch in range(BATCHES) if batch != DAMAGED for number in range(EACH)]


@pytest.fixture
def damaged(broker: str, run_id: str, penstock_home: Path) -> Iterator[KafkaLog]:
    """A run whose rollouts/0 holds five batches of three records, one of them damaged."""
    log = KafkaLog(broker)
    log.create_topics({**topics_of(run_id, partitions=1), RUNS_TOPIC: RUNS_SPEC})
    producer = log.producer(linger_ms=200.0)
    producer.send(RecordBuilder(run_id).record())
    for batch in range(BATCHES):
        for record in [producer.send(outgoing(f"{run_id}.rollouts", b"%d.%d" % (batch, number))) for number in range(EACH)]:
            record.offset(WAIT_S)
    producer.close()
    (segment,) = (penstock_home / "broker" / "data").glob(f"{run_id}.rollouts-0/*.log")
    held = segment.read_bytes()
    with segment.open("r+b") as file:
        file.seek(held.index(b"%d.0" % DAMAGED))
        file.write(b"X")
    yield log
    log.close()


def values(log: KafkaLog, run: str) -> list[bytes]:
    tail = log.tail({(f"{run}.rollouts", 0): "earliest"})
    try:
        return [bytes(record.value) for record in tail.read_to_end(10.0)]
    finally:
        tail.close()


def exported(log: KafkaLog, run: str) -> list[bytes]:
    reader = BulkReader(log.connection, log.read_dead_letters)
    try:
        return [bytes(record.value) for block in reader.read(f"{run}.rollouts", 0, first=0, end=BATCHES * EACH) for record in block]
    finally:
        reader.close()


def test_every_reader_goes_on_behind_what_a_person_has_told_them_to_pass_over(
    damaged: KafkaLog, broker: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = DAMAGED * EACH
    with pytest.raises(Damaged, match=f"offset {first} .*`penstock topics skip RUN"):
        values(damaged, run_id)
    with pytest.raises(Unreadable):
        list(KafkaSource(broker, run_id, settings=c_client(broker)).read("rollouts"))
    with pytest.raises(SystemExit) as ended:
        app(["topics", "skip", run_id, "rollouts", "0", str(first), "--bootstrap", broker])
    assert ended.value.code == 0
    assert f"readers skip rollouts/0 from {first} to {first + EACH - 1}; a group whose samples" in capsys.readouterr().out
    assert values(damaged, run_id) == GOOD
    assert [bytes(record.value) for record in KafkaSource(broker, run_id, settings=c_client(broker)).read("rollouts")] == GOOD
    assert exported(damaged, run_id) == GOOD
    member = damaged.member(f"{run_id}.scorer", [f"{run_id}.rollouts"])
    taken: list[bytes] = []
    while len(taken) < len(GOOD):
        for event in member.take(WAIT_S):
            taken += [bytes(record.value) for record in event.records] if isinstance(event, Records) else []
    member.close()
    assert taken == GOOD
    with pytest.raises(ConfigError, match="offsets 6 to 8 of rollouts/0 are skipped already"):
        skip(damaged, run_id, "rollouts", 0, first)


def compressed(log: KafkaLog, topic: str, codec: str) -> None:
    """Write a record, a batch of another program's that is compressed, and a record."""
    write(log, topic, [b"before"])
    foreign = Producer({**c_client(log.bootstrap), "compression.type": codec, "linger.ms": 200})
    for number in range(EACH):
        foreign.produce(topic, value=b"%d" % number * 1000, partition=0)
    foreign.flush(WAIT_S)
    write(log, topic, [b"after"])


@pytest.mark.parametrize(
    ("codec", "package"),
    [("zstd", "zstandard"), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("lz4", "lz4"), ("snappy", "python-snappy")))],
)
def test_a_batch_that_is_compressed_in_a_way_nobody_can_read_is_passed_over_as_a_damaged_one(
    broker: str, run_id: str, codec: str, package: str
) -> None:
    log, topic = KafkaLog(broker), f"{run_id}.rollouts"
    specs = topics_of(run_id, partitions=1)
    as_sent = TopicSpec(name=topic, partitions=1, configs={**specs[topic].configs, "compression.type": "producer"})
    log.create_topics({**specs, topic: as_sent})
    compressed(log, topic, codec)
    advice = f"compressed with {codec}: install {package} where workers run; to let readers skip it, run `penstock topics skip "
    with pytest.raises(Damaged, match=rf"{advice}.*{topic}/0 at offset 1"):
        values(log, run_id)
    stretch, _ = skip(log, run_id, "rollouts", 0, 1)
    assert stretch == range(1, 1 + EACH)
    assert values(log, run_id) == [b"before", b"after"]
    log.close()


def test_what_another_program_compresses_can_be_read_all_the_same_and_what_inflates_without_end_is_refused(
    broker: str, run_id: str
) -> None:
    log, topic = KafkaLog(broker), f"{run_id}.rollouts"
    log.create_topics(topics_of(run_id, partitions=1))
    compressed(log, topic, "zstd")
    assert values(log, run_id) == [b"before", *(b"%d" % number * 1000 for number in range(EACH)), b"after"]
    foreign, refused = Producer({**c_client(broker), "compression.type": "zstd", "message.max.bytes": 200 << 20}), list[str]()
    foreign.produce(topic, value=bytes(100 << 20), partition=0, on_delivery=lambda error, _: refused.append(error.name()))
    foreign.flush(WAIT_S)
    assert refused == ["MSG_SIZE_TOO_LARGE"]
    log.close()


def test_where_nothing_is_held_up_unblocking_says_so_in_a_line(damaged: KafkaLog, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--yes", "--abort"]):
        with pytest.raises(SystemExit) as ended:
            app(["topics", "unblock", run_id, "--bootstrap", damaged.bootstrap, *options])
        assert (ended.value.code, capsys.readouterr().out) == (0, "no transaction blocks readers\n")


def test_what_can_be_read_and_what_a_run_cannot_do_without_is_not_passed_over(damaged: KafkaLog, run_id: str) -> None:
    for topic, partition, offset, why in (
        ("rollouts", 0, 1, "rollouts/0/1 is readable, so it cannot be skipped"),
        ("rollouts", 0, 99, "offset 99 is not in rollouts/0, which has offsets 0 to 14"),
        ("rollouts", 7, 0, "has no partition 7 of rollouts"),
        ("ledger", 0, 0, "ledger cannot be skipped: the ledger has no gaps. Continue in a new run: penstock fork"),
        ("groups", 0, 0, "groups cannot be skipped: an unreadable outcome leaves its group open"),
    ):
        with pytest.raises(ConfigError, match=why):
            skip(damaged, run_id, topic, partition, offset)
    assert damaged.read_dead_letters(f"{run_id}.dead-letters") == []
