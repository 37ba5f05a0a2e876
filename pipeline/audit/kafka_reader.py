"""Reads a run's topics with confluent-kafka, a client that no worker uses.

The rule: every record from the beginning to the end as of the audit's start, committed transactions only; nothing is
written, no group is joined.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.pipeline.audit.source import Unreadable
from penstock.topics import dead_letters
from penstock.topics.catalogue import RUNS_TOPIC, TURNS, topic_name
from penstock.topics.wire.record import Record

ORDER = (RUNS_TOPIC, "run", "dead-letters", "metrics", "ledger", "groups", "rollouts", "replies", "calls", "prompts", "weights")
"""Ends are read from effect to cause, so that the records a record refers to are below the ends too, even while the run goes on."""
OPTIONAL = ("run", *TURNS)
"""A run of an earlier release has no topic of its own that says what it is, and turns flow only where environments have workers."""

ANSWER_S = 15.0
SILENT_S = 60.0
"""Give up on a broker that sends nothing for this long although there is more to read."""
SAY_AFTER_S = 3.0
AGAIN_S = 0.2
PASSING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
"""Error codes of a broker while a topic is new or a leader is changing."""
FETCH_BYTES = 32 << 20


class KafkaSource:
    """The topics of one run on a broker; raises `Unreadable` when they cannot be read."""

    def __init__(
        self, bootstrap: str, run: str, *, settings: Mapping[str, Any] | None = None, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.run, self._notify = run, notify
        # What connects, credentials above all, is given; what is read, and how, is the audit's own.
        self._settings = {**(settings or {}), "bootstrap.servers": bootstrap, "client.id": "penstock-audit", "log_level": 0}
        self._problem: str | None = None
        admin = AdminClient(self._settings | {"error_cb": self._note})
        try:
            topics = admin.list_topics(timeout=ANSWER_S).topics
        except KafkaException as error:
            raise Unreadable(f"cannot read {bootstrap}: {self._problem or error.args[0].str()}") from error
        if missing := [topic for topic in ORDER if topic not in OPTIONAL and self._kafka_name(topic) not in topics]:
            raise Unreadable(f"run {run} has no topic {self._kafka_name(missing[0])!r}; its log is gone or may not be read")
        self._begins: dict[str, dict[int, int]] = {}
        self._ends: dict[str, dict[int, int]] = {}
        for topic in ORDER:
            name = self._kafka_name(topic)
            places = [TopicPartition(name, partition) for partition in (topics[name].partitions if name in topics else ())]
            self._ends[topic] = _offsets(admin, places, OffsetSpec.latest())
            self._begins[topic] = _offsets(admin, places, OffsetSpec.earliest())
        self._span = sum(self._ends[topic][partition] - begin for topic in ORDER for partition, begin in self._begins[topic].items())
        self._read, self._next_progress_s = 0, time.monotonic() + SAY_AFTER_S

    def partitions(self, topic: str) -> range:
        """Partition numbers of a topic."""
        return range(len(self._ends[topic]))

    def begin(self, topic: str, partition: int) -> int:
        """The first offset that is still kept."""
        return self._begins[topic][partition]

    def read(self, topic: str, partitions: Sequence[int] | None = None) -> Iterator[Record]:
        """Every record that existed when the audit began."""
        ends = {partition: self._ends[topic][partition] for partition in (self.partitions(topic) if partitions is None else partitions)}
        left = {partition for partition, end in ends.items() if end > self._begins[topic][partition]}
        if not left:
            return
        name = self._kafka_name(topic)
        consumer, nexts = self._consumer(), {partition: self._begins[topic][partition] for partition in left}
        try:
            consumer.assign([TopicPartition(name, partition, nexts[partition]) for partition in sorted(left)])
            last_answer = time.monotonic()
            while left:
                messages = consumer.consume(500, timeout=0.5)
                if not messages:
                    self._check_silence(last_answer, name)
                    continue
                last_answer, moved = time.monotonic(), set[int]()
                for message in messages:
                    partition, error = message.partition(), message.error()
                    assert partition is not None
                    if partition in moved:
                        continue  # it comes again
                    ended = error is not None and error.code() == KafkaError._PARTITION_EOF
                    offset = max(message.offset() or 0, nexts[partition])
                    nexts[partition] = offset + 1
                    if error is None or is_damaged_chunk(message, topic):
                        if offset < ends[partition]:
                            yield to_record(message, offset)
                            self._progress(topic)
                    elif not ended:
                        nexts[partition] = self._passed_over(message)
                    if error is not None and not ended:
                        moved.add(partition)  # a batch is damaged as a whole: the reader goes on behind what it has passed of it
                    # At the end, or only transaction markers are left below it.
                    if ended or nexts[partition] >= ends[partition]:
                        left.discard(partition)
                if moved:
                    consumer.assign([TopicPartition(name, partition, nexts[partition]) for partition in sorted(left)])
        finally:
            consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                **self._settings,
                "group.id": f"{self.run}.audit",  # the client requires one; no group is joined and nothing is committed
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "check.crcs": True,
                "fetch.message.max.bytes": FETCH_BYTES,
                "queued.max.messages.kbytes": 2 * FETCH_BYTES >> 10,
                "error_cb": self._note,
            }
        )

    def _passed_over(self, message: Any) -> int:
        """The offset behind a damaged batch that a person has had the run's readers skip. Raises `Unreadable` for another error."""
        name, partition, error = message.topic(), message.partition(), message.error()
        letters = self.read("dead-letters") if error.code() == KafkaError._BAD_MSG else ()
        for place, offsets in dead_letters.stretches(letters, run=self.run):
            if place == (name, partition) and message.offset() in offsets:
                return offsets.stop
        raise Unreadable(f"{name}/{partition} cannot be read: {error.str()}")

    def _note(self, error: KafkaError) -> None:
        self._problem = str(error.str())

    def _check_silence(self, last_answer: float, name: str) -> None:
        if time.monotonic() - last_answer > SILENT_S:
            raise Unreadable(f"{name}: nothing came for {SILENT_S:g} s: {self._problem or 'the broker is silent'}")

    def _progress(self, topic: str) -> None:
        self._read += 1
        if self._read % 1000 == 0 and time.monotonic() > self._next_progress_s:
            self._next_progress_s = time.monotonic() + SAY_AFTER_S
            self._notify(f"read {self._read:,} records of {self._span:,} offsets at most; now {topic}")

    def _kafka_name(self, topic: str) -> str:
        return topic if topic == RUNS_TOPIC else topic_name(self.run, topic)


def _offsets(admin: AdminClient, places: Sequence[TopicPartition], spec: OffsetSpec) -> dict[int, int]:
    """Partition -> the offset that `spec` asks for; retries for a while partitions whose leader is changing."""
    offsets: dict[int, int] = {}
    give_up = time.monotonic() + ANSWER_S
    while left := [place for place in places if place.partition not in offsets]:
        answers = admin.list_offsets(dict.fromkeys(left, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_S)
        for place, future in answers.items():
            try:
                offsets[place.partition] = int(future.result().offset)
            except KafkaException as error:
                if error.args[0].code() not in PASSING or time.monotonic() > give_up:
                    raise Unreadable(f"{place.topic}/{place.partition}: {error.args[0].str()}") from error
                time.sleep(AGAIN_S)
    return dict(sorted(offsets.items()))


def is_damaged_chunk(message: Any, topic: str) -> bool:
    """Whether the checksum of a batch of chunks is wrong: those may be sent again, so the audit goes on behind it."""
    error = message.error()
    return topic == "weights" and message.partition() != 0 and error is not None and error.code() == KafkaError._BAD_MSG


def to_record(message: Any, offset: int) -> Record:
    """Convert a message of this client to our record; one that is damaged has no bytes that count."""
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
