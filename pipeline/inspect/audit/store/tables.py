"""Packed tables of facts: a million groups take a few hundred megabytes.

Rows are in order of arrival; the first row of a group counts.
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from penstock.topics.wire.record import RecordId

_DTYPES = {"H": "<u2", "I": "<u4", "q": "<i8"}


class GroupFact(Protocol):
    """Attributes of every fact in a table."""

    @property
    def where(self) -> RecordId:
        """Its record."""
        ...

    @property
    def group(self) -> int:
        """The number of its group."""
        ...

    @property
    def body(self) -> bytes:
        """Hash of the record's payload."""
        ...


Fact = TypeVar("Fact", bound=GroupFact)


class Interned:
    """Recurring values, each stored once under a number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Table(Generic[Fact]):
    """Facts of one kind, about one group each.

    `columns` has a struct code for each name, `group` among them; `pack` and `unpack` turn a fact into a row's values and back.
    """

    def __init__(self, columns: Mapping[str, str], pack: Callable[[Fact], tuple[object, ...]], unpack: Callable[..., Fact]) -> None:
        self._pack, self._unpack, self._rows = pack, unpack, bytearray()
        self._struct = struct.Struct("<" + "".join(columns.values()))
        self._dtype = np.dtype([(name, _DTYPES.get(code, f"V{code[:-1]}")) for name, code in columns.items()])
        self._first: Index[Fact] | None = None

    def add(self, fact: Fact) -> None:
        """Append a fact."""
        self._rows += self._struct.pack(*self._pack(fact))
        self._first = None

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows) // self._struct.size

    def __getitem__(self, row: int) -> Fact:
        """The fact of a row."""
        return self._unpack(*self._struct.unpack_from(self._rows, row * self._struct.size))

    def __iter__(self) -> Iterator[Fact]:
        """All facts in order of arrival."""
        return (self[row] for row in range(len(self)))

    def column(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """A copy of the numbers of a column."""
        return np.frombuffer(self._rows, self._dtype)[name].astype(np.int64)

    @property
    def first(self) -> "Index[Fact]":
        """Group -> its first fact."""
        if self._first is None:
            self._first = Index(self)
        return self._first

    def later(self) -> Iterator[Fact]:
        """The facts of groups that have an earlier one."""
        is_first = np.zeros(len(self), np.bool_)
        is_first[np.asarray(self.first.rows)] = True
        return (self[row] for row in np.flatnonzero(~is_first).tolist())

    def at(self, where: RecordId) -> Iterator[Fact]:
        """The facts of a record; scans all rows."""
        rows = (self.column("partition") == where.partition) & (self.column("offset") == where.offset)
        return (self[row] for row in np.flatnonzero(rows).tolist())

    def drop_repeats(self) -> int:
        """Remove facts of records that are identical to the first of their group in their partition; return their number."""
        twice = {fact.group for fact in self.later()}
        if not twice:
            return 0
        bodies: dict[tuple[int, int], bytes] = {}
        repeats = []
        for row in np.flatnonzero(np.isin(self.column("group"), list(twice))).tolist():
            fact = self[row]
            key = (fact.where.partition, fact.group)
            if bodies.get(key) == fact.body:
                repeats.append(row)
            bodies.setdefault(key, fact.body)
        self._rows = bytearray(np.delete(np.frombuffer(self._rows, self._dtype), repeats).tobytes())
        self._first = None
        return len(repeats)


class Index(Mapping[int, Fact]):
    """Group -> its first fact, by ascending group; stores two numbers for a group."""

    def __init__(self, table: Table[Fact]) -> None:
        self._table = table
        groups, rows = np.unique(table.column("group"), return_index=True)
        self.groups, self.rows = groups.data, rows.astype(np.uint32).data

    def __len__(self) -> int:
        """Count the groups."""
        return len(self.groups)

    def __iter__(self) -> Iterator[int]:
        """The groups, ascending."""
        return iter(self.groups)

    def __contains__(self, group: object) -> bool:
        """True if there is a fact of a group."""
        return isinstance(group, int) and self._row(group) is not None

    def __getitem__(self, group: int) -> Fact:
        """A group's first fact."""
        if (row := self._row(group)) is None:
            raise KeyError(group)
        return self._table[row]

    def get(self, group: int, default: object = None) -> Fact | None:  # type: ignore[override]
        """A group's first fact, or None."""
        row = self._row(group)
        return None if row is None else self._table[row]

    def column(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """A column's number of each group, by ascending group."""
        return self._table.column(name)[np.asarray(self.rows)]

    def _row(self, group: int) -> int | None:
        position = bisect_left(self.groups, group)
        return self.rows[position] if position < len(self.groups) and self.groups[position] == group else None
