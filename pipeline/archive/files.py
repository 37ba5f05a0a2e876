"""Files of an archive: DIR/RUN/TABLE/partition=N/FIRST.parquet, where FIRST is the first offset, and a note, `export.json`.

A file is renamed to its final name when it is complete and synced, and its footer has the offset after its last record. An incremental
export continues from names and footers alone, so a kill loses nothing.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.infra.paths import complete, locked
from penstock.infra.sandbox import parquet
from penstock.pipeline.archive.layout import Kind, kind_of
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS, check_run_id

FORMAT = 1
NOTE = "export.json"
UNFINISHED = ".part"
NEXT = "penstock.next_offset"
_LAST_OFFSET = 2**63 - 1
NOTE_BYTES = 64 << 20
_FILE, _PARTITION, _OFFSET = re.compile(r"\d{20}\.parquet"), re.compile(r"partition=(0|[1-9]\d{0,4})"), re.compile(r"\d{1,18}")
MOST_PARTITIONS = 10_000
"""Largest number of partitions per topic. An import creates as many as the note states, and the note may be forged."""

ROW_GROUP_BYTES = 48 << 20
ROW_GROUP_ROWS = 100_000
FILE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Metadata of an archive: its run, and the offsets up to which it is complete."""

    run: str
    created_ns: int
    """Creation time of the run, which distinguishes runs with the same id."""
    partitions: Mapping[str, int]
    """Topic (name without the run) -> number of partitions."""
    begins: Mapping[str, list[int]] = field(default_factory=dict)
    """Topic -> first retained offset of each partition when the archive was created."""
    ends: Mapping[str, list[int]] = field(default_factory=dict)
    """Topic -> offset of each partition up to which all records are exported; empty before the first export is complete."""
    exported_ns: int = 0
    format: int = FORMAT


_NO_DICTIONARY = frozenset({"offset", "behaviour_logprobs", "raw", "data", "value", "components", "reward"})
"""Columns without dictionary encoding, because their values seldom repeat."""


def options(kind: Kind) -> dict[str, Any]:
    """Return the options of `pyarrow.parquet.ParquetWriter` for a table."""
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, kind.schema).close()
    columns = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    paths = [columns.column(index).path for index in range(len(columns))]
    repeating = [path for path in paths if not _NO_DICTIONARY.intersection(path.split("."))]
    return {"compression": "zstd", "compression_level": 3, "use_dictionary": repeating}


class RowGroup(NamedTuple):
    """A row group of a Parquet file, with its first and last offset."""

    path: Path
    number: int
    first: int
    last: int


def note_of(data: bytes) -> Note:
    """Parse a note. Raises `ValueError` for another format version or invalid values."""
    try:
        stored = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from error
    form = stored.get("format") if isinstance(stored, dict) else None
    if form != FORMAT:
        raise ValueError(f"the archive has format {form!r}, this version of Penstock reads format {FORMAT}")
    try:
        note = Note(**stored)
        check_run_id(note.run)
    except TypeError as error:
        raise ValueError(str(error)) from error
    for name in ("created_ns", "exported_ns"):
        _require(_is_offset(getattr(note, name)), f"{name} is {getattr(note, name)!r}, expected a time")
    for name in ("partitions", "begins", "ends"):
        _require(isinstance(getattr(note, name), dict), f"{name} is {getattr(note, name)!r:.60}, expected an object")
    for topic, count in note.partitions.items():
        _require(topic in (RUNS_TOPIC, *TOPICS), f"there is no topic {topic!r}")
        fits = _is_offset(count) and 1 <= count <= MOST_PARTITIONS
        _require(fits, f"partitions of {topic} is {count!r}, expected 1 to {MOST_PARTITIONS}")
    for name in ("begins", "ends"):
        for topic, offsets in getattr(note, name).items():
            fits = isinstance(offsets, list) and len(offsets) == note.partitions.get(topic) and all(map(_is_offset, offsets))
            _require(fits, f"{name} of {topic!r} must be a list with one offset per partition")
    _require(note.begins.keys() == note.partitions.keys(), "begins and partitions must have the same topics")
    return note


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_offset(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LAST_OFFSET


class Archive:
    """Directory of one archived run."""

    def __init__(self, directory: Path, run: str) -> None:
        self.run, self.path = run, directory / run

    def note(self) -> Note | None:
        """Read the archive's note; None before the first export. Raises `ValueError` for a note that this version cannot read."""
        path = self.path / NOTE
        try:
            with parquet.regular(path) as file:
                data = file.read(NOTE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path}: cannot read it: {error.strerror}") from error
        if len(data) > NOTE_BYTES:
            raise ValueError(f"{path} is larger than {NOTE_BYTES:,} bytes: it is not what an export writes there")
        try:
            return note_of(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def required_note(self) -> Note:
        """Read the archive's note. Raises `ValueError` also if there is none."""
        if (note := self.note()) is None:
            raise ValueError(f"{self.path} is not an export: {NOTE} is missing; expected a directory that `penstock topics export` wrote")
        return note

    def write_note(self, note: Note) -> None:
        write_atomically(self.path / NOTE, json.dumps(asdict(note), indent=1).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the archive against other exports, and remove unfinished files."""
        self.path.mkdir(parents=True, exist_ok=True)
        with os.fdopen(self._lock_file(), "w") as lock:
            if not locked(lock):
                raise ValueError(f"another export is writing to {self.path}; wait until it has ended")
            self.check_layout()
            self._clear()
            try:
                yield
            finally:
                self._clear()

    def _lock_file(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            return os.open(self.path / ".lock", flags, 0o666)
        except OSError:
            self.check_layout()  # raises a clearer error for a link or a pipe
            raise

    def _clear(self) -> None:
        for path in self.path.rglob(f"*{UNFINISHED}"):
            path.unlink()

    def check_layout(self) -> None:
        """Raise `ValueError` if the archive contains a link, pipe or device, or a name that no export writes."""
        for folder, folders, files in os.walk(self.path, onerror=_unreadable):
            for name in (*folders, *files):
                path = Path(folder, name)
                try:
                    mode = path.lstat().st_mode
                except FileNotFoundError:  # renamed by an export
                    continue
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise ValueError(f"{path} is a link, pipe or device; an archive may contain only directories and regular files")
                if path.suffix == ".parquet" and not (stat.S_ISREG(mode) and _FILE.fullmatch(name)):
                    raise ValueError(f"{path}: Parquet files of an archive are named by their first offset, in 20 digits")
                if name.startswith("partition=") and not _PARTITION.fullmatch(name):
                    raise ValueError(f"{path}: directories of partitions are named partition=N, with N from 0 to 99999")

    def folder(self, kind: Kind, partition: int) -> Path:
        return self.path / kind.name / f"partition={partition}"

    def files(self, kind: Kind, partition: int) -> list[Path]:
        return sorted(self.folder(kind, partition).glob("*.parquet"))

    def next_offset(self, kind: Kind, partition: int) -> int | None:
        """Return the offset after the last archived record of a partition; None if there is none."""
        files = self.files(kind, partition)
        if not files:
            return None
        if (reached := _reaches(files[-1])) is None:
            raise ValueError(f"{files[-1]} has no {NEXT!r} in its metadata; tools that rewrite the file must keep the metadata")
        return reached

    def gap_end(self, kind: Kind, partition: int) -> int:
        """Return the offset after the last gap in a partition; 0 without gaps. A gap is a range deleted before it was exported."""
        ends = ((_reaches(file), int(later.stem)) for file, later in pairwise(self.files(kind, partition)))
        return max((first for reached, first in ends if reached is not None and reached < first), default=0)

    def partitions(self, kind: Kind) -> list[int]:
        """Return the numbers of a table's partitions that have files."""
        return sorted({int(path.parent.name.partition("=")[2]) for path in (self.path / kind.name).glob("partition=*/*.parquet")})

    def row_groups(self, kind: Kind, partition: int) -> Iterator[RowGroup]:
        """Yield the row groups of a partition by offset, from the files' footers. Raises `ValueError` for an invalid Parquet file."""
        for path in self.files(kind, partition):
            for number, offsets in enumerate(parquet.footer(path)["row_groups"]):
                yield RowGroup(path, number, *(offsets or (0, _LAST_OFFSET)))

    def tables(self, note: Note) -> Iterator[tuple[Kind, str, int]]:
        """Yield (table, topic without the run, partition) of each partition."""
        for topic, count in note.partitions.items():
            for partition in range(count):
                yield kind_of(topic, partition), topic, partition


def find_archive(directory: Path) -> Archive:
    """Find the archive that is `directory` or a subdirectory of it. Raises `ValueError` if there is none or more than one."""
    if not directory.is_dir():
        raise ValueError(f"directory {directory} does not exist; expected one that `penstock topics export RUN DIR` wrote")
    notes = [directory.absolute() / NOTE] if (directory / NOTE).is_file() else sorted(directory.glob(f"*/{NOTE}"))
    if not notes:
        raise ValueError(f"{directory} is not an export; expected a directory that `penstock topics export RUN DIR` wrote")
    if len(notes) > 1:
        runs = ", ".join(note.parent.name for note in notes[:8])
        raise ValueError(f"{directory} contains the runs {runs}: name one of them, such as {notes[0].parent}")
    archive = Archive(notes[0].parent.parent, notes[0].parent.name)
    archive.check_layout()
    return archive


def _reaches(path: Path) -> int | None:
    """Return the offset after the last record of a file; None if the file was rewritten without its metadata."""
    stored = parquet.footer(path)["metadata"].get(NEXT)
    if stored is not None and not _OFFSET.fullmatch(stored):
        raise ValueError(f"{path}: {NEXT} is {stored[:60]!r}, expected an offset")
    return None if stored is None else int(stored)


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename}: cannot read it: {error.strerror}") from error


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + UNFINISHED)
    with temporary.open("xb") as file:
        file.write(data)
        complete(file, path)


class PartitionFile:
    """A Parquet file that is being written under a temporary name; `finish` renames it."""

    def __init__(self, archive: Archive, kind: Kind, partition: int, first: int) -> None:
        folder = archive.folder(kind, partition)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{first:020d}.parquet"
        self._temporary = self._path.with_name(self._path.name + UNFINISHED)
        self._file = self._temporary.open("xb")
        self._writer = pq.ParquetWriter(self._file, kind.schema, **options(kind))
        self._buffered: list[pa.Table] = []
        self._buffered_bytes = self._buffered_rows = 0
        self.bytes = 0

    def write(self, table: pa.Table) -> None:
        """Add rows. They are buffered until a row group is full."""
        self._buffered.append(table)
        self._buffered_bytes += table.nbytes
        self._buffered_rows += len(table)
        self.bytes += table.nbytes
        if self._buffered_bytes >= ROW_GROUP_BYTES or self._buffered_rows >= ROW_GROUP_ROWS:
            self._flush()

    def finish(self, next_offset: int) -> Path:
        """Write the rest, sync the file and rename it; all records below `next_offset` are in it. Return its path."""
        self._flush()
        self._writer.add_key_value_metadata({NEXT: str(next_offset)})
        self._writer.close()
        complete(self._file, self._path)
        return self._path

    def _flush(self) -> None:
        if self._buffered:
            self._writer.write_table(pa.concat_tables(self._buffered), row_group_size=self._buffered_rows)
        self._buffered, self._buffered_bytes, self._buffered_rows = [], 0, 0
