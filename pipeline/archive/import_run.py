"""`penstock topics import`: an archived run on a broker, at the offsets it had, so that plans, manifests and dead letters hold.

The rule: the run is registered last; until then a topic `RUN.import` says that the import is not done, and the next one begins anew.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.infra.errors import LogError
from penstock.infra.log import Log, Partition
from penstock.pipeline.archive.files import Archive, Note
from penstock.pipeline.archive.identity import Identity
from penstock.pipeline.archive.laying import Step, first_kept, steps
from penstock.pipeline.archive.layout import KINDS, Kind
from penstock.pipeline.archive.restore import to_records, whole_groups
from penstock.pipeline.archive.writer import Writer
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.runtime.run_registry import find
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TOPICS, TopicSpec, check_run_id, topics_of
from penstock.topics.wire.record import Record

SAY_EVERY_S = 3.0
VISIBLE_S = 60.0
"""The marks of the last transactions come to all partitions within this."""
MARK = "import"
"""The last word of the topic that says an import is not done."""


@dataclass(slots=True, kw_only=True)
class Imported:
    """What an import did."""

    run: str
    records: dict[str, int] = field(default_factory=dict)
    """By plain topic name."""
    seconds: float = 0.0


def find_archive(directory: Path) -> Archive:
    """The archive that DIR or DIR/RUN is. Raises `ValueError` for none, and for several."""
    if (directory / "export.json").is_file():
        return Archive(directory.parent, directory.name)
    found = sorted(note.parent.name for note in directory.glob("*/export.json"))
    if not found:
        raise ValueError(f"{directory} holds no export; `penstock topics export RUN {directory}` makes one")
    if len(found) > 1:
        raise ValueError(f"{directory} holds the runs {', '.join(found[:8])}: name one, as {directory / found[0]}")
    return Archive(directory, found[0])


def import_run(
    log: Log,
    archive: Archive,
    *,
    bootstrap: str,
    becomes: str | None = None,
    security: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Write an archived run's topics and register it. Raises `ConfigError` for an id that is taken, `ValueError`, `LogError`."""
    began, note = time.monotonic(), complete(archive)
    run = _free(log, becomes or note.run, say=say)
    identity = Identity(run=note.run, becomes=run)
    log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    log.create_topics({f"{run}.{MARK}": TopicSpec(name=f"{run}.{MARK}", partitions=1, configs={})})
    log.create_topics(topics_of(run, partitions=note.partitions["groups"], weight_partitions=note.partitions["weights"]))
    writer, done = Writer(bootstrap, security or {}, run=run), Imported(run=run)
    for topic in TOPICS:
        done.records[topic] = _topic(archive, note, topic, identity, writer, say)
    _wait_for_ends(log, run, note)
    for record in _restored(archive, KINDS["runs"], 0, end=None, identity=identity):
        writer.append(record)
    log.delete_topics([f"{run}.{MARK}"])
    done.seconds = time.monotonic() - began
    return done


def complete(archive: Archive) -> Note:
    """The note of an archive with everything in it. Raises `ValueError`."""
    note = archive.note()
    if note is None:
        raise ValueError(f"{archive.path} holds no export")
    if missing := [topic for topic in (RUNS_TOPIC, *TOPICS) if topic not in note.ends]:
        raise ValueError(f"{archive.path} is no whole export, {', '.join(missing)} missing: `penstock topics export` goes on with it")
    return note


def _free(log: Log, run: str, *, say: Callable[[str], None]) -> str:
    """The id itself, once nothing of it is on the broker; what a killed import has left is removed."""
    try:
        check_run_id(run)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    left = log.topics(f"{run}.")
    if find(log, run) is not None:
        raise ConfigError(f"run {run!r} exists already on this broker; import under another --run-id, or delete it first")
    if f"{run}.{MARK}" in left:
        say(f"an import of {run} was begun before and not finished: beginning anew")
        log.delete_topics([name for name in left if name != f"{run}.{MARK}"])
    elif left:
        raise ConfigError(f"topics of a run {run!r} exist on this broker, such as {left[0]}; import under another --run-id")
    return run


def _topic(archive: Archive, note: Note, topic: str, identity: Identity, writer: Writer, say: Callable[[str], None]) -> int:
    """Lay all partitions of a topic side by side, a step of each at a time; how many records it has."""
    written, said = 0, time.monotonic() + SAY_EVERY_S
    at: dict[Partition, int] = {}
    going: dict[Partition, Iterator[Step]] = {}
    for kind, name, partition in archive.places(note):
        if name != topic:
            continue
        end = note.ends[topic][partition]
        place = f"{identity.becomes}.{topic}", partition
        records = _restored(archive, kind, partition, end=end, identity=identity)
        first = next(records, None)
        at[place] = first_kept(note.begins[topic][partition], None if first is None else first.offset, end)
        writer.fill(place, at[place])
        going[place] = steps(_with(first, records), begin=at[place], end=end)
    while going:
        turn = {place: step for place, todo in going.items() if (step := next(todo, None)) is not None}
        going = {place: going[place] for place in turn}
        at |= writer.lay(list(turn.values()), at, list(turn))
        written += sum(len(step.plain) + len(step.together) for step in turn.values())
        if time.monotonic() > said:
            said = time.monotonic() + SAY_EVERY_S
            left = sum(note.ends[topic]) - sum(at.values())
            say(f"{topic}: {written:,} records, {left:,} offsets left")
    return written


def _restored(archive: Archive, kind: Kind, partition: int, *, end: int | None, identity: Identity) -> Iterator[Record]:
    """The records of a partition under their new id, below `end`."""
    rows = (record for table in archive.rows(kind, partition) for record in to_records(kind, table, run=identity.run))
    for record in whole_groups(rows, run=identity.run) if kind.name == "groups" else rows:
        if end is None or record.offset < end:
            yield identity.apply(kind, record)


def _with(first: Record | None, rest: Iterator[Record]) -> Iterator[Record]:
    if first is not None:
        yield first
        yield from rest


def _wait_for_ends(log: Log, run: str, note: Note) -> None:
    """Until all of it can be read, and nothing more. Raises `LogError`."""
    wanted = {(f"{run}.{topic}", partition): end for topic in TOPICS for partition, end in enumerate(note.ends[topic])}
    until = time.monotonic() + VISIBLE_S
    while (found := log.end_offsets(wanted)) != wanted:
        if time.monotonic() > until:
            place = next(place for place in wanted if found[place] != wanted[place])
            raise LogError(f"{place[0]}/{place[1]} ends at offset {found[place]}, {wanted[place]} was expected")
        time.sleep(0.05)
