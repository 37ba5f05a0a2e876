"""Short words for the tests of the log: topics, records, and waiting for what a member hears."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from confluent_kafka import Producer

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Assigned, Event, Log, Member, Partition, Records, Revoked
from penstock.infra.memory.log import MemoryLog
from penstock.topics.catalogue import TopicSpec
from penstock.topics.wire.record import Outgoing, Record
from tests.support.bare_clients import c_client
from tests.support.waiting import until

WAIT_S = 100.0
Opened = TypeVar("Opened", bound=Log)


class EditedLog(MemoryLog):
    """An in-memory log whose records a test may replace."""

    def replace(self, record: Record) -> None:
        with self._state.change:
            records = self._state.part((record.topic, record.partition)).records
            records[next(index for index, one in enumerate(records) if one.offset == record.offset)] = record


@contextmanager
def closed_at_end(log: Opened, *ends: Callable[[], object]) -> Iterator[Opened]:
    """The log, of which every tail, member and writer is closed at the end, newest first; then come `ends`, and its own."""

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **named: Any) -> Any:
            client = make(*given, **named)
            stack.callback(client.close)
            return client

        return made

    with ExitStack() as stack:
        stack.callback(log.close)
        for end in ends:
            stack.callback(end)
        for name in ("tail", "member", "transactions", "producer"):
            setattr(log, name, noted(getattr(log, name)))
        yield log


def make_topics(log: Log, run: str, *names: str, partitions: int = 4) -> list[str]:
    """Create topics `<run>.<name>`; returns their names."""
    topics = [f"{run}.{name}" for name in names]
    log.create_topics({topic: TopicSpec(name=topic, partitions=partitions, configs={"retention.ms": "-1"}) for topic in topics})
    return topics


def outgoing(topic: str, value: bytes, *, partition: int = 0, key: bytes | None = None) -> Outgoing:
    """A record with one header."""
    return Outgoing(topic=topic, partition=partition, key=key, headers=(("schema", b"test/1"),), value=value)


def write(log: Log, topic: str, values: Sequence[bytes], *, partition: int = 0) -> list[int]:
    """Write single records and wait for them; returns their offsets."""
    producer = log.producer()
    try:
        return [pending.offset(WAIT_S) for pending in [producer.send(outgoing(topic, value, partition=partition)) for value in values]]
    finally:
        producer.close()


def settle(log: Log, *topics: str) -> None:
    """Wait until no transaction is open in the topics' first partitions; its end is written some ms after its commit returned."""
    places = [(topic, 0) for topic in topics]
    until(lambda: log.end_offsets(places) == log.end_offsets(places, committed=False), limit_s=WAIT_S)


class OpenTransaction(Protocol):
    """A transaction of another process that has neither committed nor aborted."""

    def commit(self) -> None: ...
    def abort(self) -> None: ...


class _OpenOnKafka:
    def __init__(self, log: KafkaLog, records: Sequence[Outgoing]) -> None:
        self._producer = Producer({**c_client(log.bootstrap), "transactional.id": uuid.uuid4().hex})
        self._producer.init_transactions()
        self._producer.begin_transaction()
        for record in records:
            self._producer.produce(record.topic, value=bytes(record.value), partition=record.partition)
        self._producer.flush()

    def commit(self) -> None:
        self._producer.commit_transaction()

    def abort(self) -> None:
        self._producer.abort_transaction()


def open_transaction(log: Log, records: Sequence[Outgoing]) -> OpenTransaction:
    """Write records in a transaction that stays open until the caller ends it."""
    if isinstance(log, MemoryLog):
        return log.open_transaction(records)
    assert isinstance(log, KafkaLog)
    return _OpenOnKafka(log, records)


def values_in(log: Log, topic: str) -> list[bytes]:
    """The values of all committed records of the first partition."""
    settle(log, topic)
    tail = log.tail({(topic, 0): "earliest"})
    try:
        return [record.value for record in tail.read_to_end(WAIT_S)]
    finally:
        tail.close()


@dataclass
class Heard:
    """What a member has heard so far."""

    member: Member
    events: list[Event] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        return [record for event in self.events if isinstance(event, Records) for record in event.records]

    @property
    def owned(self) -> set[Partition]:
        """What the last Assigned or Revoked left it."""
        for event in reversed(self.events):
            if isinstance(event, Assigned):
                return set(event.partitions)
            if isinstance(event, Revoked):
                return set()
        return set()

    @property
    def summary(self) -> list[object]:
        return [event if not isinstance(event, Records) else len(event.records) for event in self.events]

    @property
    def assigned(self) -> Assigned:
        return [event for event in self.events if isinstance(event, Assigned)][-1]


def listen(*heard: Heard, until: Callable[[], bool]) -> None:
    """Take from members in turn until `until` holds; fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, [one.summary for one in heard]
        for one in heard:
            one.events += one.member.take(0.05)
