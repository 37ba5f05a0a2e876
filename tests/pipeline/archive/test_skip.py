"""A batch that is damaged on the broker's disk stops every reader, until a person has told them to pass over it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.infra.errors import Damaged
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Records
from penstock.pipeline.archive.skip import skip
from penstock.pipeline.audit.kafka_reader import KafkaSource
from penstock.pipeline.audit.source import Unreadable
from penstock.pipeline.cli.app import app
from penstock.pipeline.config.load import ConfigError
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.a_run import Teller
from tests.support.log_helpers import WAIT_S, outgoing

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
    producer.send(Teller(run_id).record())
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
    reader = BulkReader(log.connection, log.letters)
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
        list(KafkaSource(broker, run_id).read("rollouts"))
    with pytest.raises(SystemExit) as ended:
        app(["topics", "skip", run_id, "rollouts", "0", str(first), "--bootstrap", broker])
    assert ended.value.code == 0
    assert f"readers pass over rollouts/0 from {first} to {first + EACH - 1}; a group whose samples" in capsys.readouterr().out
    assert values(damaged, run_id) == GOOD
    assert [bytes(record.value) for record in KafkaSource(broker, run_id).read("rollouts")] == GOOD
    assert exported(damaged, run_id) == GOOD
    member = damaged.member(f"{run_id}.scorer", [f"{run_id}.rollouts"])
    taken: list[bytes] = []
    while len(taken) < len(GOOD):
        for event in member.take(WAIT_S):
            taken += [bytes(record.value) for record in event.records] if isinstance(event, Records) else []
    member.close()
    assert taken == GOOD
    with pytest.raises(ConfigError, match="pass over rollouts/0 6 to 8 already"):
        skip(damaged, run_id, "rollouts", 0, first)


def test_what_can_be_read_and_what_a_run_cannot_do_without_is_not_passed_over(damaged: KafkaLog, run_id: str) -> None:
    for topic, partition, offset, why in (
        ("rollouts", 0, 1, "rollouts/0/1 can be read: nothing is to be passed over"),
        ("rollouts", 0, 99, "rollouts/0 holds the offsets 0 to 14"),
        ("rollouts", 7, 0, "has no rollouts/7"),
        ("ledger", 0, 0, "ledger cannot be passed over: the ledger has no gaps; `penstock fork"),
        ("groups", 0, 0, "groups cannot be passed over: an outcome that nobody can read leaves its group open"),
    ):
        with pytest.raises(ConfigError, match=why):
            skip(damaged, run_id, topic, partition, offset)
    assert damaged.letters(f"{run_id}.dead-letters") == []
