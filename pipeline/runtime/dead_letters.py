"""Dead letters: records that nobody can use, set aside whole with the reason; and the guard against records that kill their reader.

The rule: a record is set aside once, whoever finds it unusable, and its reader goes on. Where its partition moves in that moment the next
owner may set it aside, too, as neither waits for the other: whoever reads dead letters counts records, not letters.
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
    """Writes one worker's dead letters, and watches over what it decodes."""

    log: Log
    reporter: Reporter
    _known: set[RecordId] = field(default_factory=set)
    _read: bool = False
    _attempts: Attempts | None = field(default=None, repr=False)

    def write(self, record: Record, error: Unusable) -> None:
        """Set a record aside with the reason, unless somebody has done so already."""
        if not self._read:
            self._known |= self._read_known()
            self._read = True
        if record.id in self._known:
            return
        self._known.add(record.id)
        reporter = self.reporter
        reporter.add("dead_letters")
        key = str(record.id)
        reporter.throttled.notify(f"dead letters ({error.kind}) from {record.topic}", f"dead letter ({error.kind}) from {key}: {error}")
        letter = dead_letters.from_record(record, kind=error.kind, reason=str(error), worker=reporter.worker, time_ns=time.time_ns())
        value = dead_letters.encode(letter)
        headers = dead_letters.headers(letter, run=reporter.run).encode(value)
        topic = f"{reporter.run}.dead-letters"
        reporter.producer.send(Outgoing(topic=topic, partition=0, key=key.encode(), headers=headers, value=value))

    def on_rebalance(self) -> None:
        """Partitions have been assigned: before the next letter, learn which records their last owners have set aside since."""
        self._read = False

    @contextlib.contextmanager
    def decoding(self, record: Record) -> Iterator[None]:
        """A block that decodes a record: its CPU time is counted, and a record whose decoding kills the process is remembered.

        Raises `Unusable` for a record that has killed this worker too often, once it is set aside, whoever owns its topic.
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
        """What earlier processes of this worker's name were decoding when they died; kept on this machine."""
        try:
            return Attempts(run_directory(self.reporter.run) / "attempts" / self.reporter.worker)
        except BrokerError:  # no directory to write to: a person has to find what kills the reader
            return Attempts(None)

    def _read_known(self) -> set[RecordId]:
        """Records that are set aside already; only a readable letter counts, as any client may write a key."""
        partition = f"{self.reporter.run}.dead-letters", 0
        end = self.log.end_offsets([partition])[partition]
        tail = self.log.tail({partition: "earliest"})
        refused: set[RecordId] = set()
        try:
            while tail.position(partition) < end:  # a few at a time: each holds a record of up to 16 MiB
                for record in tail.poll(1.0, max_records=100):
                    with contextlib.suppress(Unusable):
                        letter = dead_letters.read(record, run=self.reporter.run)[1]
                        refused.add(letter.record_id)
        finally:
            tail.close()
        return refused
