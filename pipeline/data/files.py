"""Rows from JSONL and Parquet files without a decoded copy in memory: line offsets for JSONL, memory-mapped Arrow for Parquet.

Line numbers in errors start at 1 and include blank lines.
"""

import codecs
import glob
import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.infra.sandbox.parquet import reader
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.data.rows import DataError, MissingData, Source, Unreadable

SUFFIXES = (".jsonl", ".parquet")


def open_files(source: str, *, base_dir: Path) -> Source:
    """Open a file, or the files of a folder or glob in the order of their names. Raises `DataError`."""
    files = _find(source, base_dir)
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise DataError(f"{source}: holds both .jsonl and .parquet files; name one kind, as in {source.rstrip('/')}/*.jsonl")
    return JsonLines(files) if kinds == {".jsonl"} else Parquet(files)


class JsonLines:
    """Rows of JSONL files: one JSON object a line, UTF-8."""

    generated = False

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._firsts = [0]
        """First row number of each file, and the total number of rows."""
        self._starts, self._lengths, self._lines = array("q"), array("q"), array("q")
        hasher = hashlib.sha256()
        for file in files:
            self._index(file, hasher)
            self._firsts.append(len(self._starts))
        self.digest = hasher.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def raw(self, index: int) -> dict[str, Any]:
        file = self._files[self._file(index)]
        try:
            with file.open("rb", buffering=0) as stream:
                line = os.pread(stream.fileno(), self._lengths[index], self._starts[index])
        except OSError as error:
            raise DataError(f"{self.origin(index)}: cannot read the row: {error.strerror}") from error
        try:
            row = json.loads(line.rstrip(b"\r\n").decode(), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.origin(index)}: not UTF-8 at byte {error.start} of the line; save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at").removesuffix(" starting")
            raise DataError(f"{self.origin(index)}: not valid JSON: {what[0].lower()}{what[1:]} at character {error.pos + 1}") from error
        except RecursionError as error:
            raise DataError(f"{self.origin(index)}: not valid JSON: nested too deeply") from error
        except KeyError as error:
            raise DataError(f"{self.origin(index)}: the key {error} occurs twice; remove one") from error
        except ValueError as error:
            raise DataError(f"{self.origin(index)}: a number of more than 4,300 digits; write it as text") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.origin(index)}: expected a JSON object, got a {type(row).__name__}")
        return row

    def origin(self, index: int) -> str:
        return f"{self._files[self._file(index)]}:{self._lines[index]}"

    def _file(self, index: int) -> int:
        return bisect_right(self._firsts, index) - 1

    def _index(self, file: Path, hasher: Any) -> None:
        start = 0
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    hasher.update(line)
                    text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    start += len(line) - len(text)
                    if text.strip():
                        self._starts.append(start)
                        self._lengths.append(len(text))
                        self._lines.append(number)
                    start += len(text)
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error


class Parquet:
    """Rows of Parquet files as memory-mapped Arrow batches, because reading one row of Parquet decodes its row group."""

    generated = False

    def __init__(self, files: Sequence[Path]) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._firsts = [0]
        self._origins: list[tuple[Path, int]] = []
        """File of each batch, and the number of its first row in that file."""
        hasher = hashlib.sha256()
        for file in files:
            try:
                self._read(file)
                with file.open("rb") as stream:
                    hasher.update(hashlib.file_digest(stream, "sha256").digest())
            except (reader.Refused, OSError) as error:
                raise DataError(str(error)) from error
        self.digest = hasher.hexdigest()

    def __len__(self) -> int:
        return self._firsts[-1]

    def raw(self, index: int) -> dict[str, Any]:
        batch = bisect_right(self._firsts, index) - 1
        return row_of(self._batches[batch], index - self._firsts[batch])

    def origin(self, index: int) -> str:
        batch = bisect_right(self._firsts, index) - 1
        file, first = self._origins[batch]
        return f"{file}:{first + index - self._firsts[batch] + 1}"

    def _read(self, file: Path) -> None:
        table, first = reader.rows(file), 0
        if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
            raise DataError(f"{file}: the column {twice[0]!r} occurs twice; rename or drop one of them")
        for batch in table.to_batches():
            if batch.num_rows:
                self._batches.append(batch)
                self._origins.append((file, first))
                first += batch.num_rows
                self._firsts.append(self._firsts[-1] + batch.num_rows)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises `KeyError` for a duplicate key, of which a dict would silently use the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise KeyError(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return row


def row_of(rows: pa.RecordBatch | pa.Table, index: int) -> dict[str, Any]:
    """One row by column name, as Python values."""
    return {name: _value(column[index]) for name, column in zip(rows.schema.names, rows.columns, strict=True)}


def _value(scalar: pa.Scalar) -> Any:
    """An Arrow value as a Python value, maps as dicts; `Unreadable` if it has none."""
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except KeyError:
        return Unreadable("a map that has a key twice")
    except UnicodeDecodeError:
        return Unreadable("text that is not UTF-8")
    except (pa.ArrowException, ValueError, OverflowError):
        return Unreadable(str(scalar.type))


def _find(source: str, base_dir: Path) -> list[Path]:
    path = base_dir / Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            written = [*path.glob("*.arrow"), *path.glob("dataset_*.json")]
            hint = f"; for a folder written by `datasets` give hf:{source}" if written else ""
            raise MissingData(f"{path}: a folder without .jsonl or .parquet files{hint}")
        return files
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not files:
        neighbours = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise MissingData(f"there is no file {path}{nearest(path.name, neighbours)}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(f"{file}: expected .jsonl or .parquet; read other formats in your own function, file.py:function")
    return files
