"""Ten thousand damaged records of every kind: each is refused in time and in little memory, or says what the genuine one says."""

import os
import pickle
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock.topics import groups, rollouts, weights
from penstock.topics.wire.errors import NewerSchema, Unusable
from penstock.topics.wire.record import Record
from tests.support.mutations import DAMAGE, HARMLESS, signed
from tests.support.strategies import EXAMPLES, MODULES, a_group, a_rollout, record_of

EACH = 30
"""Of each damage of each kind of record, with and without a checksum that fits: 14 x 15 x 2 x 30 > 10,000."""
MEMORY_BYTES = 64 << 20
CPU_S = 60
RECORDS_S = 20.0
"""Of CPU time for `EACH` records."""


def genuine() -> dict[str, tuple[Record, Record, Callable[[Record], Any]]]:
    """Kind -> two records and how such a record is read."""
    found: dict[str, tuple[Record, Record, Callable[[Record], Any]]] = {}
    for name, module in MODULES.items():
        record = record_of(module.headers(EXAMPLES[name], run="r"), module.encode(EXAMPLES[name]))
        found[name] = (record, record, partial(module.read, run="r"))
    another = a_rollout(group=4, tokens=7)
    other = record_of(rollouts.headers(another, run="r"), rollouts.encode(another))
    found["rollouts"] = (found["rollouts"][0], other, found["rollouts"][2])
    several = EXAMPLES["several samples"]
    record = record_of(rollouts.headers(*several, run="r"), rollouts.encode(*several))
    found["several samples"] = (record, found["rollouts"][0], partial(rollouts.read_all, run="r"))
    two = [record_of(*groups.encode_parts(group, run="r", worker="w")[0]) for group in (a_group(), a_group(group=4, samples=2))]
    found["groups"] = (two[0], two[1], partial(groups.read, run="r"))
    chunk = EXAMPLES["weights-chunk"]
    record = record_of(weights.chunk_headers(chunk, run="r"), weights.encode_chunk(chunk))
    found["weights-chunk"] = (record, found["weights"][0], partial(weights.read_chunk, run="r"))
    for name in set(MODULES) - {"rollouts"}:
        found[name] = (found[name][0], found["groups"][0], found[name][2])
    return found


def readings() -> Counter[tuple[str, str]]:
    """Read all of them; gives how often each damage had each fate. Raises AssertionError for what may not be."""
    rng, table = random.Random(4), Counter[tuple[str, str]]()
    records = genuine()
    plain = {name: read(record) for name, (record, _, read) in records.items()}
    with open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    for name, (record, other, read) in records.items():
        for damage, mutate in (DAMAGE | HARMLESS).items():
            for again in (False, True):
                began = time.thread_time()
                for _ in range(EACH):
                    spoiled = mutate(record, other, rng)
                    believed = fate(read, signed(spoiled) if again else spoiled)
                    sort = damage if not again else f"{damage}, signed again"
                    same = believed == plain[name]
                    table[sort, believed if isinstance(believed, str) else "same" if same else "another"] += 1
                    if not again:
                        assert same or (damage in DAMAGE and isinstance(believed, str)), (name, damage, believed)
                assert time.thread_time() - began < RECORDS_S, (name, damage)
    return table


def fate(read: Callable[[Record], Any], record: Record) -> Any:
    """What is read, or the kind of the refusal."""
    try:
        return read(record)
    except Unusable as error:
        assert "\n" not in str(error)  # noqa: PT017
        cause: BaseException | None = error
        while cause is not None:
            assert not isinstance(cause, MemoryError), f"{record} asks for more than {MEMORY_BYTES} bytes"
            cause = cause.__cause__
        return error.kind
    except NewerSchema:
        return "newer"


@pytest.mark.costly
def test_ten_thousand_damaged_records_are_refused_in_time_and_in_little_memory() -> None:
    table = in_a_process(readings)
    assert sum(table.values()) > 10_000
    unsigned = {sort: fates for sort, fates in by_sort(table).items() if sort in DAMAGE}
    assert set(unsigned) == set(DAMAGE)
    assert all(fates["another"] == fates["newer"] == 0 for fates in unsigned.values())
    assert sum(fates["checksum"] for fates in unsigned.values()) > 3_000
    assert sum(fates["undecodable"] for sort, fates in by_sort(table).items() if "signed again" in sort) > 2_000
    for sort, fates in sorted(by_sort(table).items()):  # `pytest -s` shows it
        print(f"{sort:34} " + "  ".join(f"{count} {what}" for what, count in sorted(fates.items())))


def by_sort(table: Counter[tuple[str, str]]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for (sort, what), count in table.items():
        found.setdefault(sort, Counter())[what] += count
    return found


def in_a_process(work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of its own; its end by a signal is a failure of the test."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            signal.alarm(5 * CPU_S)
            with os.fdopen(writer, "wb") as file:
                try:
                    pickle.dump((work(), None), file)
                except AssertionError as error:
                    pickle.dump((None, str(error)[:2000]), file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"the reading process ended with {status}"
    found, failure = pickle.loads(data)
    assert failure is None, failure
    return found
