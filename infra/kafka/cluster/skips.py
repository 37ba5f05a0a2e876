"""Unreadable stretches of a partition that a person has had every reader skip (`penstock topics skip`).

The rule: what is passed over stands in the run's `dead-letters`, written by a person; no reader passes over anything by itself.
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
"""Topic of a run's dead letters -> those that are there."""


def skip_damaged(consumer: Any, read_dead_letters: ReadDeadLetters) -> bool:
    """Have a consumer go on behind each stretch at which it stands; false when it stands at none."""
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
    """The letters, none for who may not read them: the damage itself is then what is to be said."""
    try:
        return read_dead_letters(topic)
    except LogError:
        return ()


def first_readable(log: Log, tail_from: Callable[[int], Tail], at: Partition, offset: int) -> int:
    """The first offset from `offset` on at which nothing damaged lies, found with tails that stop at damage."""
    end = log.end_offsets([at], committed=False)[at]
    damaged, step = offset - 1, 1
    while not _readable(log, tail_from, at, min(end, damaged + step)):
        damaged, step = damaged + step, 2 * step
    readable = min(end, damaged + step)
    while readable - damaged > 1:  # what lies in one batch is damaged as a whole
        middle = (damaged + readable) // 2
        damaged, readable = (damaged, middle) if _readable(log, tail_from, at, middle) else (middle, readable)
    return readable


def _readable(log: Log, tail_from: Callable[[int], Tail], at: Partition, offset: int) -> bool:
    tail = tail_from(offset)
    end = log.end_offsets([at])[at]
    try:
        while tail.position(at) < end and not tail.poll(1.0, max_records=1):
            pass
    except Damaged:
        return tail.position(at) > offset  # it lies behind
    finally:
        tail.close()
    return True
