"""`penstock topics import`: writes an archived run to new topics.

A record is written after the records that it refers to, and the run is registered last.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from penstock.infra.errors import LogError
from penstock.infra.kafka.bulk import BulkWriter
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log, Partition
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.files import Archive, Note
from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.relocation import Relocation
from penstock.pipeline.config.load import ConfigError, from_json
from penstock.pipeline.runtime.registration.run_registry import find, usable, write, write_status
from penstock.pipeline.runtime.reporting.log_lines import Progress
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TOPICS, topics_of


@dataclass(slots=True, kw_only=True)
class Imported:
    """Result of an import."""

    run: str
    records: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 0))
    seconds: float = 0.0


def import_run(log: KafkaLog, archive: Archive, *, becomes: str | None = None, notify: Callable[[str], None] = lambda _: None) -> Imported:
    """Import an archived run (as `becomes`, if set). Raises `ConfigError` if the id exists, `ValueError` for a bad archive, `LogError`."""
    start, note = time.monotonic(), complete(archive)
    run = _free(log, becomes or note.run)
    relocation, archived = Relocation(note.run, run), ArchivedLog(archive)
    registered = find(cast(Log, archived), note.run)
    if registered is None:
        raise ValueError(f"{archive.path} cannot be imported: its table `runs` has no valid record of run {note.run}; export the run again")
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    # Topics that the archive lacks are created too, so that the run can be resumed.
    partitions, turns = note.partitions, from_json(registered.config).turns_by_log
    log.create_topics(topics_of(run, partitions=partitions["groups"], weight_partitions=partitions["weights"], turns=turns))
    imported = Imported(run=run)
    try:
        _write_records(log, archived, relocation, imported, notify)
    except ValueError as error:
        raise ValueError(f"{error}; the run was not registered. Remove the imported part: penstock topics delete {run} --yes") from error
    # The runs topic is shared, so only this run's record is imported.
    (write_status if "run" in note.partitions else write)(log, replace(registered, run=run))
    imported.seconds = time.monotonic() - start
    return imported


def _write_records(log: KafkaLog, archived: ArchivedLog, relocation: Relocation, imported: Imported, notify: Callable[[str], None]) -> None:
    """Write all archived records and count them in `imported`. Raises `ValueError` for rows that are not valid records, and `LogError`."""
    archive, note, run = archived.archive, complete(archived.archive), imported.run
    writer, progress, ends = BulkWriter(log.connection), Progress(notify), dict[Partition, int]()
    for kind in reversed(list(KINDS.values())):  # referenced records first
        for partition in [number for table, _, number in archive.tables(note) if table is kind and kind.topic != RUNS_TOPIC]:
            count = 0
            for record in archived.records(kind, partition):
                relocation.note(kind, record)
                writer.append(relocation.apply(kind, record))
                count += 1
                progress(f"{kind.name}/{partition}: {count:,} records")
            ends[f"{run}.{kind.topic}", partition] = count
            imported.records[kind.topic] += count
    writer.flush()
    _check_ends(log, ends)


def complete(archive: Archive) -> Note:
    """Return the note of an archive. Raises `ValueError` if there is none or the archive is incomplete."""
    note = archive.required_note()
    if missing := [topic for topic in (RUNS_TOPIC, *TOPICS) if topic not in note.ends and (topic != "run" or topic in note.partitions)]:
        raise ValueError(f"{archive.path} is incomplete, the topics {', '.join(missing)} are missing: repeat `penstock topics export`")
    return note


def _free(log: Log, run: str) -> str:
    """Return the run id. Raises `ConfigError` if it is invalid or the broker has a run or topics of this name."""
    if find(log, usable(run)) is not None:
        raise ConfigError(
            f"run {run!r} already exists on this broker: import it with another --run-id, or delete it: penstock topics delete {run}"
        )
    if topics := log.topics(f"{run}."):
        raise ConfigError(
            f"this broker has topics of a run {run!r} that is not registered, such as {topics[0]}, probably from an interrupted import; "
            f"delete them (penstock topics delete {run} --yes), or import with another --run-id"
        )
    return run


def _check_ends(log: KafkaLog, ends: Mapping[Partition, int]) -> None:
    """Raise `LogError` unless each partition ends at the last imported record."""
    for (topic, partition), end in log.end_offsets(ends).items():
        if end != (count := ends[topic, partition]):
            cause = "another client also wrote to this partition" if end > count else "the broker lost records"
            raise LogError(f"{topic}/{partition} ends at offset {end}, expected {count}: {cause}; delete the run and import it again")
