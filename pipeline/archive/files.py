"""Where an archive lies: DIR/RUN/TABLE/partition=N/FIRST.parquet, each file named by its first offset, and what it says of itself.

The rule: a file gets its name when it is whole and on disk, never before, and says how far it reaches: the names and footers are the
state of an incremental export, so that there is none that could be lost or wrong after a kill.
"""

import fcntl
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

from penstock.infra.checkpoints.files import sync
from penstock.infra.sandbox.parquet import reader
from penstock.pipeline.archive.layout import Kind, kind_of
from penstock.topics.catalogue import RUNS_TOPIC, TOPICS, check_run_id

FORMAT = 1
NOTE = "export.json"
UNFINISHED = ".part"
"""Ends the names of files that are being written."""
NEXT = "penstock.next_offset"
_LAST_OFFSET = 2**63 - 1
NOTE_BYTES = 64 << 20
"""A note has at most two numbers for each of `MOST_PARTITIONS` of a topic."""
_FILE, _PARTITION, _OFFSET = re.compile(r"\d{20}\.parquet"), re.compile(r"partition=(0|[1-9]\d{0,4})"), re.compile(r"\d{1,18}")
MOST_PARTITIONS = 10_000
"""Of a topic: an import makes as many as the note says, so one that was damaged or forged must not ask for any number."""

ROW_GROUP_BYTES = 48 << 20
ROW_GROUP_ROWS = 100_000
FILE_BYTES = 512 << 20
"""Of Arrow memory behind one file: about what a query likes to read in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What an archive says of itself: which run, and up to which offsets it holds a moment of it."""

    run: str
    created_ns: int
    """When the run was created: another run of the same id is another run."""
    partitions: Mapping[str, int]
    """By plain topic name."""
    begins: Mapping[str, list[int]] = field(default_factory=dict)
    """First kept offsets when the archive was begun."""
    ends: Mapping[str, list[int]] = field(default_factory=dict)
    """Offsets up to which everything was exported; none before the first export is done."""
    exported_ns: int = 0
    format: int = FORMAT


_NO_DICTIONARY = frozenset({"offset", "behaviour_logprobs", "raw", "data", "value", "components", "reward"})
"""Where values seldom repeat a dictionary only costs time."""


def options(kind: Kind) -> dict[str, Any]:
    """How a table is written: zstd, with dictionaries where values repeat."""
    sink = pa.BufferOutputStream()
    pq.ParquetWriter(sink, kind.schema).close()
    columns = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    paths = [columns.column(index).path for index in range(len(columns))]
    repeating = [path for path in paths if not _NO_DICTIONARY.intersection(path.split("."))]
    return {"compression": "zstd", "compression_level": 3, "use_dictionary": repeating}


class RowGroup(NamedTuple):
    """Rows that are read together, and the offsets between which they lie."""

    path: Path
    number: int
    """Its place in the file."""
    first: int
    last: int


def note_of(data: bytes) -> Note:
    """A note as it is stored. Raises `ValueError` for another format, and for figures that no export writes."""
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
    """One run's folder."""

    def __init__(self, directory: Path, run: str) -> None:
        self.run, self.path = run, directory / run

    def note(self) -> Note | None:
        """What the archive says of itself; None before the first export. Raises `ValueError` for what this version cannot read."""
        path = self.path / NOTE
        try:
            with reader.regular(path) as file:
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
        """Replace the note at once."""
        write_aside(self.path / NOTE, json.dumps(asdict(note), indent=1).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other exports out of this folder, and clear away what a killed one had begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        with os.fdopen(self._lock_file(), "w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another export writes to {self.path} now; wait for its end") from error
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
            self.check_layout()  # of a link or a pipe it has more to say
            raise

    def _clear(self) -> None:
        for left in self.path.rglob(f"*{UNFINISHED}"):
            left.unlink()

    def check_layout(self) -> None:
        """Raise `ValueError` for a link, a pipe or a device in the folder, and for a name that no export writes."""
        for folder, folders, files in os.walk(self.path, onerror=_unreadable):
            for name in (*folders, *files):
                path = Path(folder, name)
                try:
                    mode = path.lstat().st_mode
                except FileNotFoundError:  # an export has given it its name meanwhile
                    continue
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise ValueError(f"{path} is a link, a pipe or a device; an archive has folders and regular files only")
                if path.suffix == ".parquet" and not (stat.S_ISREG(mode) and _FILE.fullmatch(name)):
                    raise ValueError(f"{path}: a file of rows is named by its first offset, in 20 digits")
                if name.startswith("partition=") and not _PARTITION.fullmatch(name):
                    raise ValueError(f"{path}: the folder of a partition is named partition=N")

    def folder(self, kind: Kind, partition: int) -> Path:
        """Where a partition's files lie."""
        return self.path / kind.name / f"partition={partition}"

    def files(self, kind: Kind, partition: int) -> list[Path]:
        """A partition's files in the order of their offsets."""
        return sorted(self.folder(kind, partition).glob("*.parquet"))

    def next_offset(self, kind: Kind, partition: int) -> int | None:
        """The offset after what is archived of a partition; None where nothing is."""
        files = self.files(kind, partition)
        if not files:
            return None
        if (reached := _reaches(files[-1])) is None:
            raise ValueError(f"{files[-1]} does not say how far it reaches; a file that was written anew has to keep its metadata")
        return reached

    def gap_end(self, kind: Kind, partition: int) -> int:
        """The offset behind the last records of a partition that were deleted before they could be exported; 0 where none were."""
        ends = ((_reaches(file), int(later.stem)) for file, later in pairwise(self.files(kind, partition)))
        return max((first for reached, first in ends if reached is not None and reached < first), default=0)

    def partitions(self, kind: Kind) -> list[int]:
        """The partitions of a table that have files."""
        return sorted({int(path.parent.name.partition("=")[2]) for path in (self.path / kind.name).glob("partition=*/*.parquet")})

    def row_groups(self, kind: Kind, partition: int) -> Iterator[RowGroup]:
        """A partition's row groups by offset, from the files' footers. Raises `ValueError` for a file that is no Parquet."""
        for path in self.files(kind, partition):
            for number, offsets in enumerate(reader.footer(path)["row_groups"]):
                yield RowGroup(path, number, *(offsets or (0, _LAST_OFFSET)))

    def row_group(self, path: Path, number: int) -> pa.Table:
        """The rows of one row group. Raises `ValueError` for a file that is no Parquet."""
        return reader.rows(path, number)

    def rows(self, kind: Kind, partition: int) -> Iterator[pa.Table]:
        """A partition's rows by offset, a row group at a time. Raises `ValueError` for a file that is no Parquet."""
        for row_group in self.row_groups(kind, partition):
            yield self.row_group(row_group.path, row_group.number)

    def places(self, note: Note) -> Iterator[tuple[Kind, str, int]]:
        """Every partition of the run: its table, plain topic, number."""
        for topic, count in note.partitions.items():
            for partition in range(count):
                yield kind_of(topic, partition), topic, partition


def find_archive(directory: Path) -> Archive:
    """The archive that DIR or DIR/RUN is. Raises `ValueError` for none, and for several."""
    if (directory / NOTE).is_file():
        return _checked(Archive(directory.absolute().parent, directory.absolute().name))
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}; name the one that `penstock topics export RUN DIR` has written")
    runs = sorted(note.parent.name for note in directory.glob(f"*/{NOTE}"))
    if not runs:
        raise ValueError(f"{directory} holds no export; name the directory that `penstock topics export RUN DIR` has written")
    if len(runs) > 1:
        raise ValueError(f"{directory} holds the runs {', '.join(runs[:8])}: name one, as {directory / runs[0]}")
    return _checked(Archive(directory, runs[0]))


def _checked(archive: Archive) -> Archive:
    archive.check_layout()
    return archive


def _reaches(path: Path) -> int | None:
    """The offset after what a file holds; None where somebody has written it anew without saying so."""
    stored = reader.footer(path)["metadata"].get(NEXT)
    if stored is not None and not _OFFSET.fullmatch(stored):
        raise ValueError(f"{path}: {NEXT} is {stored[:60]!r}, expected an offset")
    return None if stored is None else int(stored)


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename}: cannot read it: {error.strerror}") from error


def write_aside(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, whatever happens."""
    aside = path.with_name(path.name + UNFINISHED)
    with aside.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


class PartitionFile:
    """One file under way; `finish` gives it its name."""

    def __init__(self, archive: Archive, kind: Kind, partition: int, first: int) -> None:
        folder = archive.folder(kind, partition)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{first:020d}.parquet"
        self._aside = self._path.with_name(self._path.name + UNFINISHED)
        self._file = self._aside.open("xb")
        self._writer = pq.ParquetWriter(self._file, kind.schema, **options(kind))
        self._held: list[pa.Table] = []
        self._held_bytes = self._held_rows = 0
        self.bytes = 0

    def write(self, table: pa.Table) -> None:
        """Add rows; they reach the file a row group at a time."""
        self._held.append(table)
        self._held_bytes += table.nbytes
        self._held_rows += len(table)
        self.bytes += table.nbytes
        if self._held_bytes >= ROW_GROUP_BYTES or self._held_rows >= ROW_GROUP_ROWS:
            self._flush()

    def finish(self, next_offset: int) -> Path:
        """Everything below `next_offset` is in: make it durable and give the file its name."""
        self._flush()
        self._writer.add_key_value_metadata({NEXT: str(next_offset)})
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._aside.rename(self._path)
        sync(self._path.parent)
        return self._path

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._held_rows)
        self._held, self._held_bytes, self._held_rows = [], 0, 0
