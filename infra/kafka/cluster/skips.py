"""Unreadable offset ranges that the operator had readers skip (`penstock topics skip`), as dead letters of the run.

No reader skips anything by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kafka import TopicPartition

from penstock.infra.errors import Damaged, LogError
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.log import Log, Partition, Tail
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record

ReadDeadLetters = Callable[[str], Sequence[Record]]
"""Topic of a run's dead letters -> its records."""


def skip_damaged(consumer: Any, read_dead_letters: ReadDeadLetters) -> bool:
    """Move a consumer past each skipped range it is in; returns False if it is in none."""
    positions = {(tp.topic, tp.partition): private_api.position(consumer, tp) for tp in consumer.assignment()}
    moved = False
    for run in {topic.partition(".")[0] for topic, _ in positions}:
        records = _read(read_dead_letters, f"{run}.dead-letters")
        for partition, offsets in dead_letters.stretches(records, run=run):
            if positions.get(partition) in offsets:
                consumer.seek(TopicPartition(*partition), offsets.stop)
                moved = True
    return moved


def _read(read_dead_letters: ReadDeadLetters, topic: str) -> Sequence[Record]:
    """The dead letters; none without the right to read them: then the damage itself is reported."""
    try:
        return read_dead_letters(topic)
    except LogError:
        return ()


def first_readable(log: Log, tail_from: Callable[[int], Tail], partition: Partition, offset: int) -> int:
    """Return the first offset from `offset` on that is not damaged, by tails that stop at damage."""
    end = log.end_offsets([partition], committed=False)[partition]
    damaged, step = offset - 1, 1
    while not _readable(log, tail_from, partition, min(end, damaged + step)):
        damaged, step = damaged + step, 2 * step
    readable = min(end, damaged + step)
    while readable - damaged > 1:  # a batch is damaged as a whole
        middle = (damaged + readable) // 2
        damaged, readable = (damaged, middle) if _readable(log, tail_from, partition, middle) else (middle, readable)
    return readable


def _readable(log: Log, tail_from: Callable[[int], Tail], partition: Partition, offset: int) -> bool:
    tail = tail_from(offset)
    end = log.end_offsets([partition])[partition]
    try:
        while tail.position(partition) < end and not tail.poll(1.0, max_records=1):
            pass
    except Damaged:
        return tail.position(partition) > offset  # the damage is after it
    finally:
        tail.close()
    return True
