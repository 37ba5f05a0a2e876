"""Files of an archive: DIR/RUN/TABLE/partition=N/FIRST.parquet, named by the first offset, and a note.

A file gets its name when it is complete and synced, and its footer has the offset after it. Names and footers are the whole state of an
incremental export, so a kill cannot lose it.
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
"""Size limit of a note, which has at most two numbers for each of `MOST_PARTITIONS` of a topic."""
_FILE, _PARTITION, _OFFSET = re.compile(r"\d{20}\.parquet"), re.compile(r"partition=(0|[1-9]\d{0,4})"), re.compile(r"\d{1,18}")
MOST_PARTITIONS = 10_000
"""Limit for a topic: an import creates as many as the note has, which may be damaged or forged."""

ROW_GROUP_BYTES = 48 << 20
ROW_GROUP_ROWS = 100_000
FILE_BYTES = 512 << 20
"""Arrow memory of one file: a size that suits queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Metadata of an archive: its run, and the offsets up to which it is complete."""

    run: str
    created_ns: int
    """Creation time of the run, which distinguishes runs with the same id."""
    partitions: Mapping[str, int]
    """By plain topic name."""
    begins: Mapping[str, list[int]] = field(default_factory=dict)
    """First retained offsets when the archive was created."""
    ends: Mapping[str, list[int]] = field(default_factory=dict)
    """Offsets up to which all records are exported; empty before the first export is complete."""
    exported_ns: int = 0
    format: int = FORMAT


_NO_DICTIONARY = frozenset({"offset", "behaviour_logprobs", "raw", "data", "value", "components", "reward"})
"""Columns whose values seldom repeat: no dictionary encoding."""


def options(kind: Kind) -> dict[str, Any]:
    """Parquet options of a table: zstd, dictionaries for columns with repeated values."""
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, kind.schema).close()
    columns = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    paths = [columns.column(index).path for index in range(len(columns))]
    repeating = [path for path in paths if not _NO_DICTIONARY.intersection(path.split("."))]
    return {"compression": "zstd", "compression_level": 3, "use_dictionary": repeating}


class RowGroup(NamedTuple):
    """A row group and its first and last offset."""

    path: Path
    number: int
    """Index in the file."""
    first: int
    last: int


def note_of(data: bytes) -> Note:
    """Parse a note. Raises `ValueError` for another format and for values that no export writes."""
    try:
        stored = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    form = stored.get("format") if isinstance(stored, dict) else None
    if form != FORMAT:
        raise ValueError(f"format {form!r}, this version reads {FORMAT}")
    try:
        note = Note(**stored)
        check_run_id(note.run)
    except TypeError as error:
        raise ValueError(str(error)) from error
    for name in ("created_ns", "exported_ns"):
        _require(_is_offset(getattr(note, name)), f"{name} is {getattr(note, name)!r}, expected a time")
    for name in ("partitions", "begins", "ends"):
        _require(isinstance(getattr(note, name), dict), f"{name} has to be an object")
    for topic, count in note.partitions.items():
        _require(topic in (RUNS_TOPIC, *TOPICS), f"there is no topic {topic!r}")
        fits = _is_offset(count) and 1 <= count <= MOST_PARTITIONS
        _require(fits, f"{topic} with {count!r} partitions, a topic has 1 to {MOST_PARTITIONS}")
    for name in ("begins", "ends"):
        for topic, offsets in getattr(note, name).items():
            fits = isinstance(offsets, list) and len(offsets) == note.partitions.get(topic) and all(map(_is_offset, offsets))
            _require(fits, f"{name} of {topic!r} has to be an offset for each of its partitions")
    _require(note.begins.keys() == note.partitions.keys(), "begins has to have the topics of partitions")
    return note


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_offset(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LAST_OFFSET


class Archive:
    """The folder of an archived run."""

    def __init__(self, directory: Path, run: str) -> None:
        self.run, self.path = run, directory / run

    def note(self) -> Note | None:
        """The archive's note; None before the first export. Raises `ValueError` for a note that this version cannot read."""
        path = self.path / NOTE
        try:
            with parquet.regular(path) as file:
                data = file.read(NOTE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{path}: cannot read it: {error.strerror}") from error
        if len(data) > NOTE_BYTES:
            raise ValueError(f"{path} has more than {NOTE_BYTES:,} bytes")
        try:
            return note_of(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def write_note(self, note: Note) -> None:
        """Replace the note atomically."""
        write_atomically(self.path / NOTE, json.dumps(asdict(note), indent=1).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this folder against other exports, and remove unfinished files."""
        self.path.mkdir(parents=True, exist_ok=True)
        with os.fdopen(self._lock_file(), "w") as lock:
            if not locked(lock):
                raise ValueError(f"another export writes to {self.path} now; wait for its end")
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
            self.check_layout()  # has a better message for a link or a pipe
            raise

    def _clear(self) -> None:
        for path in self.path.rglob(f"*{UNFINISHED}"):
            path.unlink()

    def check_layout(self) -> None:
        """Raise `ValueError` for a link, a pipe or a device in the folder, and for a name that no export writes."""
        for folder, folders, files in os.walk(self.path, onerror=_unreadable):
            for name in (*folders, *files):
                path = Path(folder, name)
                try:
                    mode = path.lstat().st_mode
                except FileNotFoundError:  # an export has renamed it
                    continue
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise ValueError(f"{path} is a link, a pipe or a device; an archive has folders and regular files only")
                if path.suffix == ".parquet" and not (stat.S_ISREG(mode) and _FILE.fullmatch(name)):
                    raise ValueError(f"{path}: a file of rows is named by its first offset, in 20 digits")
                if name.startswith("partition=") and not _PARTITION.fullmatch(name):
                    raise ValueError(f"{path}: the folder of a partition is named partition=N")

    def folder(self, kind: Kind, partition: int) -> Path:
        return self.path / kind.name / f"partition={partition}"

    def files(self, kind: Kind, partition: int) -> list[Path]:
        """A partition's files in the order of their offsets."""
        return sorted(self.folder(kind, partition).glob("*.parquet"))

    def next_offset(self, kind: Kind, partition: int) -> int | None:
        """The offset after the last archived record of a partition; None if there are none."""
        files = self.files(kind, partition)
        if not files:
            return None
        if (reached := _reaches(files[-1])) is None:
            raise ValueError(f"{files[-1]} has no {NEXT} in its metadata; a rewritten file has to keep its metadata")
        return reached

    def gap_end(self, kind: Kind, partition: int) -> int:
        """The offset after the last gap in a partition, of records deleted before they were exported; 0 without gaps."""
        ends = ((_reaches(file), int(later.stem)) for file, later in pairwise(self.files(kind, partition)))
        return max((first for reached, first in ends if reached is not None and reached < first), default=0)

    def partitions(self, kind: Kind) -> list[int]:
        """The partitions of a table that have files."""
        return sorted({int(path.parent.name.partition("=")[2]) for path in (self.path / kind.name).glob("partition=*/*.parquet")})

    def row_groups(self, kind: Kind, partition: int) -> Iterator[RowGroup]:
        """A partition's row groups by offset, from the files' footers. Raises `ValueError` for a file that is no Parquet."""
        for path in self.files(kind, partition):
            for number, offsets in enumerate(parquet.footer(path)["row_groups"]):
                yield RowGroup(path, number, *(offsets or (0, _LAST_OFFSET)))

    def row_group(self, path: Path, number: int) -> pa.Table:
        """The rows of one row group. Raises `ValueError` for a file that is no Parquet."""
        return parquet.rows(path, number)

    def rows(self, kind: Kind, partition: int) -> Iterator[pa.Table]:
        """A partition's rows by offset, a row group at a time. Raises `ValueError` for a file that is no Parquet."""
        for row_group in self.row_groups(kind, partition):
            yield self.row_group(row_group.path, row_group.number)

    def tables(self, note: Note) -> Iterator[tuple[Kind, str, int]]:
        """(table, plain topic, number) of each partition."""
        for topic, count in note.partitions.items():
            for partition in range(count):
                yield kind_of(topic, partition), topic, partition


def find_archive(directory: Path) -> Archive:
    """The archive in DIR or DIR/RUN. Raises `ValueError` for none and for several."""
    if (directory / NOTE).is_file():
        return _checked(Archive(directory.absolute().parent, directory.absolute().name))
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}; expected one that `penstock topics export RUN DIR` wrote")
    runs = sorted(note.parent.name for note in directory.glob(f"*/{NOTE}"))
    if not runs:
        raise ValueError(f"{directory} holds no export; expected a directory that `penstock topics export RUN DIR` wrote")
    if len(runs) > 1:
        raise ValueError(f"{directory} holds the runs {', '.join(runs[:8])}: name one, as {directory / runs[0]}")
    return _checked(Archive(directory, runs[0]))


def _checked(archive: Archive) -> Archive:
    archive.check_layout()
    return archive


def _reaches(path: Path) -> int | None:
    """The offset after a file's last record; None if the file was rewritten without its metadata."""
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
    """A file being written; `finish` gives it its name."""

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
        """Add rows; they are written in row groups."""
        self._buffered.append(table)
        self._buffered_bytes += table.nbytes
        self._buffered_rows += len(table)
        self.bytes += table.nbytes
        if self._buffered_bytes >= ROW_GROUP_BYTES or self._buffered_rows >= ROW_GROUP_ROWS:
            self._flush()

    def finish(self, next_offset: int) -> Path:
        """Sync the file, which is complete below `next_offset`, and rename it."""
        self._flush()
        self._writer.add_key_value_metadata({NEXT: str(next_offset)})
        self._writer.close()
        complete(self._file, self._path)
        return self._path

    def _flush(self) -> None:
        if self._buffered:
            self._writer.write_table(pa.concat_tables(self._buffered), row_group_size=self._buffered_rows)
        self._buffered, self._buffered_bytes, self._buffered_rows = [], 0, 0
