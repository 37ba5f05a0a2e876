"""Archives of others are data: what is no export is refused in one line that names the file, and nothing outside is read or written."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.errors import RecordMissing
from penstock.pipeline.archive.archived_log import ArchivedLog
from penstock.pipeline.archive.files import NOTE, Archive, find_archive, note_of
from penstock.pipeline.archive.import_run import complete
from penstock.pipeline.cli import main
from penstock.topics.wire.record import Record
from tests.support.parquet_footers import nested
from tests.support.paths import ROOT

OLD = ROOT / "tests" / "data" / "archive_format_1" / "old"
FIRST = "00000000000000000000.parquet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a copied archive; `tmp_path / "secret"` is outside of it."""
    (tmp_path / "secret").write_text("secret")
    shutil.copytree(OLD, tmp_path / "given" / "old")
    return tmp_path / "given" / "old"


def everything(folder: Path) -> list[Record]:
    """All records of an archive, as an import reads them."""
    archived = ArchivedLog(find_archive(folder))
    places = [(kind, partition) for kind, _, partition in archived.archive.tables(complete(archived.archive))]
    return [record for kind, partition in places for record in archived.records(kind, partition)]


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        everything(folder)
    (line,) = str(refused.value).splitlines()
    assert (folder.parents[1] / "secret").read_text() == "secret"
    return line


def rows(folder: Path) -> Path:
    return folder / "groups" / "partition=0" / FIRST


def linked(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def piped(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


LAYOUTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "link in place of the note": (lambda folder: linked(folder / NOTE, folder.parents[1] / "secret"), NOTE),
    "link in place of rows": (lambda folder: linked(rows(folder), folder.parents[1] / "secret"), FIRST),
    "link to rows of another archive": (lambda folder: linked(rows(folder), OLD / "groups" / "partition=0" / FIRST), FIRST),
    "link in place of a partition": (lambda folder: linked(rows(folder).parent, Path("/")), "partition=0"),
    "link in place of a table": (lambda folder: linked(folder / "groups", Path("..")), "groups"),
    "link nobody reads": (lambda folder: linked(folder / "README", Path("/etc/passwd")), "README"),
    "link that leads nowhere": (lambda folder: linked(folder / ".lock", Path("../../created")), ".lock"),
    "pipe in place of rows": (lambda folder: piped(rows(folder)), FIRST),
    "pipe elsewhere": (lambda folder: piped(folder / "pipe"), "pipe"),
    "folder in place of rows": (lambda folder: (rows(folder).unlink(), rows(folder).mkdir()), FIRST),
    "huge rows of zeros": (lambda folder: sparse(rows(folder)), FIRST),
    "huge note": (lambda folder: sparse(folder / NOTE), NOTE),
    "name without an offset": (lambda folder: rows(folder).rename(rows(folder).with_name("x.parquet")), "x.parquet"),
    "short name": (lambda folder: rows(folder).rename(rows(folder).with_name("1.parquet")), "1.parquet"),
    "name that drives the terminal": (lambda folder: rows(folder).rename(rows(folder).with_name("\x1b[2J.parquet")), "[2J.parquet"),
    "partition that is no number": (lambda folder: rows(folder).parent.rename(folder / "groups" / "partition=.."), "partition=.."),
    "partition below zero": (lambda folder: rows(folder).parent.rename(folder / "groups" / "partition=-1"), "partition=-1"),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_folder_that_no_export_writes_is_refused_by_name(folder: Path, kind: str) -> None:
    spoil, name = LAYOUTS[kind]
    spoil(folder)
    assert name in refusal(folder)


def test_hard_links_are_files(folder: Path) -> None:
    os.link(rows(folder), folder / "copy")
    assert everything(folder) == everything(OLD)


@pytest.mark.parametrize("name", [".lock", f"{NOTE}.part", "groups/partition=0/x.parquet.part"])
def test_an_export_into_a_folder_with_links_writes_nothing_outside(folder: Path, name: str) -> None:
    secret = folder.parents[1] / "secret"
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match="is a link"), Archive(folder.parent, "old").locked():
        pass
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_an_export_does_not_wait_for_what_is_no_lock_file(folder: Path, kind: str) -> None:
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / ".lock")
    with pytest.raises((ValueError, OSError), match=re.escape(str(folder / ".lock"))), Archive(folder.parent, "old").locked():
        pass


@pytest.mark.parametrize("name", [NOTE, f"groups/partition=0/{FIRST}", f"groups/partition=1/{FIRST}"])
def test_a_file_may_get_its_name_while_another_process_reads(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, walk = folder / name, os.walk
    aside = path.with_name(f"{path.name}.part")
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(path.read_bytes() if path.exists() else b"")

    def walked(top: Path, **options: Any) -> Iterator[Any]:
        seen = list(walk(top, **options))
        aside.rename(path)
        yield from seen

    monkeypatch.setattr(os, "walk", walked)
    assert find_archive(folder).note() is not None
    assert not aside.exists()


NOTES: dict[str, dict[str, Any]] = {
    "id that is a path": {"run": "../old"},
    "id that is absolute": {"run": "/etc"},
    "id that is no text": {"run": 7},
    "unknown key": {"x": 1},
    "unknown topic": {"partitions": {"../x": 1}},
    "topic of another run": {"partitions": {"other.groups": 1}},
    "no partitions": {"partitions": []},
    "many partitions": {"partitions": {"groups": 10**9}},
    "partitions as truth": {"partitions": {"groups": True}},
    "begins of fewer partitions": {"begins": {"groups": [0]}},
    "begins that lack a topic": {"begins": {}},
    "ends of more partitions": {"ends": {"groups": [0] * 99}},
    "ends below zero": {"ends": {"groups": [-1, 0]}},
    "ends that are text": {"ends": {"groups": ["8", "8"]}},
    "ends beyond all offsets": {"ends": {"groups": [2**70, 0]}},
    "end that is no number": {"ends": {"groups": [float("nan"), 0]}},
    "time as text": {"created_ns": "now"},
    "later format": {"format": 2},
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_note_that_no_export_writes_is_refused(folder: Path, kind: str) -> None:
    stored = json.loads((folder / NOTE).read_text())
    (folder / NOTE).write_text(json.dumps(stored | NOTES[kind]))
    assert NOTE in refusal(folder)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}', b'{"format": 1, "run": "a\\u0000"}'])
def test_what_is_no_note_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        note_of(data)


def test_a_damaged_note_is_read_or_is_a_value_error() -> None:
    rng, note, refused = random.Random(3), (OLD / NOTE).read_bytes(), 0
    for _ in range(2000):
        data = bytearray(note)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(len(data))] = rng.choice(b'-0917{}[],:"eEna \\\xff')
        try:
            note_of(bytes(data))
        except ValueError:
            refused += 1
    assert refused > 1000


def changed(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a file anew, with the metadata that it had."""
    table = pq.read_table(path)
    pq.write_table(change(table), path)


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, values(table) if callable(values) else values)


ROWS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "partition of another": column("partition", lambda table: pa.array([1] * len(table), pa.int32())),
    "partition that is null": column("partition", lambda table: pa.nulls(len(table), pa.int32())),
    "partition beyond its type": column("partition", lambda table: pa.array([2**40] * len(table))),
    "offsets that are one": column("offset", lambda table: pa.array([0] * len(table))),
    "offset that is null": column("offset", lambda table: pa.nulls(len(table), pa.int64())),
    "offsets that fall": lambda table: table.take(list(range(len(table)))[::-1]),
    "rows twice": lambda table: pa.concat_tables([table, table]),
    "column missing": lambda table: table.drop_columns(["group"]),
    "column twice": lambda table: table.append_column("group", table["group"]),
    "column of texts": column("group", lambda table: pa.array(["x"] * len(table))),
    "column of lists": column("group", lambda table: pa.array([[1]] * len(table))),
    "no UTF-8": column("outcome", lambda table: pa.Array.from_buffers(pa.string(), len(table), pa.array([b"\xff"] * len(table)).buffers())),
    "time as text": column("timestamp", lambda table: pa.array(["never"] * len(table))),
    "nested categories": column("outcome", lambda table: pa.array([["x"]] * len(table), pa.list_(pa.dictionary(pa.int8(), pa.string())))),
    "nothing": lambda table: table.slice(0, 0).select([]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_cannot_be_records_are_refused(folder: Path, kind: str) -> None:
    changed(rows(folder), ROWS[kind])
    assert "groups" in refusal(folder)
    with pytest.raises((ValueError, RecordMissing)):
        ArchivedLog(find_archive(folder)).read("old.groups", 0, [0, 1])


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda folder: rows(folder).write_bytes(nested(20_000)), FIRST),
        (lambda folder: rows(folder).write_bytes(b"PAR1\n\x1b[2J"), FIRST),
        (lambda folder: rows(folder).rename(rows(folder).with_name("\x1b[2J.parquet")), "[2J.parquet"),
    ],
)
def test_a_command_prints_one_line_that_can_be_printed(
    folder: Path, spoil: Callable[[Path], Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder)
    assert main(["audit", str(folder)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and line.isprintable()
