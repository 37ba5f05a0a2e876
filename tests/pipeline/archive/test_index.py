"""The index of a run equals a full read of its log, whatever was killed and while the run goes on; its pages cover each group once."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.index import run_index, segments
from penstock.pipeline.archive.index.queries import ORDERS, Filters, GroupList
from penstock.pipeline.archive.index.run_index import RunIndex
from penstock.pipeline.archive.index.segments import SampleCopy
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from tests.support.a_run import RUN, RecordBuilder, as_records
from tests.support.full_read import FullRead
from tests.support.page_records import log_with

pytestmark = pytest.mark.costly  # reads the log in full many times

STEPS = 12
TOPICS = ("ledger", "groups", "prompts", "dead-letters")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of two rows, of which three become one."""
    for module, name, value in ((run_index, "ROWS", 2), (segments, "ROWS", 2), (segments, "MERGED", 3), (segments, "GROUPS", 2)):
        monkeypatch.setattr(module, name, value)


def written() -> list[Outgoing]:
    """A run with filtered, stale, unfinished and repeated groups, and with damaged records of each topic."""
    builder = RecordBuilder(steps=STEPS)
    records: list[Outgoing] = []
    for number, record in enumerate(builder.whole()):
        records.append(record)
        if number % 9 == 0:
            records += [record, replace(record, value=bytes(record.value)[:-9])]
    late = builder.group([0.5, None, 1.0, 0.0], version=STEPS - 2)
    records[-6:-6] = [*late, *builder.group([0.25] * 4, version=STEPS)[:-1], builder.letter(offset=3)]
    return records


def in_any_order(records: list[Record], chance: random.Random) -> Iterator[Record]:
    """The records of the index's topics, in order within each topic."""
    waiting = {topic: [record for record in records if record.topic == f"{RUN}.{topic}"] for topic in TOPICS}
    while topics := [topic for topic, rest in waiting.items() if rest]:
        yield waiting[chance.choice(topics)].pop(0)


def killed(index: RunIndex) -> None:
    """Let go of the files as the end of a process does: nothing more is written."""
    for files in index._files.values():
        files.close()


def plain(table: pa.Table, *columns: str) -> list[dict[str, Any]]:
    names = [name for name in columns if name not in ("admitted", "scored", "committed")]
    return sorted(table.select(names).to_pylist(), key=lambda row: (row[names[0]], row.get("sample") or 0))


def same_as_a_full_read(index: RunIndex, log: MemoryLog) -> None:
    tables = FullRead(log, RUN)
    for full, indexed in ((tables.groups(), index.groups()), (tables.steps(), index.steps())):
        assert plain(indexed, *full.column_names) == plain(full, *full.column_names)


@pytest.mark.parametrize("seed", range(3))
def test_an_index_that_is_killed_and_continued_at_any_record_equals_a_full_read(seed: int, tmp_path: Path) -> None:
    chance, everything = random.Random(seed), written()
    lengths = sorted({*chance.sample(range(20, len(everything)), 3), len(everything)})
    for length in lengths:  # a running run, and the one that has ended
        records = as_records(everything[:length])
        index = RunIndex(RUN, directory=tmp_path, write=True)
        for record in in_any_order(records, chance):
            if chance.random() < 0.02:
                killed(index)
                index = RunIndex(RUN, directory=tmp_path, write=True)
                break  # the tail starts anew at the positions; `catch_up` is that
            try:
                index.add(record)
            except Unusable:
                continue
        log = log_with(everything[:length])
        index.catch_up(log)
        same_as_a_full_read(index, log)
        reader = RunIndex(RUN, directory=tmp_path, write=True)  # another process: the files are locked
        reader.catch_up(log)
        same_as_a_full_read(reader, log)
        (killed if chance.random() < 0.5 else RunIndex.close)(index)
    rebuilt = RunIndex(RUN)
    rebuilt.catch_up(log)
    continued = RunIndex(RUN, directory=tmp_path)
    continued.catch_up(log)
    assert plain(continued.groups(), *continued.groups().column_names) == plain(rebuilt.groups(), *rebuilt.groups().column_names)
    assert len(segments.Segments(tmp_path / "groups", None).paths) < 8  # of 12 pairs: files were merged


def test_files_that_were_merged_stay_for_the_queries_that_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, rows = segments.Segments(tmp_path, "1", parquet=True), pa.table({"a": [1, 2]})
    assert files.lock()
    for _ in range(2):
        files.append(rows, {})
    named = files.paths
    files.append(rows, {})
    assert len(files.paths) == 1 and pq.read_table(files.paths[0])["a"].to_pylist() == [1, 2] * 3
    assert all(path.exists() for path in named)
    files.close()
    monkeypatch.setattr(segments, "GRACE_S", 0.0)
    later = segments.Segments(tmp_path, "1", parquet=True)
    assert later.lock() and later.paths == files.paths and not any(path.exists() for path in named)


def test_files_of_another_run_of_that_name_do_not_count(tmp_path: Path) -> None:
    log = log_with(written())
    for created_ns in (1, 2):
        index = RunIndex(RUN, directory=tmp_path, created_ns=created_ns, write=True)
        assert index.positions.get((f"{RUN}.groups", 0), 0) == 0
        index.catch_up(log)
        index.close()
    same_as_a_full_read(index, log)


def test_a_copy_of_the_samples_that_grows_with_the_log_equals_a_full_read(tmp_path: Path) -> None:
    everything = written()
    for length in (60, 100, len(everything)):
        log = log_with(everything[:length])
        index = RunIndex(RUN)
        index.catch_up(log)
        waiting = [row["group"] for row in index.groups().to_pylist() if not row["samples"]]
        copy = SampleCopy(log, RUN, directory=tmp_path)
        rest = copy.catch_up(waiting, since_ms=0)
        table = pa.concat_tables([*(pq.read_table(path, schema=rest.schema) for path in copy.paths), rest])
        full = FullRead(log, RUN).samples()
        names = ["group", "sample", *(name for name in full.column_names if name not in ("group", "sample", "started", "ended"))]
        assert plain(table, *names) == plain(full, *names)
    assert copy.paths and not len(SampleCopy(log, RUN, directory=tmp_path).catch_up((), since_ms=0))


@pytest.mark.parametrize("merge", [False, True])
def test_a_copy_of_the_samples_has_each_row_once_when_the_disk_is_full_for_a_while(
    merge: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write, failures = log_with(written()), segments.Segments._write, [OSError("no space left on device")]

    def sometimes(self: segments.Segments, first: int, last: int, *given: Any) -> Any:
        if failures and merge == (first < last):
            raise failures.pop()
        return write(self, first, last, *given)

    whole = len(SampleCopy(log, RUN, directory=None).catch_up((), since_ms=0))
    monkeypatch.setattr(segments.Segments, "_write", sometimes)
    for full in (True, False):
        copy = SampleCopy(log, RUN, directory=tmp_path)
        rest = copy.catch_up((), since_ms=0)
        assert sum(pq.read_metadata(path).num_rows for path in copy.paths) + len(rest) == whole and not failures
        assert bool(copy.paths) == (merge or not full)


@pytest.fixture
def listed() -> GroupList:
    index = RunIndex(RUN)
    index.catch_up(log_with(written()))
    return GroupList(index.groups(), dead_letters=index.dead_letters)


@pytest.mark.parametrize("order", ORDERS)
def test_pages_of_any_order_hold_each_group_once(listed: GroupList, order: str) -> None:
    cursor, rows = None, list[dict[str, Any]]()
    while True:
        page = listed.page(order=order, after=cursor, limit=4)
        rows += page["rows"]
        if (cursor := page["next"]) is None:
            break
    assert sorted(row["group"] for row in rows) == sorted(listed.table["group"].to_pylist())
    column, descending = ORDERS[order]
    values = [row[column] for row in rows if row.get(column) is not None]
    assert values == sorted(values, reverse=descending)
    assert page["matching"] == page["groups"] == len(rows)


@pytest.mark.parametrize(
    ("where", "condition"),
    [
        (Filters(statuses=("trained",), reward=(0.2, 0.6)), lambda row: row["status"] == "trained" and 0.2 <= row["reward_mean"] <= 0.6),
        (Filters(step=(3, None)), lambda row: row["step"] is not None and row["step"] >= 3),
        (Filters(row=3), lambda row: row["row"] == 3),
    ],
)
def test_a_filter_selects_the_groups_for_which_its_conditions_hold(listed: GroupList, where: Filters, condition: Any) -> None:
    everything = listed.page(limit=1000)["rows"]
    page = listed.page(where, limit=1000)
    assert page["rows"] == [row for row in everything if condition(row)]
    assert page["matching"] == len(page["rows"])


@pytest.mark.parametrize("cursor", ["", "x", "1.0:", ":4"])
def test_a_cursor_that_no_page_gave_is_refused(listed: GroupList, cursor: str) -> None:
    if cursor:
        with pytest.raises(ValueError, match="expected the value of `next` from a page"):
            listed.page(after=cursor)
