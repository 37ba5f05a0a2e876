"""Records at the very offsets they had: what a partition's writer has to do, step by step, so that the broker numbers them as before.

The rule: a gap of one offset is the mark of a transaction that commits the records before it; a longer one is a transaction that is
aborted after as many fillers as it has offsets, less its mark; what lies before the first kept offset is filled and deleted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.topics.wire.record import Record

PIECE_RECORDS = 500
PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is written to one partition before it is the turn of the others; in this order."""

    plain: tuple[Record, ...] = ()
    together: tuple[Record, ...] = ()
    """Committed in one transaction, whose mark takes one offset more."""
    aborted: int = 0
    """Fillers of a transaction that is aborted; its mark takes one offset more."""


def first_kept(begin: int, first: int | None, end: int) -> int:
    """The offset before which everything is filled and deleted: `begin`, or one more where nothing else can take a single offset.

    Example:
        first_kept(0, 1, 9)  # -> 1
    """
    gap = (end if first is None else first) - begin
    return begin + (gap == 1)


def steps(records: Iterable[Record], *, begin: int, end: int) -> Iterator[Step]:
    """The steps that lay `records`, in the order of their offsets, from `begin` to the end of the partition.

    Raises `ValueError` for records out of order.
    """
    held: list[Record] = []
    at, size = begin, 0
    for record in records:
        if record.offset < at:
            raise ValueError(f"{record.topic}/{record.partition}: offset {record.offset} stands after offset {at - 1}")
        if gap := record.offset - at:
            yield _step(held, gap)
            held, size = [], 0
        elif len(held) >= PIECE_RECORDS or size >= PIECE_BYTES:
            yield Step(plain=tuple(held))
            held, size = [], 0
        held.append(record)
        size += len(record.value)
        at = record.offset + 1
    if held or end > at:
        yield _step(held, end - at)


def _step(held: list[Record], gap: int) -> Step:
    if gap == 1:
        assert held, "a single offset without a record before it"
        return Step(together=tuple(held))
    return Step(plain=tuple(held), aborted=max(0, gap - 1))
