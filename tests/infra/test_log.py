"""What both logs promise: the one on Kafka and the one in memory."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.infra.errors import Fenced, LogError, LostPartition, SendFailed, Unrecoverable
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Committed, Log, Pools, Revoked, Tail
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.topic_reader import scan
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing
from tests.support.log_helpers import (
    WAIT_S,
    Heard,
    closed_at_end,
    listen,
    make_topics,
    open_transaction,
    outgoing,
    settle,
    values_in,
    write,
)


@pytest.fixture(params=["memory", "kafka"])
def log(request: pytest.FixtureRequest, run_id: str) -> Iterator[Log]:
    opened: Log = MemoryLog() if request.param == "memory" else KafkaLog(request.getfixturevalue("broker"))
    with closed_at_end(opened, lambda: opened.delete_topics(opened.topics(f"{run_id}."))):
        yield opened


def test_a_record_comes_back_as_it_was_sent(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    headers = (("run", b"demo"), ("run", b"twice"), ("empty", b""), ("schema", bytes(range(256))))
    producer = log.producer()
    sent = [
        Outgoing(topic=topic, partition=2, key=b"17", headers=headers, value=memoryview(b"payload" * 1000)),
        Outgoing(topic=topic, partition=2, key=None, headers=(), value=b""),
    ]
    assert [producer.send(record).offset(WAIT_S) for record in sent] == [0, 1]
    tail = log.tail({(topic, 2): "earliest"})
    first, second = tail.read_to_end(WAIT_S)
    assert (first.topic, first.partition, first.offset, first.key, first.headers) == (topic, 2, 0, b"17", headers)
    assert first.value == b"payload" * 1000
    assert (second.key, second.headers, second.value) == (None, (), b"")
    assert first.timestamp_ms > 1_600_000_000_000


def test_a_record_of_16_mib_passes_alone_and_in_a_transaction(log: Log, run_id: str) -> None:
    topic = f"{run_id}.large"
    log.create_topics({topic: TopicSpec(name=topic, partitions=1, configs={"max.message.bytes": str((16 << 20) + (64 << 10))})})
    large = bytes(range(256)) * (1 << 16)
    write(log, topic, [large])
    writer = log.transactions(f"{run_id}.writer")
    (offset,) = writer.commit([outgoing(topic, memoryview(large))])  # type: ignore[arg-type]
    assert [record.value == large for record in log.read(topic, 0, [0, offset])] == [True, True]


def test_each_partition_keeps_its_order(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    producer = log.producer()
    for number in range(400):
        producer.send(outgoing(topic, b"%d" % number, partition=number % 4))
    producer.flush(WAIT_S)
    tail = log.tail({(topic, partition): "earliest" for partition in range(4)})
    records = tail.read_to_end(WAIT_S)
    for partition in range(4):
        assert [int(record.value) for record in records if record.partition == partition] == list(range(partition, 400, 4))


def test_a_tail_from_latest_sees_what_is_written_after_it_was_made(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"before"])
    tail = log.tail({(topic, 0): "latest"})
    write(log, topic, [b"after"])
    assert [record.value for record in tail.poll(WAIT_S)] == [b"after"]
    assert tail.poll(0.05) == []
    assert tail.outage_s == 0.0


def test_a_tail_is_extended_and_moved(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"0", b"1", b"2"], partition=0)
    write(log, topic, [b"3", b"4"], partition=1)
    tail = log.tail({(topic, 0): 1})
    assert tail.position((topic, 0)) == 1
    assert [record.value for record in tail.read_to_end(WAIT_S)] == [b"1", b"2"]
    tail.add({(topic, 1): "earliest"})
    assert [record.value for record in tail.read_to_end(WAIT_S)] == [b"3", b"4"]
    assert tail.position((topic, 0)) == 3
    tail.seek((topic, 0), 2)
    assert [record.value for record in tail.read_to_end(WAIT_S)] == [b"2"]
    with pytest.raises(LogError, match="not among the partitions of this reader"):
        tail.position((topic, 3))


def test_reading_to_the_end_does_not_wait_behind_a_transaction_marker(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    writer = log.transactions(f"{run_id}.writer")
    offsets = [writer.commit([outgoing(topic, b"%d" % number)])[0] for number in range(3)]
    settle(log, topic)
    tail = log.tail({(topic, 0): "earliest"})
    assert [record.offset for record in tail.read_to_end(WAIT_S)] == offsets
    assert tail.read_to_end(WAIT_S) == []
    assert tail.position((topic, 0)) == log.end_offsets([(topic, 0)])[topic, 0]


def test_exactly_the_offsets_asked_for_are_read_in_the_order_asked(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"%d" % number for number in range(200)])
    assert [record.value for record in log.read(topic, 0, [150, 3, 4, 199])] == [b"150", b"3", b"4", b"199"]
    assert log.read(topic, 0, []) == []
    with pytest.raises(LogError, match=r"no committed record at offset 200, 1000"):
        log.read(topic, 0, [3, 200, 1000])


def test_records_before_an_offset_are_deleted_for_good(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"%d" % number for number in range(10)])
    log.delete_records({(topic, 0): 7})
    assert (log.beginning_offsets([(topic, 0)]), log.end_offsets([(topic, 0)])) == ({(topic, 0): 7}, {(topic, 0): 10})
    assert [record.value for record in log.read(topic, 0, [7, 9])] == [b"7", b"9"]
    with pytest.raises(LogError, match="offset"):
        log.read(topic, 0, [6])
    kept, gone = log.tail({(topic, 0): "earliest"}), log.tail({(topic, 0): 6})
    assert [record.value for record in kept.read_to_end(WAIT_S)] == [b"7", b"8", b"9"]
    with pytest.raises(LogError, match=f"{topic}/0: offset 6 is missing, it holds 7 to 9"):
        any(gone.poll(1.0) for _ in range(int(WAIT_S)))
    log.delete_records({})


def test_records_that_are_deleted_while_a_topic_is_scanned_are_passed_over(log: Log, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (topic,) = make_topics(log, run_id, "a")
    for number in range(2):
        write(log, topic, [b"%d" % value for value in range(10)], partition=number)
    opened = log.tail

    def too_late(*args: Any, **how: Any) -> Tail:
        """A tail on records of which some are gone by now, in one partition all that the scan had found."""
        log.delete_records({(topic, 0): 7, (topic, 1): 10})
        write(log, topic, [b"new"], partition=1)
        return opened(*args, **how)

    monkeypatch.setattr(log, "tail", too_late)
    assert [(record.partition, record.value) for record in scan(log, topic)] == [(0, b"7"), (0, b"8"), (0, b"9")]


def test_the_first_record_of_a_time_is_found_by_its_timestamp(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"early"])
    (early,) = log.read(topic, 0, [0])
    while int(time.time() * 1000) <= early.timestamp_ms + 1:
        time.sleep(0.001)
    write(log, topic, [b"late"])
    times = [0, early.timestamp_ms, early.timestamp_ms + 1, early.timestamp_ms + 3_600_000]
    assert [log.offsets_at([(topic, 0)], when)[topic, 0] for when in times] == [0, 0, 1, 2]


def test_records_of_a_transaction_can_be_read_by_offset_as_soon_as_it_returned(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b")
    writer = log.transactions(f"{run_id}.writer")
    for number in range(5):
        first, second = writer.commit([outgoing(a, b"%d" % number), outgoing(b, b"%d" % number, partition=3)])
        assert [log.read(a, 0, [first])[0].value, log.read(b, 3, [second])[0].value] == [b"%d" % number] * 2


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_an_open_transaction_holds_back_what_is_written_behind_it(log: Log, run_id: str, ending: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    places = [(topic, 0)]
    write(log, topic, [b"before"])
    opened = open_transaction(log, [outgoing(topic, b"inside")])
    (behind,) = write(log, topic, [b"behind"])
    committed = log.tail({(topic, 0): "earliest"})
    assert [record.value for record in committed.read_to_end(WAIT_S)] == [b"before"]
    assert (log.end_offsets(places), log.end_offsets(places, committed=False)) == ({(topic, 0): 1}, {(topic, 0): behind + 1})
    with pytest.raises(LogError, match="took too long"):
        log.read(topic, 0, [behind], timeout_s=1.0)
    getattr(opened, ending)()
    rest: list[bytes] = []
    while not rest or rest[-1] != b"behind":
        rest += [record.value for record in committed.poll(WAIT_S)]
    assert rest == ([b"inside", b"behind"] if ending == "commit" else [b"behind"])
    settle(log, topic)
    if ending == "abort":
        with pytest.raises(LogError, match="no committed record at offset 1"):
            log.read(topic, 0, [0, 1])
    assert log.read(topic, 0, [behind])[0].value == b"behind"


def test_a_tail_that_starts_behind_the_end_says_so(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"0", b"1"])
    tail = log.tail({(topic, 0): 7})
    with pytest.raises(LogError, match="offset 7 is missing, it holds 0 to 1"):
        any(tail.poll(1.0) for _ in range(int(WAIT_S)))


def test_the_markers_of_a_transaction_may_come_late(run_id: str) -> None:
    log = MemoryLog(markers_late_s=0.2)
    (topic,) = make_topics(log, run_id, "a")
    tail, writer = log.tail({(topic, 0): "earliest"}), log.transactions("writer")
    (offset,) = writer.commit([outgoing(topic, b"1")])
    assert tail.read_to_end() == []
    assert log.read(topic, 0, [offset])[0].value == b"1"  # waits for the marker
    assert [record.value for record in tail.poll(0.0)] == [b"1"]
    writer.commit([outgoing(topic, b"2")])
    log.transactions("writer")  # whoever takes the id next sees all of it
    assert [record.value for record in tail.poll(0.0)] == [b"2"]


def test_a_partition_that_lost_its_tail_is_read_on_from_what_is_left(run_id: str) -> None:
    log = MemoryLog()
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"0", b"1", b"2"])
    tail, member = log.tail({(topic, 0): "earliest"}), Heard(log.member("g", [topic]))
    tail.read_to_end()
    listen(member, until=lambda: len(member.records) == 3)
    opened = log.open_transaction([outgoing(topic, b"lost")])
    log.truncate((topic, 0), 1)
    opened.commit()
    assert log.end_offsets([(topic, 0)]) == {(topic, 0): 1}
    with pytest.raises(LogError, match="no committed record at offset 2"):
        log.read(topic, 0, [2])
    assert write(log, topic, [b"other"]) == [1]
    assert [(record.offset, record.value) for record in tail.poll(0.0)] == [(1, b"other")]
    listen(member, until=lambda: len(member.records) == 4)
    assert member.records[-1].value == b"other"


def test_a_writer_notices_that_its_partition_has_lost_records(run_id: str) -> None:
    log = MemoryLog()
    (topic,) = make_topics(log, run_id, "ledger")
    writer = log.transactions("writer")
    for number in range(4):
        writer.commit([outgoing(topic, b"%d" % number)])
    log.truncate((topic, 0), 4)
    with pytest.raises(Unrecoverable, match=r"ledger/0 has lost records: offset 6 was acknowledged, the next record was written at 4"):
        writer.commit([outgoing(topic, b"4")])


def test_topics_are_created_once_and_compared_afterwards(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    make_topics(log, run_id, "a", "b")
    assert log.topics(f"{run_id}.") == [f"{run_id}.a", f"{run_id}.b"]
    assert (log.partitions(topic), log.partitions(f"{run_id}.nothing")) == (4, None)
    with pytest.raises(LogError, match="has 4 partitions, expected 3"):
        make_topics(log, run_id, "a", partitions=3)
    with pytest.raises(LogError, match="retention"):
        log.create_topics({topic: TopicSpec(name=topic, partitions=4, configs={"retention.ms": "5000"})})


def test_deleted_topics_are_gone_and_can_be_made_again(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"old"])
    log.delete_topics([topic, f"{run_id}.never"])
    assert log.topics(f"{run_id}.") == []
    assert log.partitions(topic) is None
    make_topics(log, run_id, "a", partitions=2)
    assert log.partitions(topic) == 2
    assert log.beginning_offsets([(topic, 0)]) == log.end_offsets([(topic, 0)]) == {(topic, 0): 0}


def test_a_topic_or_partition_that_does_not_exist_is_a_clear_error(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    missing = f"{run_id}.missing"
    producer = log.producer()
    with pytest.raises(LogError, match=f"{missing} does not exist"):
        log.tail({(missing, 0): "earliest"})
    with pytest.raises(LogError, match=f"{missing} does not exist"):
        log.member(f"{run_id}.group", [topic, missing])
    with pytest.raises(LogError, match=f"{missing} does not exist"):
        producer.send(outgoing(missing, b"x"))
    with pytest.raises(LogError, match="no partition 9"):
        log.end_offsets([(topic, 9)])
    with pytest.raises(LogError, match="no partition 9"):
        producer.send(outgoing(topic, b"x", partition=9))


def test_a_transaction_is_written_whole_or_not_at_all(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b")
    writer = log.transactions(f"{run_id}.writer")
    assert writer.commit([outgoing(a, b"1"), outgoing(b, b"2"), outgoing(a, b"3")]) == [0, 0, 1]
    with pytest.raises(SendFailed, match="wrote nothing"):
        writer.commit([outgoing(a, b"lost"), outgoing(a, b"no such partition", partition=7)])
    writer.commit([outgoing(b, b"4")])
    assert (values_in(log, a), values_in(log, b)) == ([b"1", b"3"], [b"2", b"4"])


def test_the_newest_writer_of_a_transactional_id_fences_the_older_one_for_good(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    old = log.transactions(f"{run_id}.writer")
    old.commit([outgoing(topic, b"1")])
    new = log.transactions(f"{run_id}.writer")
    for _ in range(2):
        with pytest.raises(Fenced, match=r"transactional id .*\.writer"):
            old.commit([outgoing(topic, b"zombie")])
    new.commit([outgoing(topic, b"2")])
    assert values_in(log, topic) == [b"1", b"2"]


def test_a_lone_member_owns_everything_and_starts_at_the_beginning(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b")
    write(log, a, [b"1", b"2"])
    write(log, b, [b"3"], partition=3)
    heard = Heard(log.member(f"{run_id}.group", [a, b]))
    listen(heard, until=lambda: len(heard.records) == 3)
    assert heard.owned == {(topic, number) for topic in (a, b) for number in range(4)}
    assert set(heard.assigned.partitions.values()) == {Committed(offset=None)}
    assert heard.member.membership() == heard.assigned.membership


def test_a_new_member_starts_behind_what_was_committed_and_gets_its_metadata(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    write(log, topic, [b"0", b"1", b"2"])
    first = Heard(log.member(f"{run_id}.group", [topic]))
    listen(first, until=lambda: len(first.records) == 3)
    assert first.member.commit({(topic, 0): (1, "old"), (topic, 1): (0, "")})
    assert first.member.commit({(topic, 0): (2, "half done: ü")})
    first.member.close()
    second = Heard(log.member(f"{run_id}.group", [topic]))
    listen(second, until=lambda: bool(second.records))
    assert second.assigned.partitions[topic, 0] == Committed(offset=2, metadata="half done: ü")
    assert [record.value for record in second.records] == [b"2"]


def test_two_members_share_equal_partitions_of_both_topics_and_one_inherits(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b")
    one = Heard(log.member(f"{run_id}.group", [a, b]))
    listen(one, until=lambda: len(one.owned) == 8)
    two = Heard(log.member(f"{run_id}.group", [a, b]))
    listen(one, two, until=lambda: len(one.owned) == len(two.owned) == 4)
    for heard in (one, two):
        assert {number for topic, number in heard.owned if topic == a} == {number for topic, number in heard.owned if topic == b}
    assert one.owned | two.owned == {(topic, number) for topic in (a, b) for number in range(4)}
    assert one.assigned.membership.generation == two.assigned.membership.generation
    one.member.close()
    listen(two, until=lambda: len(two.owned) == 8)


def test_a_revoked_partition_delivers_and_commits_nothing_more(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    for partition in (0, 1):
        write(log, topic, [b"%d" % partition] * 50, partition=partition)
    one = Heard(log.member(f"{run_id}.group", [topic], max_records=10))
    listen(one, until=lambda: len(one.records) >= 10)
    two = Heard(log.member(f"{run_id}.group", [topic], max_records=10))
    listen(one, two, until=lambda: len(one.owned) == len(two.owned) == 1)
    (lost,) = two.owned
    assert not one.member.commit({lost: (5, "")})
    assert one.member.commit(dict.fromkeys(one.owned, (5, "")))
    revoked = next(index for index, event in enumerate(one.events) if isinstance(event, Revoked))
    kept = Heard(one.member, one.events[revoked:])
    assert {(record.topic, record.partition) for record in kept.records} <= one.owned


def test_records_fetched_but_not_taken_before_a_rebalance_come_again_after_it(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    for partition in (0, 1):
        write(log, topic, [b"%d" % number for number in range(50)], partition=partition)
    one = Heard(log.member(f"{run_id}.group", [topic], max_records=1000))
    listen(one, until=lambda: bool(one.owned))
    time.sleep(0.5)  # by now the records lie in the member's buffer, or one fetch ahead of it
    two = Heard(log.member(f"{run_id}.group", [topic]))
    listen(one, two, until=lambda: len(one.owned) == len(two.owned) == 1)
    for heard in (one, two):
        last = heard.events.index(heard.assigned)

        def since(heard: Heard = heard, last: int = last) -> list[int]:
            return [int(record.value) for record in Heard(heard.member, heard.events[last:]).records]

        listen(one, two, until=lambda since=since: len(since()) >= 50)  # type: ignore[misc]
        assert since() == list(range(50))


def test_a_member_with_little_room_gets_everything_once_in_order(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    for partition in (0, 1):
        write(log, topic, [b"%d" % number for number in range(300)], partition=partition)
    heard = Heard(log.member(f"{run_id}.group", [topic], max_records=25))
    listen(heard, until=lambda: len(heard.records) >= 600)
    for partition in (0, 1):
        assert [int(record.value) for record in heard.records if record.partition == partition] == list(range(300))


def test_offsets_and_records_of_one_transaction_stand_together(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b", partitions=1)
    write(log, a, [b"in"])
    heard = Heard(log.member(f"{run_id}.group", [a]))
    listen(heard, until=lambda: len(heard.records) == 1)
    writer = log.transactions(f"{run_id}.writer")
    writer.commit([outgoing(b, b"out")], offsets={(a, 0): (1, "note")}, member=heard.member.membership())
    with pytest.raises(SendFailed):
        writer.commit([outgoing(b, b"x", partition=5)], offsets={(a, 0): (9, "lost")}, member=heard.member.membership())
    with pytest.raises(ValueError, match="only together with the consumer group's generation"):
        writer.commit([], offsets={(a, 0): (9, "lost")})
    heard.member.close()
    again = Heard(log.member(f"{run_id}.group", [a]))
    listen(again, until=lambda: bool(again.owned))
    assert again.assigned.partitions == {(a, 0): Committed(offset=1, metadata="note")}
    assert values_in(log, b) == [b"out"]


def test_a_transaction_for_an_assignment_that_is_over_is_refused(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b", partitions=2)
    one = Heard(log.member(f"{run_id}.group", [a]))
    listen(one, until=lambda: len(one.owned) == 2)
    over = one.assigned.membership
    two = Heard(log.member(f"{run_id}.group", [a]))
    listen(one, two, until=lambda: len(one.owned) == len(two.owned) == 1)
    writer = log.transactions(f"{run_id}.writer")
    with pytest.raises(LostPartition, match="another generation"):
        writer.commit([outgoing(b, b"zombie")], offsets={(a, 0): (7, "zombie")}, member=over)
    writer.commit([outgoing(b, b"fine")], offsets=dict.fromkeys(one.owned, (1, "")), member=one.member.membership())
    assert values_in(log, b) == [b"fine"]
    for closing in (one.member, two.member, writer):
        closing.close()


def test_a_tail_keeps_offsets_for_a_group_of_its_own(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    tail = log.tail({(topic, 0): "earliest", (topic, 1): "earliest"}, group=f"{run_id}.tracker")
    assert set(tail.committed().values()) == {Committed(offset=None)}
    tail.commit({(topic, 1): (5, "so far")})
    tail.close()
    again = log.tail({(topic, 0): "earliest", (topic, 1): "earliest"}, group=f"{run_id}.tracker")
    assert again.committed() == {(topic, 0): Committed(offset=None), (topic, 1): Committed(offset=5, metadata="so far")}
    again.close()
    alone = log.tail({(topic, 0): "earliest"})
    with pytest.raises(LogError, match="without a consumer group"):
        alone.commit({(topic, 0): (1, "")})


def test_metadata_that_no_broker_takes_is_refused_here(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: bool(heard.owned))
    with pytest.raises(ValueError, match="4097 bytes"):
        heard.member.commit({(topic, 0): (0, "x" * 4097)})
    assert heard.member.commit({(topic, 0): (0, "x" * 4096)})


def test_costs_are_seconds_of_cpu_by_kind(log: Log, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"x"] * 500)
    values_in(log, topic)
    costs = log.costs()
    assert set(costs) == {"send_s", "poll_s", "io_s"}
    assert all(0.0 <= seconds < 60.0 for seconds in costs.values())
    assert isinstance(log, MemoryLog) or min(costs.values()) > 0.0


def test_members_own_the_partitions_of_their_pool_and_of_those_that_fall_back_on_it(log: Log, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b")
    orders = (("big", "small"), ("big", "small"), ("small",), ("small",))

    def join(pool: str) -> Heard:
        return Heard(log.member(f"{run_id}.group", [a, b], pools=Pools(own=pool, by_partition=orders)))

    def both(*numbers: int) -> set[tuple[str, int]]:
        return {(topic, number) for topic in (a, b) for number in numbers}

    small = join("small")
    listen(small, until=lambda: small.owned == both(0, 1, 2, 3))
    big = join("big")
    listen(big, small, until=lambda: big.owned == both(0, 1) and small.owned == both(2, 3))
    second = join("big")
    listen(
        big, small, second, until=lambda: big.owned | second.owned == both(0, 1) and len(second.owned) == 2 and small.owned == both(2, 3)
    )
    small.member.close()
    write(log, a, [b"nobody's"], partition=3)
    write(log, a, [b"big's"], partition=0)
    heard = (big, second)
    listen(*heard, until=lambda: any(one.records for one in heard) and big.owned | second.owned == both(0, 1))
    assert {record.value for one in heard for record in one.records} == {b"big's"}  # read again by who gets its partition
    for one in heard:
        one.member.close()
