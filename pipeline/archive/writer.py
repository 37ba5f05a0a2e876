"""Writes records to a broker at offsets that are known beforehand, timestamps included.

The rule: every record is acknowledged at exactly the offset it was meant for, or the import ends with the place and both numbers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.infra.errors import LogError
from penstock.pipeline.archive.laying import Step
from penstock.pipeline.audit.kafka_reader import client_settings
from penstock.topics.wire.record import Record

ANSWER_S = 60.0
FILLER = b""
_MESSAGE_BYTES = 20 << 20


class Writer:
    """One plain and one transactional producer; for one thread."""

    def __init__(self, bootstrap: str, security: Mapping[str, str], *, run: str) -> None:
        settings = {
            **client_settings(bootstrap, security),
            "client.id": "penstock-archive",
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "batch.size": 1_000_000,
            "message.max.bytes": _MESSAGE_BYTES,
            "queue.buffering.max.kbytes": 96 << 10,
            "error_cb": lambda _: None,
        }
        self._plain = Producer(settings)
        self._transactions = Producer({**settings, "transactional.id": f"{run}.import", "transaction.timeout.ms": 60_000, "linger.ms": 0})
        self._admin = AdminClient(client_settings(bootstrap, security))
        self._failure: str | None = None
        self._begun = False
        self._marked: dict[tuple[str, int], int] = {}
        """Partitions whose last transaction may not have got its mark yet -> the offset after it."""

    def lay(
        self, steps: Sequence[Step], at: Mapping[tuple[str, int], int], places: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], int]:
        """Take one step in each of some partitions, from the offsets in `at`; gives the offsets after it. Raises `LogError`."""
        following = dict(at)
        try:
            self._wait_for_marks([place for place, step in zip(places, steps, strict=True) if step.plain and place in self._marked])
            for place, step in zip(places, steps, strict=True):
                following[place] = self._send(self._plain, step.plain, place, following[place])
            self._flush(self._plain)
            if any(step.together for step in steps):
                self._begin()
                for place, step in zip(places, steps, strict=True):
                    after = self._send(self._transactions, step.together, place, following[place])
                    following[place] = after + bool(step.together)
                self._transactions.commit_transaction(ANSWER_S)
            if any(step.aborted for step in steps):
                self._begin()
                for place, step in zip(places, steps, strict=True):
                    for _ in range(step.aborted):
                        self._produce(self._transactions, place, following[place], value=FILLER)
                        following[place] += 1
                    following[place] += bool(step.aborted)
                self._flush(self._transactions)  # what is not sent yet would not be written at all
                self._transactions.abort_transaction(ANSWER_S)
        except KafkaException as error:
            raise LogError(f"the broker refused: {error.args[0].str()}") from error
        self._check()
        self._marked |= {place: following[place] for place, step in zip(places, steps, strict=True) if step.together or step.aborted}
        return following

    def fill(self, place: tuple[str, int], end: int) -> None:
        """Make `end` the first kept offset of an empty partition. Raises `LogError`."""
        if not end:
            return
        for offset in range(end):
            self._produce(self._plain, place, offset, value=FILLER)
        self._flush(self._plain)
        for future in self._admin.delete_records([TopicPartition(*place, end)], request_timeout=ANSWER_S).values():
            try:
                future.result()
            except KafkaException as error:
                raise LogError(f"{place[0]}/{place[1]}: offsets before {end} cannot be deleted: {error.args[0].str()}") from error

    def append(self, record: Record) -> None:
        """Write one record wherever it comes to stand."""
        self._produce(self._plain, (record.topic, record.partition), None, record=record)
        self._flush(self._plain)

    def _wait_for_marks(self, places: Sequence[tuple[str, int]]) -> None:
        """Until what is written outside of transactions comes to stand behind the last one; those among themselves wait by themselves."""
        left, until = {place: self._marked.pop(place) for place in places}, time.monotonic() + ANSWER_S
        while left:
            asked = self._admin.list_offsets(
                {TopicPartition(*place): OffsetSpec.latest() for place in left}, isolation_level=IsolationLevel.READ_UNCOMMITTED
            )
            found = {(place.topic, place.partition): future.result().offset for place, future in asked.items()}
            left = {place: end for place, end in left.items() if found[place] < end}
            if left and time.monotonic() > until:
                place, end = next(iter(left.items()))
                raise LogError(f"{place[0]}/{place[1]} ends at offset {found[place]}, {end} was expected")

    def _begin(self) -> None:
        if not self._begun:
            self._transactions.init_transactions(ANSWER_S)
            self._begun = True
        self._transactions.begin_transaction()

    def _send(self, producer: Producer, records: Sequence[Record], place: tuple[str, int], at: int) -> int:
        for record in records:
            self._produce(producer, place, record.offset, record=record)
        return records[-1].offset + 1 if records else at

    def _produce(
        self, producer: Producer, place: tuple[str, int], offset: int | None, *, record: Record | None = None, value: bytes = b""
    ) -> None:
        content: dict[str, Any] = {"value": value}
        if record is not None:
            content = {"value": record.value, "key": record.key, "headers": list(record.headers), "timestamp": record.timestamp_ms}
        while True:
            try:
                producer.produce(place[0], partition=place[1], on_delivery=self._delivered(place, offset), **content)
                break
            except BufferError:  # the client's queue is full
                producer.poll(0.1)
                self._check()
        producer.poll(0)

    def _delivered(self, place: tuple[str, int], offset: int | None) -> Callable[[Any, Any], None]:
        def note(error: Any, message: Any) -> None:
            if self._failure is not None:
                return
            if error is not None:
                self._failure = f"{place[0]}/{place[1]}: a record was not written: {error.str()}"
            elif offset is not None and message.offset() != offset:
                self._failure = (
                    f"{place[0]}/{place[1]}: a record of offset {offset} came to stand at {message.offset()}: somebody else writes there"
                )

        return note

    def _flush(self, producer: Producer) -> None:
        if producer.flush(ANSWER_S):
            raise LogError(f"records were not acknowledged within {ANSWER_S:g} s; is the broker running?")
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise LogError(self._failure)
