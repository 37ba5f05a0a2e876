"""Reads whole partitions and writes records in bulk through librdkafka, for exports and imports."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from penstock.infra.errors import LogError
from penstock.infra.kafka.guards import ReadDeadLetters
from penstock.infra.kafka.settings import MAX_RECORD_BYTES, Connection, librdkafka
from penstock.topics import dead_letters
from penstock.topics.wire.record import Record

BLOCK_BYTES = 8 << 20
BLOCK_RECORDS = 2000
FETCH_BYTES = 8 << 20
QUEUE_KIB = 24 << 10
ACK_TIMEOUT_S = 60.0
SILENT_S = 60.0
"""Timeout for a broker that sends nothing although there is more to read."""
POLL_S = 0.02
"""Longest wait for further records once some have arrived."""


class _Client:
    """Base of bulk clients: stores why a connection failed, which librdkafka reports only to its error callback, for later errors."""

    _problem: str | None = None

    def _note(self, error: KafkaError) -> None:
        self._problem = str(error.str())


class BulkReader(_Client):
    """Reads one partition after another; for one thread."""

    def __init__(self, connection: Connection, read_dead_letters: ReadDeadLetters | None = None) -> None:
        self._read_dead_letters = read_dead_letters
        settings = {
            **librdkafka(connection),
            "group.id": f"{connection.client_id}-bulk",  # required by the client; it joins no group and commits nothing
            "enable.auto.commit": False,
            "auto.offset.reset": "error",  # records that retention deletes during the read are an error, not a gap
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.message.max.bytes": FETCH_BYTES,
            "queued.max.messages.kbytes": QUEUE_KIB,
            "fetch.queue.backoff.ms": 5,  # the default of 1 s is a pause after every full queue
            "fetch.wait.max.ms": 10,  # with the default of 500 ms the next partition waits that long for the last one's fetch
            "error_cb": self._note,
        }
        with _translated(f"{connection.bootstrap} cannot be read"):
            self._consumer = Consumer(settings)
        self._topics: set[str] = set()

    def read(self, topic: str, partition: int, *, first: int, end: int) -> Iterator[list[Record]]:
        """Yield the committed records from offset `first` up to below `end`, in blocks of `BLOCK_BYTES`. Raises `LogError`."""
        self._consumer.assign([TopicPartition(topic, partition, first)])
        if topic not in self._topics:  # librdkafka looks up the leaders of a new topic only once a second
            self._topics.add(topic)
            with suppress(KafkaException):  # it retries by itself
                self._consumer.list_topics(topic, 1.0)
        records: list[Record] = []
        size, largest, last_response = 0, 0, time.monotonic()
        position = first
        while position < end:
            # At most as many as fill the block if all are as large as the largest record so far.
            room = (BLOCK_BYTES - size) // largest if largest else 1
            messages = self._consumer.consume(min(end - position, BLOCK_RECORDS - len(records), max(room, 1)), POLL_S)
            if not messages and time.monotonic() - last_response > SILENT_S:
                raise LogError(f"no record of {topic}/{partition} arrived for {SILENT_S:g} s: {self._problem or 'no response'}")
            if messages:
                last_response = time.monotonic()
            for message in messages:
                if (error := message.error()) is not None:
                    if error.code() == KafkaError._BAD_MSG and (after := self._offset_after_skip(message)) is not None:
                        position = after
                        self._consumer.seek(TopicPartition(topic, partition, after))
                        break
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise LogError(f"{topic}/{partition} cannot be read: {error.str()}")
                    position = end  # below it are only transaction markers
                    break
                record = _record(message)
                position = record.offset + 1
                if record.offset >= end:
                    break
                records.append(record)
                size += len(record.value)
                largest = max(largest, len(record.value))
            if size >= BLOCK_BYTES or len(records) >= BLOCK_RECORDS:
                yield records
                records, size = [], 0
        self._consumer.unassign()
        if records:
            yield records

    def _offset_after_skip(self, message: Any) -> int | None:
        """Return the offset after a damaged batch if `penstock topics skip` marked it to be skipped, else None."""
        partition, run = (message.topic(), message.partition()), message.topic().partition(".")[0]
        records = [] if self._read_dead_letters is None else self._read_dead_letters(f"{run}.dead-letters")
        skips = dead_letters.stretches(records, run=run)
        return next((offsets.stop for tp, offsets in skips if tp == partition and message.offset() in offsets), None)

    def close(self) -> None:
        self._consumer.close()


def writing(connection: Connection) -> dict[str, Any]:
    """Return librdkafka's settings for a `BulkWriter`."""
    return {
        **librdkafka(connection),
        "enable.idempotence": True,
        "acks": "all",
        # With two requests in flight a new topic loses acknowledged records: a broker that is not yet the leader refuses the first batch,
        # accepts the second without being able to check its sequence number, and takes the resent first batch for a duplicate.
        # docs/explanation/upstream.md
        "max.in.flight.requests.per.connection": 1,
        "linger.ms": 5,
        "batch.size": 1_000_000,
        "message.max.bytes": MAX_RECORD_BYTES + (1 << 20),
        "queue.buffering.max.kbytes": 64 << 10,
    }


class BulkWriter(_Client):
    """Appends records with their timestamps, in order; for one thread."""

    def __init__(self, connection: Connection) -> None:
        self._failure: str | None = None
        with _translated(f"{connection.bootstrap} cannot be written to"):
            self._producer = Producer({**writing(connection), "error_cb": self._note})

    def append(self, record: Record) -> None:
        """Queue a record, ignoring its offset. Raises `LogError` once any record was refused."""
        self._produce(
            record.topic, partition=record.partition, key=record.key, value=record.value, headers=list(record.headers),
            timestamp=record.timestamp_ms,
        )  # fmt: skip

    def tombstone(self, topic: str, key: bytes) -> None:
        """Delete a key from a compacted topic of one partition."""
        self._produce(topic, partition=0, key=key, value=None)

    def flush(self) -> None:
        """Wait until all records are acknowledged. Raises `LogError`."""
        if self._producer.flush(ACK_TIMEOUT_S):
            raise LogError(f"records were not acknowledged within {ACK_TIMEOUT_S:g} s: {self._problem or 'no response'}")
        self._check()

    def _produce(self, topic: str, **record: Any) -> None:
        """Queue a record, waiting while librdkafka's queue is full. Raises `LogError` if no record is acknowledged meanwhile."""
        until = time.monotonic() + ACK_TIMEOUT_S
        with _translated(f"{topic}: a record was not written"):
            while True:
                try:
                    self._producer.produce(topic, on_delivery=self._delivered, **record)
                    break
                except BufferError as error:  # the client's queue is full
                    self._producer.poll(0.1)
                    if time.monotonic() > until:
                        raise LogError(
                            f"no record written to {topic} was acknowledged for {ACK_TIMEOUT_S:g} s: {self._problem or 'no response'}"
                        ) from error
        self._producer.poll(0)
        self._check()

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and self._failure is None:
            self._failure = f"{message.topic()}/{message.partition()}: a record was not written: {error.str()}"

    def _check(self) -> None:
        if self._failure is not None:
            raise LogError(self._failure)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise LogError(f"{what}: {error.args[0].str()}") from error


def _record(message: Any) -> Record:
    return Record(
        topic=message.topic(), partition=message.partition(), offset=message.offset(), timestamp_ms=message.timestamp()[1],
        key=message.key(), headers=tuple(message.headers() or ()), value=message.value() or b"",
    )  # fmt: skip
