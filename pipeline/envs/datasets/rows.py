"""One row of a data set, checked: a prompt (text or messages) and the columns for the reward functions.

The rule: a row that cannot be used is an error with its origin (`file:line`), never left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from math import isnan
from typing import Any, Protocol

from penstock.pipeline.config.plugins import nearest

RESERVED = ("prompts", "completions")
SHOWN = 60
"""Characters of a value that an error shows."""


class DataError(ValueError):
    """Data that cannot be used; one line that begins with the origin."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the prompt and answer columns. An empty `answer` means that the data has none."""

    prompt: str = "prompt"
    answer: str = "answer"


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
    for name in (fields.prompt, fields.answer):
        if name and name not in raw:
            raise DataError(f"{origin}: no field {name!r}{nearest(name, map(str, raw))} (the row has: {', '.join(map(str, raw))})")
    prompt, messages = _prompt(raw[fields.prompt], origin=origin, name=fields.prompt)
    columns: dict[str, Any] = {}
    for name, value in raw.items():
        if name == fields.prompt:
            continue
        if name in RESERVED:
            raise DataError(f"{origin}: a column cannot be called {name!r}, which reward functions get from the run; rename it")
        try:
            columns[str(name)] = jsonable(value)
        except TypeError as error:
            raise DataError(f"{origin}: column {name!r} holds {error}, which is no JSON value; leave that column out") from error
    if fields.answer:
        columns["answer"] = jsonable(raw[fields.answer])
    return Row(index=index, prompt=prompt, messages=messages, columns=columns, origin=origin)


def jsonable(value: Any, *, lenient: bool = False) -> Any:
    """The value as JSON knows it: dates as ISO text, decimals as text, not-a-number as null.

    Raises:
        TypeError: names a type without a JSON form; with `lenient`, its text is taken instead.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if isnan(value):
            return None
        if abs(value) == float("inf") and not lenient:
            raise TypeError("an infinite number")
        return value if abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner, lenient=lenient) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(inner, lenient=lenient) for inner in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return jsonable(value.tolist(), lenient=lenient)
    if lenient:
        return [jsonable(inner, lenient=True) for inner in sorted(value, key=str)] if isinstance(value, (set, frozenset)) else str(value)
    raise TypeError(f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    """A value as its file has it: `null`, not `None`."""
    text = "null" if value is None else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _prompt(value: Any, *, origin: str, name: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
        return value, None
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{origin}: field {name!r} is {_shown(value)}; expected text or a list of messages")
    if not value:
        raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(f"{origin}: field {name!r} has a message without text in 'role' and 'content': {str(message)[:80]!r}")
    if not any(message["content"].strip() for message in value):
        raise DataError(f"{origin}: the prompt (field {name!r}) is empty")
    messages = [{key: jsonable(inner, lenient=True) for key, inner in message.items() if inner is not None} for message in value]
    return None, messages
