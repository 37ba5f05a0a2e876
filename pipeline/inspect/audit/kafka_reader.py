"""Reads a run's topics for an audit with confluent-kafka, a client that no worker uses. Read-only; joins no consumer group."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.pipeline.inspect.audit.source import Unreadable
from penstock.topics import dead_letters
from penstock.topics.catalogue import RUNS_TOPIC, TURNS, topic_name
from penstock.topics.wire.record import Record

ORDER = (RUNS_TOPIC, "run", "dead-letters", "metrics", "ledger", "groups", "rollouts", "replies", "calls", "prompts", "weights")
"""Order in which end offsets are read: referring topics first, so that in an active run the referenced records are below the ends too."""
OPTIONAL = ("run", *TURNS)
"""Topics that a run may lack: `run` if an earlier release created it, turns if there are no environment workers."""

RESPONSE_S = 15.0
SILENT_S = 60.0
"""Longest wait for a broker that sends nothing although there is more to read."""
PROGRESS_S = 3.0
POLL_S = 0.5
RETRY_S = 0.2
TRANSIENT = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
"""Transient error codes: the topic is new or its leader is changing."""
FETCH_BYTES = 32 << 20
EMPTY_FETCH_MS = 20
"""Time for which the broker holds a fetch at the end of a partition. The client sees an end behind a transaction marker only afterwards."""


class KafkaSource:
    """The topics of one run on a broker. Methods raise `Unreadable` if a topic cannot be read."""

    def __init__(
        self, bootstrap: str, run: str, *, settings: Mapping[str, Any] | None = None, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.run, self._notify = run, notify
        # The caller provides the connection settings; the settings below decide what is read and how.
        self._settings = {**(settings or {}), "bootstrap.servers": bootstrap, "client.id": "penstock-audit", "log_level": 0}
        self._problem: str | None = None
        admin = AdminClient(self._settings | {"error_cb": self._note})
        try:
            topics = admin.list_topics(timeout=RESPONSE_S).topics
        except KafkaException as error:
            raise Unreadable(f"cannot read {bootstrap}: {self._problem or error.args[0].str()}") from error
        if missing := [topic for topic in ORDER if topic not in OPTIONAL and self._kafka_name(topic) not in topics]:
            raise Unreadable(
                f"run {run} cannot be audited: topic {self._kafka_name(missing[0])!r} does not exist or access to it is denied"
            )
        self._starts: dict[str, dict[int, int]] = {}
        self._ends: dict[str, dict[int, int]] = {}
        for topic in ORDER:
            name = self._kafka_name(topic)
            partitions = [TopicPartition(name, partition) for partition in (topics[name].partitions if name in topics else ())]
            self._ends[topic] = _offsets(admin, partitions, OffsetSpec.latest())
            self._starts[topic] = _offsets(admin, partitions, OffsetSpec.earliest())
        self._span = sum(self._ends[topic][partition] - start for topic in ORDER for partition, start in self._starts[topic].items())
        self._read, self._next_progress_s = 0, time.monotonic() + PROGRESS_S

    def partitions(self, topic: str) -> range:
        return range(len(self._ends[topic]))

    def start_offset(self, topic: str, partition: int) -> int:
        return self._starts[topic][partition]

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Yield every committed record up to the end offsets at the start of the audit."""
        ends = {partition: self._ends[topic][partition] for partition in (self.partitions(topic) if partitions is None else partitions)}
        remaining = {partition for partition, end in ends.items() if end > self._starts[topic][partition]}
        if not remaining:
            return
        name = self._kafka_name(topic)
        next_offsets = {partition: self._starts[topic][partition] for partition in remaining}
        with closing(self._consumer()) as consumer:
            consumer.assign([TopicPartition(name, partition, next_offsets[partition]) for partition in sorted(remaining)])
            last_response = time.monotonic()
            while remaining:
                first = consumer.poll(POLL_S)
                if first is None:
                    self._check_silence(last_response, name)
                    continue
                messages = [first, *consumer.consume(500, timeout=0)]  # with a timeout, consume would wait for 500 messages
                last_response, moved = time.monotonic(), set[int]()
                for message in messages:
                    partition, error = message.partition(), message.error()
                    assert partition is not None
                    if partition in moved:
                        continue  # the record is read again after the new assignment
                    ended = error is not None and error.code() == KafkaError._PARTITION_EOF
                    offset = max(message.offset() or 0, next_offsets[partition])
                    next_offsets[partition] = offset + 1
                    if error is None or is_damaged_chunk(message, topic):
                        if offset < ends[partition]:
                            yield to_record(message, offset)
                            self._progress(topic)
                    elif not ended:
                        next_offsets[partition] = self._after_skipped(message)
                    if error is not None and not ended:
                        moved.add(partition)  # a damaged batch is skipped as a whole: resume after the last offset seen
                    # The end is reached, or only transaction markers are left before it.
                    if ended or next_offsets[partition] >= ends[partition]:
                        remaining.discard(partition)
                if moved:
                    consumer.assign([TopicPartition(name, partition, next_offsets[partition]) for partition in sorted(remaining)])

    def _consumer(self) -> Consumer:
        """Open a consumer of committed records that joins no group, verifies checksums and reports the end of a partition."""
        return Consumer(
            {
                **self._settings,
                "group.id": f"{self.run}.audit",  # required by the client, but no group is joined and nothing is committed
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "check.crcs": True,
                "fetch.wait.max.ms": EMPTY_FETCH_MS,
                "fetch.message.max.bytes": FETCH_BYTES,
                "queued.max.messages.kbytes": 2 * FETCH_BYTES >> 10,
                "error_cb": self._note,
            }
        )

    def _after_skipped(self, message: Any) -> int:
        """Return the offset after a damaged batch that an operator has marked as skipped. Raises `Unreadable` for any other error."""
        name, partition, error = message.topic(), message.partition(), message.error()
        records = self.read("dead-letters") if error.code() == KafkaError._BAD_MSG else ()
        for topic_partition, offsets in dead_letters.stretches(records, run=self.run):
            if topic_partition == (name, partition) and message.offset() in offsets:
                return offsets.stop
        raise Unreadable(f"{name}/{partition} cannot be read: {error.str()}")

    def _note(self, error: KafkaError) -> None:
        self._problem = str(error.str())

    def _check_silence(self, last_response: float, name: str) -> None:
        """Raise `Unreadable` if the broker has sent nothing for `SILENT_S` since `last_response`."""
        if time.monotonic() - last_response > SILENT_S:
            raise Unreadable(f"{name}: no record received for {SILENT_S:g} s: {self._problem or 'the broker does not respond'}")

    def _progress(self, topic: str) -> None:
        """Count a record, and print the progress every few seconds."""
        self._read += 1
        if self._read % 1000 == 0 and time.monotonic() > self._next_progress_s:
            self._next_progress_s = time.monotonic() + PROGRESS_S
            self._notify(f"read {self._read:,} records of at most {self._span:,}; now reading {topic}")

    def _kafka_name(self, topic: str) -> str:
        return topic if topic == RUNS_TOPIC else topic_name(self.run, topic)


def _offsets(admin: AdminClient, partitions: Sequence[TopicPartition], spec: OffsetSpec) -> dict[int, int]:
    """Return partition -> offset for `spec`; partitions whose leader is changing are retried."""
    offsets: dict[int, int] = {}
    deadline = time.monotonic() + RESPONSE_S
    while missing := [tp for tp in partitions if tp.partition not in offsets]:
        futures = admin.list_offsets(
            dict.fromkeys(missing, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=RESPONSE_S
        )
        for tp, future in futures.items():
            try:
                offsets[tp.partition] = int(future.result().offset)
            except KafkaException as error:
                if error.args[0].code() not in TRANSIENT or time.monotonic() > deadline:
                    raise Unreadable(f"{tp.topic}/{tp.partition}: {error.args[0].str()}") from error
                time.sleep(RETRY_S)
    return dict(sorted(offsets.items()))


def is_damaged_chunk(message: Any, topic: str) -> bool:
    """True for a batch of weight chunks with a wrong checksum. It is skipped, because the trainer sends damaged chunks again."""
    error = message.error()
    return topic == "weights" and message.partition() != 0 and error is not None and error.code() == KafkaError._BAD_MSG


def to_record(message: Any, offset: int) -> Record:
    """Convert a message of confluent-kafka to a `Record`, which has no key, headers or value if the message is damaged."""
    damaged = message.error() is not None
    return Record(
        topic=message.topic(),
        partition=message.partition(),
        offset=offset,
        timestamp_ms=0 if damaged else message.timestamp()[1],
        key=None if damaged else message.key(),
        headers=() if damaged else tuple(message.headers() or ()),
        value=b"" if damaged else message.value() or b"",
    )
