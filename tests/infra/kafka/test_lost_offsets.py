"""An offset that a partition does not hold is an error with both numbers, never a silent jump; nobody makes topics by asking for them."""

from typing import ClassVar

import pytest
from kafka import KafkaConsumer, TopicPartition, errors

from penstock.infra.errors import LogError
from penstock.infra.kafka import settings, tail
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Member, Records, Tail
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics, write


def test_a_tail_behind_what_was_deleted_says_so_and_does_not_jump(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    write(log, topic, [b"%d" % number for number in range(6)])
    log.delete_records({(topic, 0): 4})
    lost = rf"{topic}/0: offset 1 is missing, it holds 4 to 5: records were deleted"
    for start in (log.tail({(topic, 0): "latest"}), log.tail({(topic, 0): "earliest"})):
        start.seek((topic, 0), 1)
        with pytest.raises(LogError, match=lost):
            polled(start)
        start.close()
    with pytest.raises(LogError, match="the records at offsets 1 were deleted, the first existing one is 4"):
        log.read(topic, 0, [1, 5])


class Lost:
    """A consumer whose next record is not there; nobody says in time which are."""

    limits_ms: ClassVar[list[int]] = []

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition("t", 3)}

    def beginning_offsets(self, places: object, timeout_ms: int) -> None:
        del places
        self.limits_ms.append(timeout_ms)
        raise errors.KafkaTimeoutError("timed out")


def test_a_reader_whose_next_record_is_gone_says_so_even_if_no_broker_says_in_time_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_range(*_: object) -> None:
        raise errors.OffsetOutOfRangeError({TopicPartition("t", 3): 7})

    monkeypatch.setattr(tail.private_api, "poll_once", out_of_range)
    monkeypatch.setattr(tail.private_api, "position", lambda *_: 7)
    message = r"missing, and the existing offsets cannot be read \(.*timed out.*\); position of this reader: t/3 at offset 7$"
    with pytest.raises(LogError, match=message):
        tail.poll(Lost(), 1.0, 10)
    assert Lost.limits_ms == [1000 * tail.OFFSETS_TIMEOUT_S]


def polled(tail: Tail) -> None:
    for _ in range(int(WAIT_S)):
        assert tail.poll(1.0) == []


def test_a_first_tail_and_a_first_member_begin_with_what_is_kept(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    write(log, topic, [b"%d" % number for number in range(6)])
    log.delete_records({(topic, 0): 4})
    tail, heard = log.tail({(topic, 0): "earliest"}), Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: len(heard.records) == 2)
    assert [record.offset for record in tail.read_to_end()] == [record.offset for record in heard.records] == [4, 5]


def committed(log: KafkaLog, group: str, topic: str, offset: int) -> None:
    tail = log.tail({(topic, 0): "earliest"}, group=group)
    tail.commit({(topic, 0): (offset, "")})
    tail.close()


def test_a_member_whose_next_records_were_deleted_says_which_and_reads_on(broker: str, run_id: str) -> None:
    log, said = KafkaLog(broker), list[str]()
    log.wait_out(WAIT_S, notify=said.append)
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    write(log, topic, [b"%d" % number for number in range(6)])
    committed(log, f"{run_id}.group", topic, 1)
    log.delete_records({(topic, 0): 4})
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: len(heard.records) == 2)
    assert [record.offset for record in heard.records] == [4, 5]
    assert said == [f"{topic}/0: offsets 1 to 3 were deleted before they were read; continuing at 4"]
    heard.member.close()
    log.close()


def taken(member: Member) -> None:
    for _ in range(int(WAIT_S)):
        assert not any(isinstance(event, Records) for event in member.take(1.0))


def test_a_member_behind_the_end_of_a_truncated_partition_stops_with_both_numbers(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    write(log, topic, [b"%d" % number for number in range(6)])
    committed(log, f"{run_id}.group", topic, 9)
    member = log.member(f"{run_id}.group", [topic])
    with pytest.raises(LogError, match=rf"{topic}/0: offset 9 is missing, it holds 0 to 5"):
        taken(member)


GONE = r"topic {} was deleted, or this user has no more permission to see it: stop this process"
ANOTHER = r"topic {} was deleted and created again while it was read: restart this process"


@pytest.mark.parametrize(("again", "line"), [(False, GONE), (True, ANOTHER)], ids=["deleted", "created again"])
def test_readers_of_a_topic_that_somebody_deletes_say_so_also_when_it_is_made_again(
    broker: str, log: KafkaLog, run_id: str, again: bool, line: str
) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    write(log, topic, [b"old"])
    tail, heard = log.tail({(topic, 0): "earliest"}), Heard(log.member(f"{run_id}.group", [topic]))
    assert [record.value for record in tail.read_to_end()] == [b"old"]
    listen(heard, until=lambda: len(heard.records) == 1)
    other = KafkaLog(broker)
    other.delete_topics([topic])
    if again:
        make_topics(other, run_id, "a", partitions=1)
    other.close()
    for silent in (lambda: polled(tail), lambda: taken(heard.member)):
        with pytest.raises(LogError, match=line.format(topic)):
            silent()
    if not again:
        with pytest.raises(LogError, match=rf"topic {topic} does not exist"):
            log.tail({(topic, 0): "earliest"})


def test_a_consumer_makes_no_topic_by_asking_for_it(log: KafkaLog) -> None:
    made = KafkaConsumer(**settings.consumer(log.connection, group=None))
    assert made.config["allow_auto_create_topics"] is False
    made.close()
