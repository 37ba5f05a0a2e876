"""`penstock topics export`: exports the records of a run to Parquet files, incrementally.

The archive's note has the offsets up to which all records are exported.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from penstock.infra.errors import ConfigError, RunNotFound
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Partition, Tail
from penstock.pipeline.archive.backup import add_files
from penstock.pipeline.archive.files import FILE_BYTES, Archive, Note, PartitionFile
from penstock.pipeline.archive.layout import KINDS, Kind, kind_of
from penstock.pipeline.archive.rows import read_tables
from penstock.pipeline.runtime.registration.run_registry import registration
from penstock.pipeline.runtime.reporting.log_lines import Progress
from penstock.topics import ledger
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS
from penstock.topics.wire.errors import Unusable

AHEAD = 8
"""Largest number of row blocks waiting for the writer thread, so that reading continues while a row group is written."""
LEAST_PAUSE_S, MOST_PAUSE_S = 5.0, 600.0
"""Limits of the pause between two rounds of `--follow`. The pause is a tenth of the elapsed time, which limits the number of files."""
SETTLE_S = 2.0
"""Time in which the last workers of a closed run may still write records."""


@dataclass(slots=True, kw_only=True)
class Exported:
    """Result of an export."""

    run: str
    directory: str
    rows: dict[str, int] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0
    gone: list[str] = field(default_factory=list)
    """Offsets that were deleted before they were exported, one sentence per partition."""
    seconds: float = 0.0

    def add(self, more: "Exported") -> None:
        for name, count in more.rows.items():
            self.rows[name] = self.rows.get(name, 0) + count
        self.files += more.files
        self.bytes += more.bytes
        self.gone += more.gone
        self.seconds += more.seconds


def follow(
    log: KafkaLog, run: str, directory: Path, *, topics: Collection[str] | None = None, backup: bool = False,
    notify: Callable[[str], None] = lambda _: None,
) -> Iterator[Exported]:  # fmt: skip
    """Export repeatedly until the run is closed and a round exports nothing; yield the result of each round. Raises as `export`."""
    start, closed = time.monotonic(), False
    with contextlib.closing(log.tail({(f"{run}.ledger", 0): "earliest"})) as tail:
        while True:
            done = export(log, run, directory, topics=topics, backup=backup, notify=notify)
            yield done
            if closed and not done.rows:
                return
            pause_s = min(MOST_PAUSE_S, max(LEAST_PAUSE_S, (time.monotonic() - start) / 10))
            if closed or (closed := _closes_within(tail, run, pause_s)):
                time.sleep(SETTLE_S)


def _closes_within(tail: Tail, run: str, seconds: float) -> bool:
    """Read the ledger for up to `seconds`; return True as soon as an entry closes the run."""
    until = time.monotonic() + seconds
    while (remaining := until - time.monotonic()) > 0:
        for record in tail.poll(min(1.0, remaining)):
            with contextlib.suppress(Unusable):
                if ledger.check(record, run=run).outcome == "run-closed":
                    return True
    return False


def export(
    log: KafkaLog, run: str, directory: Path, *, topics: Collection[str] | None = None, backup: bool = False,
    notify: Callable[[str], None] = lambda _: None,
) -> Exported:  # fmt: skip
    """Export the records of all topics, or of `topics`, that are not yet in `directory`/`run`.

    `backup` also copies model and checkpoint (see `add_files`). Raises `ValueError`, `LogError`.
    """
    selected = _selected(topics)
    archive = Archive(directory, run)
    start = time.monotonic()
    with archive.locked():
        registered = registration(log, run)
        record = registered.record
        if record is None:
            raise RunNotFound(run)
        note = archive.note() or _new_note(log, archive, record.created_ns)
        if note.created_ns != record.created_ns:
            raise ValueError(f"{archive.path} is the archive of an earlier run of the id {run!r}; export to another directory")
        if backup:
            add_files(archive, registered)
        ends = {topic: _offsets(log.end_offsets, archive, topic, count) for topic, count in note.partitions.items() if topic in selected}
        work = Work(archive, BulkReader(log.connection, log.read_dead_letters), Exported(run=run, directory=str(archive.path)), notify)
        with contextlib.closing(work):
            for topic, offsets in ends.items():
                work.topic(log, topic, offsets)
        archive.write_note(replace(note, ends={**note.ends, **ends}, exported_ns=time.time_ns()))
    work.done.seconds = time.monotonic() - start
    return work.done


def _selected(topics: Collection[str] | None) -> set[str]:
    topics_of_run = (RUNS_TOPIC, *TOPICS)
    if unknown := sorted(set(topics or ()) - set(topics_of_run)):
        raise ConfigError(f"--topics: there is no topic {unknown[0]!r}; expected some of {', '.join(topics_of_run)}")
    return {RUNS_TOPIC, "run", *topics} if topics else set(topics_of_run)


def _new_note(log: KafkaLog, archive: Archive, created_ns: int) -> Note:
    """Write the note of a new, empty archive, and return it."""
    partitions: dict[str, int] = {}
    for topic in dict.fromkeys(kind.topic for kind in KINDS.values()):
        name = kind_of(topic, 0).kafka_name(archive.run)
        if (count := log.partitions(name)) is None:
            if topic == "run":  # runs of earlier releases are registered only in the topic of all runs
                continue
            raise ValueError(f"run {archive.run} cannot be exported: topic {name!r} does not exist or access to it is denied")
        partitions[topic] = count
    first_offsets = {topic: _offsets(log.beginning_offsets, archive, topic, count) for topic, count in partitions.items()}
    note = Note(run=archive.run, created_ns=created_ns, partitions=partitions, begins=first_offsets)
    archive.write_note(note)
    return note


def _offsets(read: Callable[[list[Partition]], dict[Partition, int]], archive: Archive, topic: str, count: int) -> list[int]:
    name = kind_of(topic, 0).kafka_name(archive.run)
    offsets = read([(name, partition) for partition in range(count)])
    return [offsets[name, partition] for partition in range(count)]


class Work:
    """Exports topics: reads blocks of records, and encodes them as Parquet in a thread, for which `close` waits."""

    def __init__(self, archive: Archive, reader: BulkReader, done: Exported, notify: Callable[[str], None]) -> None:
        self.archive, self.done = archive, done
        self._reader = reader
        self._progress = Progress(notify)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="archive-writer")
        self._tasks: deque[Future[None]] = deque()

    def topic(self, log: KafkaLog, topic: str, ends: list[int]) -> None:
        """Export the records of a topic up to the offsets `ends` that are not archived yet."""
        name = kind_of(topic, 0).kafka_name(self.archive.run)
        starts = log.beginning_offsets([(name, partition) for partition in range(len(ends))])
        for partition, end in enumerate(ends):
            kind = kind_of(topic, partition)
            first = self.archive.next_offset(kind, partition)
            retained = starts[name, partition]
            if first is not None and retained > first:
                self.done.gone.append(f"{name}/{partition}: offsets {first} to {retained - 1} were deleted before they were exported")
            start = retained if first is None else max(first, retained)
            if start < end:
                self._partition(kind, name, partition, start, end)

    def _partition(self, kind: Kind, name: str, partition: int, start: int, end: int) -> None:
        """Export the records of a partition from offset `start` to before `end` to new files of about `FILE_BYTES`."""
        file: PartitionFile | None = None
        for table, position in read_tables(self._reader, kind, partition, run=self.archive.run, first=start, end=end):
            self._progress(f"{name}/{partition}: offset {position:,} of {end:,}")
            if not len(table):
                continue
            if file is None:
                file = PartitionFile(self.archive, kind, partition, start)
            self._submit(partial(file.write, table))
            self.done.rows[kind.name] = self.done.rows.get(kind.name, 0) + len(table)
            if file.bytes >= FILE_BYTES:
                self._finish(file, position)
                file, start = None, position
        if file is not None:
            self._finish(file, end)

    def _finish(self, file: PartitionFile, next_offset: int) -> None:
        def finish() -> None:
            self.done.bytes += file.finish(next_offset).stat().st_size
            self.done.files += 1

        self._submit(finish)

    def _submit(self, task: Callable[[], None]) -> None:
        """Run a task in the writer thread, unless an earlier one has failed: a file must not be finished without all its rows."""
        before = self._tasks[-1] if self._tasks else None

        def run() -> None:
            if before is not None:
                before.result()
            task()

        self._tasks.append(self._writer.submit(run))
        while len(self._tasks) > AHEAD:
            self._tasks.popleft().result()

    def close(self) -> None:
        """Wait for the writer thread. Raises the error of the first task that failed."""
        self._writer.shutdown()
        self._reader.close()
        for task in self._tasks:
            task.result()
