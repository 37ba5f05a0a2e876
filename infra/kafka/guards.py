"""Checks that the client lacks while it reads: for damaged offset ranges marked by `penstock topics skip`, and for deleted topics."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from typing import Any

from kafka import TopicPartition

from penstock.infra.errors import Damaged, LogError
from penstock.infra.kafka.admin import Admin
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.log import Log, Partition, Tail
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record

ReadDeadLetters = Callable[[str], Sequence[Record]]
"""Topic of a run's dead letters -> its records."""


def skip_damaged(consumer: Any, read_dead_letters: ReadDeadLetters) -> bool:
    """Seek past each damaged offset range at the consumer's position that `penstock topics skip` marked; return True if one was passed."""
    positions = {(tp.topic, tp.partition): private_api.position(consumer, tp) for tp in consumer.assignment()}
    moved = False
    for run in {topic.partition(".")[0] for topic, _ in positions}:
        records: Sequence[Record] = ()
        with suppress(LogError):  # without the right to read them, the damage itself is reported
            records = read_dead_letters(f"{run}.dead-letters")
        for partition, offsets in dead_letters.stretches(records, run=run):
            if positions.get(partition) in offsets:
                consumer.seek(TopicPartition(*partition), offsets.stop)
                moved = True
    return moved


def first_readable(log: Log, tail_from: Callable[[int], Tail], partition: Partition, offset: int) -> int:
    """Return the first offset from `offset` on that is not damaged; `tail_from(offset)` opens a tail that raises `Damaged`."""
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
    """Return True unless reading from `offset` stops at once at a damaged batch."""
    with closing(tail_from(offset)) as tail:
        end = log.end_offsets([partition])[partition]
        try:
            while tail.position(partition) < end and not tail.poll(1.0, max_records=1):
                pass
        except Damaged:
            return tail.position(partition) > offset  # the damage is after it
    return True


DOUBT_S = 3.0
"""Metadata may lack a topic for a moment, as while a broker starts; after this time the topic is verified, and again after as long."""


class TopicIds:
    """Detects that a reader's topics were deleted or replaced, by the topic ids when it first saw them; for one thread."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._first: dict[str, str | None] = {}
        """Topic -> its id; None before the client has it."""
        self._doubted = 0.0

    def add(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._first.setdefault(topic, None)

    def check(self, consumer: Any, *, idle: bool) -> None:
        """Compare the ids with the client's metadata, after each poll. Raises `LogError` if an idle topic was deleted or replaced."""
        if not idle and None not in self._first.values():
            return
        doubtful = False
        for topic, first in self._first.items():
            seen = private_api.topic_id(consumer, topic)
            if first is None:
                self._first[topic] = seen
            doubtful |= seen is None or seen != self._first[topic]
        now = time.monotonic()
        if not (doubtful and idle and private_api.connected(consumer)):
            self._doubted = now
        elif now - self._doubted > DOUBT_S:
            self._doubted = now
            self.verify()

    def verify(self) -> None:
        """Compare the ids with the cluster's. Raises `LogError` if a topic was deleted, or deleted and created again."""
        ids = self._admin.ids(list(self._first))
        for topic, first in self._first.items():
            if topic not in ids:
                raise LogError(f"topic {topic} was deleted, or this user has no more permission to see it: stop this process")
            if first is not None and ids[topic] != first:
                raise LogError(
                    f"topic {topic} was deleted and created again while it was read: restart this process, which would mix the two"
                )
