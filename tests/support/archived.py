"""Records as an exported folder, without a broker."""

from collections.abc import Sequence
from pathlib import Path

from penstock.pipeline.archive.files import Archive, Note, PartitionFile
from penstock.pipeline.archive.layout import KINDS, kind_of
from penstock.pipeline.archive.rows import to_table
from penstock.topics.wire.record import Record


def archive_of(run: str, records: Sequence[Record], directory: Path) -> Path:
    """Write the records of a run as an export does; returns the run's folder."""
    archive, held = Archive(directory, run), dict[tuple[str, int], list[Record]]()
    for record in sorted(records, key=lambda record: record.offset):
        held.setdefault((record.topic.removeprefix(f"{run}."), record.partition), []).append(record)
    topics = dict.fromkeys(kind.topic for kind in KINDS.values())
    counts = {topic: max([1, *(partition + 1 for name, partition in held if name == topic)]) for topic in topics}
    ends = {topic: [0] * count for topic, count in counts.items()}
    for (topic, partition), found in held.items():
        if topic in counts:
            file = PartitionFile(archive, kind_of(topic, partition), partition, found[0].offset)
            file.write(to_table(kind_of(topic, partition), found, run=run))
            ends[topic][partition] = found[-1].offset + 1
            file.finish(ends[topic][partition])
    begins = {topic: [0] * count for topic, count in counts.items()}
    archive.write_note(Note(run=run, created_ns=1, partitions=counts, begins=begins, ends=ends, exported_ns=1))
    return archive.path
