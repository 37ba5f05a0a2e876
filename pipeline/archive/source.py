"""A run's topics read for an archive: whole batches of messages of one partition, by confluent-kafka.

The rule: committed records only, in order, between two offsets; a batch is bounded by records and by bytes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from infra.errors import LogError
from pipeline.audit.kafka_source import PASSING, client_settings

FETCH_BYTES = 8 << 20
QUEUED_KIB = 48 << 10
BATCH = 8192
BATCH_OF_LARGE = 8
SILENT_S = 60.0
ANSWER_S = 15.0
GATHER_S = 0.05
"""A batch is not waited for longer than this: the last one of a partition is seldom full."""


def make_consumer(bootstrap: str, security: Mapping[str, str], *, run: str) -> Consumer:
    """A reader that joins nothing and commits nothing."""
    return Consumer(
        {
            **client_settings(bootstrap, security),
            "client.id": "penstock-archive",
            "group.id": f"{run}.archive",  # asked for by the client
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "check.crcs": False,  # every record carries its own checksum, and it is compared
            "fetch.message.max.bytes": FETCH_BYTES,
            "fetch.queue.backoff.ms": 20,
            "fetch.wait.max.ms": 10,  # an answer that is on its way holds up the next partition
            "queued.max.messages.kbytes": QUEUED_KIB,
            "error_cb": lambda _: None,
        }
    )


def messages(
    consumer: Consumer, topic: str, partition: int, *, first: int, end: int, most: int = BATCH, note: Callable[[int], None] = lambda _: None
) -> Iterator[list[Any]]:
    """Batches of the messages from `first` on and below `end`. Raises `LogError` when the broker refuses or falls silent."""
    place = f"{topic}/{partition}"
    try:
        consumer.list_topics(topic, timeout=ANSWER_S)  # a topic whose leader is not known yet is asked for once a second only
        consumer.assign([TopicPartition(topic, partition, first)])
        heard, position = time.monotonic(), first
        while position < end:
            batch: list[Any] = consumer.consume(most, timeout=GATHER_S)
            if not batch:
                if time.monotonic() - heard > SILENT_S:
                    raise LogError(f"{place}: nothing came for {SILENT_S:g} s from offset {position} on; is the broker running?")
                continue
            heard = time.monotonic()
            if batch[-1].offset() >= end or any(message.error() is not None for message in batch):
                batch, position = _cut(batch, place, position, end)
            else:
                position = batch[-1].offset() + 1
            if batch:
                yield batch
            note(position)
    except KafkaException as error:
        raise LogError(f"{place} cannot be read: {error.args[0].str()}") from error


def _cut(batch: Sequence[Any], place: str, position: int, end: int) -> tuple[list[Any], int]:
    """What of a batch is wanted, and the position after it: its end may be that of the partition, or an error."""
    wanted = []
    for message in batch:
        if (error := message.error()) is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                position = max(position, message.offset())  # what is left below are marks of transactions
            elif error.code() not in PASSING:
                raise LogError(f"{place} cannot be read at offset {position}: {error.str()}")
        elif message.offset() < end:
            wanted.append(message)
            position = message.offset() + 1
        else:
            position = end
    return wanted, position
