"""A tail that was closed leaves its client to the next one: a client takes longer to connect than a small topic to be read."""

import pytest

from penstock.infra.kafka import tail as reading
from penstock.infra.kafka.log import KafkaLog
from tests.support.log_helpers import make_topics, values_in, write


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The consumers that tails have made."""
    consumers: list[object] = []
    make = reading.make_consumer

    def remembered(*arguments: object, **settings: object) -> object:
        consumers.append(make(*arguments, **settings))  # type: ignore[arg-type]
        return consumers[-1]

    monkeypatch.setattr(reading, "make_consumer", remembered)
    return consumers


def test_topics_that_are_scanned_one_after_the_other_share_a_client(log: KafkaLog, run_id: str, made: list[object]) -> None:
    topics = make_topics(log, run_id, "a", "b", "c")
    for topic in topics:
        write(log, topic, [topic.encode()])
    for _ in range(3):
        assert [values_in(log, topic) for topic in topics] == [[topic.encode()] for topic in topics]
    assert len(made) <= 2  # for nine reads: a client that waits for a response is not kept


def test_tails_that_are_open_at_a_time_have_clients_of_their_own(log: KafkaLog, run_id: str, made: list[object]) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"1"])
    first, second = (log.tail({(topic, 0): "earliest"}) for _ in range(2))
    assert [[record.value for record in tail.read_to_end()] for tail in (first, second)] == [[b"1"], [b"1"]]
    assert len(made) == 2
    for tail in (first, second, first):  # a second close is harmless
        tail.close()
    assert values_in(log, topic) == [b"1"]
    assert len(made) <= 3  # a client that waits for a response is not kept


def test_a_topic_that_was_deleted_and_made_again_is_read_by_the_client_that_read_the_old_one(
    log: KafkaLog, run_id: str, made: list[object]
) -> None:
    for value in (b"old", b"new", b"newest"):
        (topic,) = make_topics(log, run_id, "a")
        write(log, topic, [value])
        assert values_in(log, topic) == [value]
        log.delete_topics([topic])
    assert len(made) == 1
