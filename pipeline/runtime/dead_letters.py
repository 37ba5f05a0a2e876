"""Dead-letter queue: unreadable records are copied unchanged to `dead-letters` with the reason; the guard against poison records; skips.

A record is written once and its reader continues. If its partition moves at that moment, the next owner may write it too: readers of dead
letters count records. An mmapped file names the record being decoded, so that a record that crashed its reader three times is skipped.
"""

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from penstock.infra.errors import BrokerError, ConfigError
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, write_complete
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.pipeline.runtime.topic_reader import POISON, scan
from penstock.topics import dead_letters
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record, RecordId

if TYPE_CHECKING:
    from penstock.infra.kafka.log import KafkaLog

MAX_CRASHES = 3
"""Number of crashes after which a record is not decoded again."""

_RECORD_ID = struct.Struct("<qqH")
"""Partition, offset and length of the topic's name, which follows; the byte before them is 1 if they are valid."""
_SIZE = mmap.PAGESIZE


class Attempts:
    """In a block, stores which record is being decoded, so that a crash can be attributed to it; for one thread, not nested.

    Example:
        with attempts.reading(record):  # raises Unusable for a poison record
            decode(record.value)
    """

    def __init__(self, path: Path | None) -> None:
        """Load the state of the previous process from `path`; nothing is stored if it is None or not writable."""
        self.crashes: dict[RecordId, int] = {}
        """Record -> number of crashes while it was being decoded."""
        self._counts = path.with_name(f"{path.name}.json") if path else None
        self._page = _page(path)
        self._topic = ""
        self._record: Record | None = None
        self._load()

    def reading(self, record: Record) -> "Attempts":
        """Select the record to decode in the block. Raises `Unusable` for a poison record: one that crashed `MAX_CRASHES` processes."""
        if self.crashes and (count := self.crashes.get(record.id, 0)) >= MAX_CRASHES:
            raise Unusable(f"{count} processes of this worker crashed while decoding the record", kind=POISON)
        self._record = record
        return self

    def __enter__(self) -> None:
        """Write the record's identity to the page, which survives a crash of the process."""
        page, record = self._page, self._record
        assert record is not None
        if record.topic != self._topic:
            name = record.topic.encode()
            self._topic = record.topic
            page[1 + _RECORD_ID.size : 1 + _RECORD_ID.size + len(name)] = name
        _RECORD_ID.pack_into(page, 1, record.partition, record.offset, len(self._topic))
        page[0] = 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Clear the page, and forget earlier crashes of the record, because it was decoded, or is unusable without a crash."""
        if kind is not None and not issubclass(kind, Unusable):
            return  # any other error ends the process: the page still names the record
        self._page[0] = 0
        if self.crashes and self._record is not None and self._record.id in self.crashes:
            del self.crashes[self._record.id]
            self._save()

    def close(self) -> None:
        self._page.close()

    def _load(self) -> None:
        """Load the number of crashes by record, and count the record that the previous process did not finish."""
        if self._counts is not None:
            with suppress(OSError, ValueError, TypeError):  # only a count is lost
                self.crashes = {
                    RecordId(topic, int(p), int(offset)): int(count) for topic, p, offset, count in json.loads(self._counts.read_text())
                }
        if self._page[0] != 1:
            return
        partition, offset, length = _RECORD_ID.unpack_from(self._page, 1)
        topic = self._page[1 + _RECORD_ID.size : 1 + _RECORD_ID.size + length].decode(errors="replace")
        record_id = RecordId(topic, partition, offset)
        self.crashes[record_id] = self.crashes.get(record_id, 0) + 1
        self._save()
        self._page[0] = 0

    def _save(self) -> None:
        """Write the number of crashes by record to the file; ignored if that is impossible."""
        if self._counts is None:
            return
        with suppress(OSError):
            write_complete(self._counts, json.dumps([[*record_id, count] for record_id, count in self.crashes.items()]))


def _page(path: Path | None) -> mmap.mmap:
    """A memory-mapped page of the file; if that cannot be opened, memory that is lost with the process."""
    with suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(file, 0, _SIZE)  # a full disk raises here, not as SIGBUS at the first write
                return mmap.mmap(file, _SIZE)
            finally:
                os.close(file)
    return mmap.mmap(-1, _SIZE)


@dataclass(slots=True)
class DeadLetters:
    """Writes dead letters of one worker, and guards its decoding against poison records."""

    log: Log
    reporter: Reporter
    _written: set[RecordId] = field(default_factory=set)
    _read: bool = False
    _attempts: Attempts | None = field(default=None, repr=False)

    def write(self, record: Record, error: Unusable) -> None:
        """Copy a record to `dead-letters` with the reason why it is unusable, and print that, unless the topic contains it already."""
        if not self._read:
            self._written |= self._read_written()
            self._read = True
        if record.id in self._written:
            return
        self._written.add(record.id)
        reporter = self.reporter
        reporter.add("dead_letters")
        key = str(record.id)
        text = f"{key} is a dead letter ({error.kind}): {error}; see `penstock topics tail {reporter.run} dead-letters`"
        reporter.throttled.notify(f"dead letters ({error.kind}) from {record.topic}", text)
        dead_letter = dead_letters.from_record(record, kind=error.kind, reason=str(error), worker=reporter.worker, time_ns=time.time_ns())
        topic = f"{reporter.run}.dead-letters"
        reporter.producer.send(dead_letters.outgoing(dead_letter, run=reporter.run, topic=topic, key=key.encode()))

    def on_rebalance(self) -> None:
        """Re-read `dead-letters` before the next write: the last owners of new partitions may have written some."""
        self._read = False

    @contextlib.contextmanager
    def decoding(self, record: Record) -> Iterator[None]:
        """Decode a record in this block: CPU time is counted, and a record that crashes the process is remembered.

        Raises `Unusable` for a record that has crashed this worker too often, after writing the dead letter, for any topic.
        """
        if self._attempts is None:
            try:
                self._attempts = Attempts(run_directory(self.reporter.run) / "attempts" / self.reporter.worker)
            except BrokerError:  # no directory to write to: no record is skipped then
                self._attempts = Attempts(None)
        try:
            attempt = self._attempts.reading(record)
        except Unusable as error:
            self.write(record, error)
            raise
        with self.reporter.decoding, attempt:
            yield

    def close(self) -> None:
        """Release the file of the poison-record guard."""
        if self._attempts is not None:
            self._attempts.close()

    def _read_written(self) -> set[RecordId]:
        """Records that have a readable dead letter; keys alone are ignored, because any client may write one."""
        refused: set[RecordId] = set()
        for record in scan(self.log, f"{self.reporter.run}.dead-letters"):
            with contextlib.suppress(Unusable):
                refused.add(dead_letters.read(record, run=self.reporter.run)[1].record_id)
        return refused


SKIPPABLE = {
    "rollouts": "a group whose samples are lost is abandoned after scorer.group_deadline_s and replaced by another prompt",
    "calls": "the turns are requested again",
    "replies": "the turns are requested again",
    "metrics": "some seconds of the workers' measurements are lost",
}
"""Topic in which a range may be skipped -> consequence."""
_WITHOUT = {
    "prompts": "an unreadable prompt leaves a gap in the group numbers",
    "groups": "an unreadable outcome leaves its group open",
    "ledger": "the ledger has no gaps",
    "weights": "the trainer sends a damaged newest version again",
    "dead-letters": "skipped ranges are recorded in this topic",
}
"""Topic in which no range may be skipped -> reason."""
WRITE_LIMIT_S = 30.0
"""Longest wait for the broker to acknowledge the dead letter."""


def skip(log: "KafkaLog", run: str, topic: str, partition: int, offset: int) -> tuple[range, str]:
    """Write a dead letter that makes all readers skip the unreadable records from `offset` on; return their offsets and the consequence.

    Raises `ConfigError` if the topic, partition or offset cannot be skipped.
    """
    if topic not in SKIPPABLE:
        if topic not in _WITHOUT:
            raise ConfigError(f"topic {topic!r}: expected one of {', '.join(SKIPPABLE)}")
        reason = _WITHOUT[topic]
        raise ConfigError(f"records of {topic} cannot be skipped: {reason}. Continue in a new run: penstock fork {run} --from-step N")
    tp = (f"{run}.{topic}", partition)
    count = log.partitions(tp[0])
    if count is None or partition >= count:
        raise ConfigError(f"run {run} has no partition {partition} of {topic}; partitions: 0 to {(count or 0) - 1}")
    start, end = log.beginning_offsets([tp])[tp], log.end_offsets([tp], committed=False)[tp]
    if not start <= offset < end:
        raise ConfigError(f"offset {offset} is not in {topic}/{partition}, which has offsets {start} to {end - 1}")
    for skipped_tp, offsets in dead_letters.stretches(log.read_dead_letters(f"{run}.dead-letters"), run=run):
        if skipped_tp == tp and offset in offsets:
            raise ConfigError(
                f"offsets {offsets.start} to {offsets.stop - 1} of {topic}/{partition} are skipped already; restart workers that stop there"
            )
    after = log.first_readable(tp, offset)
    if after == offset:
        raise ConfigError(
            f"the record at {topic}/{partition}/{offset} is readable, so it cannot be skipped; give the offset in the error message"
        )
    stretch = range(offset, after)
    reason = f"offsets up to {after - 1} cannot be read; an operator made all readers skip them"
    dead_letter = dead_letters.of_stretch(tp[0], partition, stretch, reason=reason, worker="operator", time_ns=time.time_ns())
    key = f"{topic}/{partition}/{offset}".encode()
    with contextlib.closing(log.producer()) as producer:
        producer.send(dead_letters.outgoing(dead_letter, run=run, topic=f"{run}.dead-letters", key=key)).offset(WRITE_LIMIT_S)
    return stretch, SKIPPABLE[topic]
