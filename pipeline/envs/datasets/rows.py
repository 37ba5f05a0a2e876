"""One row of a data set, checked: a prompt (text or messages) and the columns for the reward functions.

The rule: a row that cannot be used is an error with its origin (`file:line`), never left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from math import isnan
from typing import Any, Protocol

from penstock.infra.errors import ConfigError
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.envs.datasets.answers import with_facts
from penstock.pipeline.envs.datasets.messages import messages_of
from penstock.topics.wire.well_formed import well_formed_json

ANSWER = "answer"
"""The column of reference answers, as reward functions get it and where the configuration names no other."""
LONGEST_NUMBER = 10**4000
"""Python reads and writes no integer of more than 4,300 digits as JSON."""
SHOWN = 60
"""Characters of a value that an error shows."""


class DataError(ValueError):
    """Data that cannot be used; one line that begins with the origin."""


class MissingData(DataError, ConfigError):
    """A source that is not there: the configuration is wrong, not the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, from which the feeder makes a prompt. Either `prompt` or `messages` is None."""

    index: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    columns: dict[str, Any]
    """JSON values for the reward functions: the answer as "answer", and every other column except the prompt."""
    origin: str
    """Source of the row, for error messages: `train.jsonl:17`."""
    without_json: dict[str, str] = field(default_factory=dict)
    """Columns whose value has no JSON form, and what they hold ("bytes"): no reward function gets them."""
    replaced: int = 0
    """Lone surrogates in its texts; U+FFFD is in their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the prompt and answer columns. An empty `answer` means that the data has none; a row need not have the usual one."""

    prompt: str = "prompt"
    answer: str = ANSWER


class Source(Protocol):
    """Raw rows by number, as the readers of this package return them."""

    digest: str
    """SHA-256 (hex) of the data behind the rows, by which a restarted feeder recognises the same data."""
    generated: bool
    """True if rows are computed on demand, so that none can be damaged."""

    def __len__(self) -> int: ...

    def raw(self, index: int) -> Mapping[str, Any]:
        """The row's columns. Raises `DataError` with the origin."""
        ...

    def origin(self, index: int) -> str:
        """The row's origin, for error messages."""
        ...


class Dataset:
    """A window of a source, as checked rows; access by number takes constant time."""

    def __init__(self, source: Source, *, fields: Fields, start: int = 0, limit: int | None = None, name: str = "the data set") -> None:
        rows = len(source)
        stop = rows if limit is None else min(rows, start + limit)
        if start >= stop:
            raise DataError(
                f"{name}: no rows from {start} on (it has {rows})" if rows else f"{name} is empty: a row is wanted for each prompt"
            )
        self._source, self._fields, self._window = source, fields, range(start, stop)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the data behind the rows."""
        return self._source.digest

    @property
    def generated(self) -> bool:
        """True if rows are computed on demand."""
        return self._source.generated

    @property
    def names(self) -> list[str]:
        """Names of the first row's columns, as the source has them. Raises `DataError`."""
        return list(map(str, self._source.raw(self._window[0])))

    def __len__(self) -> int:
        return len(self._window)

    def __getitem__(self, index: int) -> Row:
        """The row with this number, counted from the start of the window. Raises `DataError` with its origin."""
        at = self._window[index]
        return make_row(self._source.raw(at), index=at - self._window.start, origin=self._source.origin(at), fields=self._fields)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def make_row(raw: Mapping[str, Any], *, index: int, origin: str, fields: Fields) -> Row:
    """A checked row from raw columns. Raises `DataError` with the origin."""
    raw, replaced = _well_formed(raw)
    for name, none in ((fields.prompt, ""), (fields.answer, '; set data.answer_field = "" if the data has no answers')):
        if name not in raw and name not in ("", ANSWER if none else ""):
            raise DataError(f"{origin}: no field {name!r}{nearest(name, map(str, raw))} (the row has: {', '.join(map(str, raw))}){none}")
    prompt, messages = _prompt(raw[fields.prompt], origin=origin, name=fields.prompt)
    columns: dict[str, Any] = {}
    without_json: dict[str, str] = {}
    for name, value in raw.items():
        if name == fields.prompt != fields.answer:
            continue
        try:
            columns[str(name)] = jsonable(value)
        except TypeError as error:
            without_json[str(name)] = str(error)
        except RecursionError:
            without_json[str(name)] = "values nested too deeply"
    if fields.answer not in ("", ANSWER) and fields.answer in columns:
        columns = with_facts(columns, {ANSWER: columns[fields.answer]})
    elif fields.answer and fields.answer in without_json:
        columns.pop(ANSWER, None)
        without_json[ANSWER] = without_json[fields.answer]
    return Row(index=index, prompt=prompt, messages=messages, columns=columns, origin=origin, without_json=without_json, replaced=replaced)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that a source cannot give; `what` names it as a type is named: "a map with a key twice"."""

    what: str


def _well_formed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """A row without lone surrogates, and how many it had; each value that is nested too deeply is `Unreadable`."""
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
    """The value as JSON has it: dates as ISO text, decimals as numbers, not-a-number as null.

    Raises:
        TypeError: names what has no JSON form of the same value; with `lenient`, its text is taken instead.
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
    """A numpy value as Python has it; numpy's own method makes integers of times with nanoseconds."""
    kind = str(getattr(value, "dtype", ""))
    return (value.astype(kind.replace("[ns]", "[us]")) if kind in ("datetime64[ns]", "timedelta64[ns]") else value).tolist()


def _number(value: int | float | Decimal) -> int | float | None:
    """A number that JSON holds without loss; None for not-a-number. Raises `TypeError`."""
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
        raise TypeError("a decimal of more digits than a number keeps")
    return number


def _shown(value: Any) -> str:
    """A value as its file has it: `null`, not `None`."""
    text = "null" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _prompt(value: Any, *, origin: str, name: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
        return value, None
    if isinstance(value, Unreadable):
        raise DataError(f"{origin}: field {name!r} holds {value.what}; expected text or a list of messages")
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{origin}: field {name!r} is {_shown(value)}; expected text or a list of messages")
    if not value:
        raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
    try:
        return None, messages_of(jsonable(value, lenient=True))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: field {name!r}: {error}") from error
