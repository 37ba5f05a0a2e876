"""Parquet files of others are tables or are refused in one line that names the file; nothing that they do ends this process."""

import io
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox import parquet
from tests.support.children import child, end_in_time
from tests.support.parquet_footers import LEAF, file_of, group, nested
from tests.support.paths import ROOT

pytestmark = pytest.mark.costly  # starts processes

TABLE = pa.table({"offset": range(50), "text": [f"row {n % 3}" for n in range(50)], "more": [[n, None] for n in range(50)]})


def written(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that may use 64 MiB and write 1 MiB."""
    monkeypatch.setattr(parquet, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(parquet, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "RATIO", 1)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A child of this test alone, which is started at the first request."""
    monkeypatch.setattr(parquet, "_decoder", made := parquet._Decoder())
    yield
    made.end()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.parquet"
    path.write_bytes(GOOD)
    return path


def refusal(path: Path, read: Callable[[Path], Any] = parquet.rows) -> str:
    with pytest.raises(parquet.Refused) as refused:
        read(path)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(str(path))
    return line


def test_rows_and_footer_are_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written(TABLE.replace_schema_metadata({"penstock.next_offset": "50", "other": "x"}), row_group_size=20))
    assert parquet.rows(path).equals(TABLE)
    assert parquet.rows(path, 1).equals(TABLE.slice(20, 20))
    assert parquet.footer(path) == {"metadata": {"penstock.next_offset": "50"}, "row_groups": [[0, 19], [20, 39], [40, 49]]}


GOOD = written(TABLE)
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "garbage": b"PAR1 no parquet at all",
    "cut off": GOOD[:-20],
    "zeros": bytes(5000),
    "length of the footer": GOOD[:-8] + b"\xff\xff\xff\x7f" + GOOD[-4:],
    "encrypted": GOOD[:-4] + b"PARE",
    "pages overwritten": GOOD[:4] + b"\xff" * 200 + GOOD[204:],
    "one bit of a footer, which ends pyarrow by SIGABRT": (ROOT / "tests" / "data" / "parquet" / "level_histogram.parquet").read_bytes(),
    "children that are not there": file_of([group(2**31 - 1), LEAF]),
    "no root": file_of([]),
    "nested 1,000 deep": nested(1_000),
    "nested 20,000 deep, which ends pyarrow by SIGSEGV": nested(20_000),
    "nested 50,000 deep": nested(50_000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_and_the_next_file_is_read(tmp_path: Path, good: Path, kind: str) -> None:
    hostile = tmp_path / "hostile.parquet"
    line = outcome(hostile, HOSTILE[kind])
    assert line.startswith(f"{hostile}: not a readable Parquet file: ")
    assert "\n" not in line
    assert parquet.rows(good).equals(TABLE)


LONG = "x" * (8 << 20)
BOMBS: dict[str, Callable[[], bytes]] = {
    "zstd": lambda: written(pa.table({"a": [LONG]}), compression="zstd", use_dictionary=False),
    "brotli": lambda: written(pa.table({"a": [LONG]}), compression="brotli", use_dictionary=False),
    "gzip": lambda: written(pa.table({"a": [LONG]}), compression="gzip", use_dictionary=False),
    "dictionary": lambda: written(
        pa.table({"a": pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), ["x" * (1 << 19)])}), compression="zstd"
    ),
    "nulls": lambda: written(pa.table({"a": pa.nulls(1_000_000, pa.int64())})),
    "lists of nothing": lambda: written(pa.table({"a": pa.array([[]] * 500_000, pa.list_(pa.int64()))})),
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.usefixtures("decoder", "small_limits")
def test_a_small_file_that_becomes_a_large_table_is_refused_at_a_limit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bomb.parquet"
    path.write_bytes(BOMBS[kind]())
    refusal(path)


def test_a_column_of_categories_is_read_as_its_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(written(pa.table({"a": pa.array(["x", None, "x"]).dictionary_encode()})))
    assert parquet.rows(path)["a"].type == pa.string()
    assert parquet.rows(path)["a"].to_pylist() == ["x", None, "x"]


def test_a_pickled_extension_type_is_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "loaded"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Evil())}
    schema = pa.schema([pa.field("a", pa.int64(), metadata=metadata)])
    path = tmp_path / "a.parquet"
    path.write_bytes(written(pa.table([[1, 2]], schema=schema)))
    assert parquet.rows(path)["a"].to_pylist() == [1, 2]
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing", "link to a pipe", "no permission"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.parquet"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        case "no permission":
            path.symlink_to("/proc/1/mem")
    for read in (parquet.rows, parquet.footer):
        with pytest.raises(parquet.Refused, match=r"^\S+: (cannot read it|is not a regular file)|is not a regular file|not a readable"):
            read(path)


@pytest.mark.usefixtures("decoder")
def test_a_file_that_takes_longer_than_its_limit_is_refused(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LEAST_S", 1e-6)
    assert "decoding took longer than" in refusal(good)
    monkeypatch.setattr(parquet, "LEAST_S", 120.0)
    assert parquet.rows(good).equals(TABLE)


@pytest.mark.usefixtures("decoder")
def test_a_child_that_gets_no_request_is_ended_and_the_next_request_gets_a_new_one(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    monkeypatch.setattr(parquet, "IDLE_S", 0.01)
    start = parquet.subprocess.Popen
    monkeypatch.setattr(parquet.subprocess, "Popen", lambda *command, **options: started.append(start(*command, **options)) or started[-1])
    for count in (1, 2):
        assert parquet.rows(good).equals(TABLE)
        assert end_in_time(started[-1].pid)
        assert len(started) == count


def test_a_child_ends_with_the_process_that_asks_though_it_decodes_without_end() -> None:
    endless = "parquet._response = lambda *_: (print('decodes', flush=True), time.sleep(600)); parquet.main()"
    code = f"import sys, time; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.infra.sandbox import parquet; {endless}"
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as nothing:
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(1 << 30)]
        with child(command, pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE) as decoder:
            theirs.close()
            socket.send_fds(ours, [b"{}"], [nothing.fileno()] * 2)
            assert decoder.stdout is not None
            assert decoder.stdout.readline() == b"decodes\n"
            ours.close()
            assert end_in_time(decoder.pid)


LOW_LIMITS = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.CDLL(None).prctl(24, 24, 0, 0, 0)  # root loses the right to raise them
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.usefixtures("decoder")
def test_files_are_read_under_low_limits_that_this_user_cannot_raise(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = parquet.subprocess.Popen
    low = [sys.executable, "-I", "-S", "-c", LOW_LIMITS]
    monkeypatch.setattr(parquet.subprocess, "Popen", lambda command, **options: start([*low, *command], **options))
    assert parquet.rows(good).equals(TABLE)


WITHOUT_PROC = """
import builtins, pyarrow
there = open
def opened(path, *arguments, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", path)
    return there(path, *arguments, **options)
builtins.open, pyarrow.OSFile = opened, None
"""


@pytest.mark.parametrize("lacking", [("proc",), ("temporary directory",), ("proc", "temporary directory")])
@pytest.mark.usefixtures("decoder")
def test_files_are_read_without_proc_and_without_a_temporary_directory(
    good: Path, monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...]
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    if "proc" in lacking:
        monkeypatch.setattr(pa, "memory_map", missing)
        monkeypatch.setattr(parquet, "_MAIN", f"exec({WITHOUT_PROC!r}); {parquet._MAIN}")
    if "temporary directory" in lacking:
        monkeypatch.setattr(tempfile, "TemporaryFile", missing)
    assert parquet.rows(good).equals(TABLE)


def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    rng, path = random.Random(7), tmp_path / "a.parquet"
    refused = [line for line in (outcome(path, damaged(GOOD, rng)) for _ in range(200)) if line]
    assert len(refused) > 50
    assert all(line.startswith(str(path)) and "\n" not in line for line in refused)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The file with bytes changed, most of them in its footer."""
    footer, changed = len(data) - 8 - int.from_bytes(data[-8:-4], "little"), bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(footer if rng.random() < 0.7 else 4, len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def outcome(path: Path, data: bytes) -> str:
    """How a file is refused; empty if it is read."""
    path.write_bytes(data)
    try:
        parquet.footer(path)
        parquet.rows(path)
    except parquet.Refused as error:
        return str(error)
    return ""
