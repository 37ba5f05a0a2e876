"""Finds where a late joiner starts to read: near the ends of ledger and manifests, so that joining costs the same at any time.

The longest gapless sequence of records near the end is the run's, so that a single foreign record changes nothing. If the end lacks a
manifest of the newest version's chain, more is read, and at last everything.
"""

from collections.abc import Callable

from penstock.infra.log import Log, Partition
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.topic_reader import between
from penstock.topics import ledger, weights
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

NEAR = 256
"""Offsets at the end of a partition that are read first."""
FETCH_BYTES = 256 << 10
"""Fetched of these partitions at once: most records after the first manifest are not needed."""
FIRST = 16
"""Offsets at its beginning among which the manifest of version 0 is."""


def read_ends(log: Log, run: str, state: LedgerState) -> dict[Partition, int]:
    """Fill a new `state` from the end of the run's log; returns the start offsets in ledger and manifests."""
    book, manifests = (f"{run}.ledger", 0), (f"{run}.weights", weights.MANIFESTS)
    return {manifests: _read_manifests(log, manifests, state), book: _read_ledger(log, book, state)}


def _read_ledger(log: Log, at: Partition, state: LedgerState) -> int:
    start, end = log.beginning_offsets([at])[at], log.end_offsets([at])[at]
    if end - start > 2 * NEAR:
        records = list(between(log, at, end - NEAR, end, fetch_bytes=FETCH_BYTES))
        if (first := _first_of_longest(records, lambda record: ledger.read(record, run=state.run)[1].seq)) is not None:
            state.last_seq = first[1] - 1
            _apply(state, records[first[0] :])
            return end
    return start


def _read_manifests(log: Log, at: Partition, state: LedgerState) -> int:
    start, end = log.beginning_offsets([at])[at], log.end_offsets([at])[at]
    span, ledger_state = NEAR, LedgerState(state.run)
    _apply(ledger_state, list(between(log, at, start, min(end, start + FIRST), fetch_bytes=FETCH_BYTES)))
    origin = ledger_state.manifests.get(0)
    while origin is not None and end - start > 2 * span:
        records = list(between(log, at, end - span, end, fetch_bytes=FETCH_BYTES))
        first = _first_of_longest(records, lambda record: weights.read(record, run=state.run)[1].version)
        ledger_state = LedgerState(state.run)
        ledger_state.add(origin)
        if first is not None:
            ledger_state.newest_version = first[1] - 1
            _apply(ledger_state, records[first[0] :])
            if _is_whole(ledger_state):
                for _, manifest in sorted(ledger_state.manifests.items()):
                    state.add(manifest)
                return end
        span *= 4
    return start


def _is_whole(ledger_state: LedgerState) -> bool:
    """True if all manifests of the newest version's chain are present.

    Version 0 may have been sent again later, but not after another version is out: adapters go with its manifest near the beginning.
    """
    try:
        first, *others = weights.chain(ledger_state.manifests, ledger_state.newest_version)
    except ValueError:
        return False
    return first.version > 0 or (bool(others) and others[0].begins_chain)


def _first_of_longest(records: list[Record], number_of: Callable[[Record], int]) -> tuple[int, int] | None:
    """Index and number of the first record of the longest sequence of numbers without a gap; None if no record has one."""
    numbers = list[tuple[int, int]]()
    for index, record in enumerate(records):
        try:
            numbers.append((index, number_of(record)))
        except Unusable:
            continue
    lengths = dict[int, int]()
    for _, number in reversed(numbers):
        lengths[number] = max(lengths.get(number, 0), 1 + lengths.get(number + 1, 0))
    return max(numbers, key=lambda pair: (lengths[pair[1]], -pair[0]), default=None)


def _apply(state: LedgerState, records: list[Record]) -> None:
    for record in records:
        try:
            state.apply(record)
        except Unusable:
            continue
