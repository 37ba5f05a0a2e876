"""Validated rows of a data set: a prompt (text or messages) and the columns for the reward functions; JSONL and Parquet files.

An unusable row is an error with its origin (`file:line`, counted from 1 with blank lines); it is never skipped. Files have no decoded
copy in memory: line offsets for JSONL, memory-mapped Arrow for Parquet.
"""

import codecs
import glob
import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from math import isnan
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from penstock.infra.errors import ConfigError
from penstock.infra.sandbox import parquet
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.data.conversation.messages import messages_of, shown
from penstock.pipeline.data.references import with_facts
from penstock.topics.wire.visible import well_formed_json

ANSWER = "answer"
"""Name of the reference answer in the arguments of reward functions, and the default column."""
USUAL = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input", "messages", "text"),
    ANSWER: ("answer", "solution", "target", "label", "expected", "ground_truth", "output", "response"),
}
"""Usual names of the prompt and answer columns, the most usual first."""
LONGEST_NUMBER = 10**4000
"""Python's JSON refuses integers of more than 4,300 digits."""
SHOWN = 60
"""Longest value in an error message, in characters."""


class DataError(ValueError):
    """Unusable data; the message is one line that starts with the file and line."""


class MissingData(DataError, ConfigError):
    """A data source that does not exist; an error in the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set. Either `prompt` or `messages` is None."""

    index: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    columns: dict[str, Any]
    """JSON values for the reward functions: the reference answer as "answer", and all other columns except the prompt."""
    origin: str
    """Position of the row for error messages: `train.jsonl:17`."""
    not_json: dict[str, str] = field(default_factory=dict)
    """Column -> type ("bytes") of values that JSON cannot represent; reward functions do not receive them."""
    replaced: int = 0
    """Lone surrogates in its texts, replaced by U+FFFD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the prompt and answer columns. Without `answer` the data has none; the default column may be missing in a row."""

    prompt: str = "prompt"
    answer: str = ANSWER


class Source(Protocol):
    """Raw rows by number, of files, of a function or of a library."""

    digest: str
    """SHA-256 (hex) of the data, compared when a run is resumed."""
    generated: bool
    """True if rows are computed on demand."""

    def __len__(self) -> int: ...

    def raw(self, index: int) -> Mapping[str, Any]:
        """Return the columns of a row. Raises `DataError` that names the row's origin."""
        ...

    def origin(self, index: int) -> str: ...


class Dataset:
    """A window of a source as validated rows; access by number takes constant time."""

    def __init__(self, source: Source, *, fields: Fields, start: int = 0, limit: int | None = None, name: str = "the data set") -> None:
        rows = len(source)
        stop = rows if limit is None else min(rows, start + limit)
        if start >= stop:
            raise DataError(f"{name}: there is no row {start}, only {rows} rows" if rows else f"{name} is empty: expected a row per prompt")
        self._source, self._fields, self._window = source, fields, range(start, stop)

    @property
    def digest(self) -> str:
        return self._source.digest

    @property
    def generated(self) -> bool:
        return self._source.generated

    @property
    def names(self) -> list[str]:
        """Column names of the first row. Raises `DataError`."""
        return list(map(str, self._source.raw(self._window[0])))

    def __len__(self) -> int:
        return len(self._window)

    def __getitem__(self, index: int) -> Row:
        """Return row `index` of the window. Raises `DataError` that names the row's origin."""
        number = self._window[index]
        origin = self._source.origin(number)
        return make_row(self._source.raw(number), index=number - self._window.start, origin=origin, fields=self._fields)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def make_row(raw: Mapping[str, Any], *, index: int, origin: str, fields: Fields) -> Row:
    """Validate the columns of a row; those that JSON cannot represent go to `not_json`. Raises `DataError` that starts with `origin`."""
    raw, replaced = _well_formed(raw)
    for what, name, fix in (
        ("prompt", fields.prompt, ""),
        (ANSWER, fields.answer, '; set data.answer_field = "" if the data has no answers'),
    ):
        # The prompt column is required; of the answer columns, only one that the user has named.
        if name not in raw and name not in ("", ANSWER if fix else ""):
            hint = nearest(name, raw) or next((f"; did you mean {usual!r}?" for usual in USUAL[what] if usual in raw), "")
            raise DataError(f"{origin}: no field {name!r} (data.{what}_field){hint} (the row has: {', '.join(raw)}){fix}")
    prompt, messages = _prompt(raw[fields.prompt], origin=origin, name=fields.prompt)
    columns: dict[str, Any] = {}
    not_json: dict[str, str] = {}
    for name, value in raw.items():
        if name == fields.prompt != fields.answer:
            continue  # the prompt column, unless it is the answer column too
        try:
            columns[str(name)] = jsonable(value)
        except TypeError as error:
            not_json[str(name)] = str(error)
        except RecursionError:
            not_json[str(name)] = "values nested too deeply"
    if fields.answer not in ("", ANSWER) and fields.answer in columns:
        columns = with_facts(columns, {ANSWER: columns[fields.answer]})
    elif fields.answer and fields.answer in not_json:
        columns.pop(ANSWER, None)
        not_json[ANSWER] = not_json[fields.answer]
    return Row(index=index, prompt=prompt, messages=messages, columns=columns, origin=origin, not_json=not_json, replaced=replaced)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that a source cannot convert; `what` describes it like a type: "a map that contains a key twice"."""

    what: str


def _well_formed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Replace lone surrogates in a row by U+FFFD, and values nested too deeply by `Unreadable`; return it, and how many were replaced."""
    row: dict[str, Any] = {}
    total = 0
    for name, value in raw.items():
        try:
            made, replaced = well_formed_json({str(name): value})
        except RecursionError:
            made, replaced = {str(name): Unreadable("values nested too deeply")}, 0
        row.update(made)
        total += replaced
    return row, total


def jsonable(value: Any, *, lenient: bool = False) -> Any:
    """Return a value as JSON: dates as ISO text, decimals as numbers, NaN as null.

    Raises `TypeError` if JSON cannot represent the value; the message is the value's type. With `lenient`, its text is used instead.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float, Decimal)):
        try:
            return _number(value)
        except TypeError:
            if lenient:
                return str(value)
            raise
    if isinstance(value, Mapping):
        if not lenient and (other := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise TypeError(f"a dict with keys of type {type(other).__name__}")
        return {str(key): jsonable(inner, lenient=lenient) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner, lenient=lenient) for inner in value]
    if isinstance(value, (datetime, date, time)):
        return None if str(value) == "NaT" else value.isoformat()  # pandas' missing time
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return jsonable(_listed(value), lenient=lenient)
    if lenient:
        return [jsonable(inner, lenient=True) for inner in sorted(value, key=str)] if isinstance(value, (set, frozenset)) else str(value)
    raise TypeError(value.what if isinstance(value, Unreadable) else type(value).__name__)


def _listed(value: Any) -> Any:
    """Return a NumPy value as a Python value. `tolist` alone would convert times with nanoseconds to integers."""
    kind = str(getattr(value, "dtype", ""))
    return (value.astype(kind.replace("[ns]", "[us]")) if kind in ("datetime64[ns]", "timedelta64[ns]") else value).tolist()


def _number(value: int | float | Decimal) -> int | float | None:
    """Return a number that JSON represents without loss; None for NaN. Raises `TypeError` for infinity and for too many digits."""
    if isinstance(value, int):
        if abs(value) >= LONGEST_NUMBER:
            raise TypeError("an integer of more than 4,000 digits")
        return value
    if value.is_nan() if isinstance(value, Decimal) else isnan(value):
        return None
    if value in (float("inf"), float("-inf")):
        raise TypeError("an infinite number")
    if isinstance(value, float):
        return value
    if value.as_tuple().exponent == 0:
        return _number(int(value))
    number = float(value)
    if Decimal(repr(number)) != value:
        raise TypeError("a decimal with more digits than a float")
    return number


def _prompt(value: Any, *, origin: str, name: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    """Return the prompt as (text, None) or (None, messages). Raises `DataError` if it is empty or neither."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
        return value, None
    if isinstance(value, Unreadable):
        raise DataError(f"{origin}: field {name!r} contains {value.what}; expected text or a list of messages")
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{origin}: field {name!r} is {shown(value, most=SHOWN)}; expected text or a list of messages")
    if not value:
        raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
    try:
        return None, messages_of(jsonable(value, lenient=True))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: field {name!r}: {error}") from error


SUFFIXES = (".jsonl", ".parquet")


def open_files(source: str, *, base_dir: Path) -> Source:
    """Open a file, or the files of a folder or glob in the order of their names. Raises `DataError`, `MissingData` if there is none."""
    files = _find(source, base_dir)
    kinds = {file.suffix for file in files}
    if len(kinds) > 1:
        raise DataError(f"{source}: the folder contains both .jsonl and .parquet files; choose one kind, as {source.rstrip('/')}/*.jsonl")
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
        """Read and parse one line. Raises `DataError` that names the file and line."""
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
            raise DataError(f"{self.origin(index)}: the key {error} occurs twice in the row; remove one") from error
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
        """Add the positions of a file's rows, and its bytes to the digest. Raises `DataError` if it cannot be read or is pretty-printed."""
        start = 0
        try:
            with file.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    hasher.update(line)
                    text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    start += len(line) - len(text)
                    if content := text.strip():
                        if content in (b"[", b"{"):
                            raise DataError(f"{file}:{number}: a value that continues on the next line; write one JSON object per line")
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
            except (parquet.Refused, OSError) as error:
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
        """Add the rows of a file, memory-mapped. Raises `DataError` for a column that occurs twice, `Refused` for a damaged file."""
        table, first = parquet.rows(file), 0
        if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
            raise DataError(f"{file}: the column {twice[0]!r} occurs twice; rename or drop one of them")
        for batch in table.to_batches():
            if batch.num_rows:
                self._batches.append(batch)
                self._origins.append((file, first))
                first += batch.num_rows
                self._firsts.append(self._firsts[-1] + batch.num_rows)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises `KeyError` for a duplicate key, of which `dict` would silently use the last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise KeyError(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return row


def row_of(rows: pa.RecordBatch | pa.Table, index: int) -> dict[str, Any]:
    return {name: _value(column[index]) for name, column in zip(rows.schema.names, rows.columns, strict=True)}


def _value(scalar: pa.Scalar) -> Any:
    """Return an Arrow value as a Python value, maps as dicts; `Unreadable` if there is no such value."""
    try:
        return scalar.as_py(maps_as_pydicts="strict")
    except KeyError:
        return Unreadable("a map that contains a key twice")
    except UnicodeDecodeError:
        return Unreadable("text that is not UTF-8")
    except (pa.ArrowException, ValueError, OverflowError):
        return Unreadable(str(scalar.type))


def _find(source: str, base_dir: Path) -> list[Path]:
    """Return the files of a path, folder or glob, in the order of their names. Raises `MissingData` if there is none, `DataError`."""
    path = base_dir / Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            written = [*path.glob("*.arrow"), *path.glob("dataset_*.json")]
            hint = f"; for a folder written by `datasets`, write hf:{source}" if written else ""
            raise MissingData(f"{path}: the folder contains no .jsonl or .parquet files{hint}")
        return files
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not files:
        neighbours = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise MissingData(f"there is no file {path}{nearest(path.name, neighbours)}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(f"{file}: expected .jsonl or .parquet; read other formats in your own function, file.py:function")
    return files
