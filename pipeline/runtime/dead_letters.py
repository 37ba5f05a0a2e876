"""Dead-letter queue: unreadable records are copied unchanged to `dead-letters` with the reason; and the poison-record guard.

A record is written once and its reader continues. If its partition moves at that moment, the next owner may write it too: readers of dead
letters count records.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.infra.errors import BrokerError
from penstock.infra.log import Log
from penstock.infra.paths import run_directory
from penstock.infra.poison_records import Attempts
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.topics import dead_letters
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record, RecordId


@dataclass(slots=True)
class DeadLetters:
    """Writes one worker's dead letters and guards its decoding."""

    log: Log
    reporter: Reporter
    _written: set[RecordId] = field(default_factory=set)
    _read: bool = False
    _attempts: Attempts | None = field(default=None, repr=False)

    def write(self, record: Record, error: Unusable) -> None:
        """Write a dead letter about a record, unless there is one."""
        if not self._read:
            self._written |= self._read_written()
            self._read = True
        if record.id in self._written:
            return
        self._written.add(record.id)
        reporter = self.reporter
        reporter.add("dead_letters")
        key = str(record.id)
        reporter.throttled.notify(f"dead letters ({error.kind}) from {record.topic}", f"dead letter ({error.kind}) from {key}: {error}")
        dead_letter = dead_letters.from_record(record, kind=error.kind, reason=str(error), worker=reporter.worker, time_ns=time.time_ns())
        value = dead_letters.encode(dead_letter)
        headers = dead_letters.headers(dead_letter, run=reporter.run).encode(value)
        topic = f"{reporter.run}.dead-letters"
        reporter.producer.send(Outgoing(topic=topic, partition=0, key=key.encode(), headers=headers, value=value))

    def on_rebalance(self) -> None:
        """Re-read `dead-letters` before the next write: the last owners of new partitions may have written some."""
        self._read = False

    @contextlib.contextmanager
    def decoding(self, record: Record) -> Iterator[None]:
        """A block that decodes a record: its CPU time is counted, and a record whose decoding crashes the process is remembered.

        Raises `Unusable` for a record that has crashed this worker too often, after writing the dead letter, for any topic.
        """
        if self._attempts is None:
            self._attempts = self._open_attempts()
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

    def _open_attempts(self) -> Attempts:
        """The record that the previous process of this worker's name was decoding when it crashed; stored on this machine."""
        try:
            return Attempts(run_directory(self.reporter.run) / "attempts" / self.reporter.worker)
        except BrokerError:  # no directory to write to: no record is skipped then
            return Attempts(None)

    def _read_written(self) -> set[RecordId]:
        """Records with a dead letter; only a readable one counts, as any client may write a key."""
        partition = f"{self.reporter.run}.dead-letters", 0
        end = self.log.end_offsets([partition])[partition]
        tail = self.log.tail({partition: "earliest"})
        refused: set[RecordId] = set()
        try:
            while tail.position(partition) < end:  # a few at a time: each holds a record of up to 16 MiB
                for record in tail.poll(1.0, max_records=100):
                    with contextlib.suppress(Unusable):
                        dead_letter = dead_letters.read(record, run=self.reporter.run)[1]
                        refused.add(dead_letter.record_id)
        finally:
            tail.close()
        return refused
