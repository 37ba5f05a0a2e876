"""The index of a run with very many groups: time to make it from the log, and of what lists, filters and SQL do with it.

    python -m benchmarks topics_overhead index
    python -m benchmarks topics_overhead index --groups 1000000 --encoded 5000

`--encoded` groups of four samples are made by the product's codecs, each with its prompt and step, and folded into an index as the tracker
does. Their rows are then repeated with other numbers and rewards up to `--groups`, and written by the product's writer of segments. Prints
the median of five calls, and the memory of this process.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.support.command import parser_of, with_numbers
from penstock.pipeline.archive.database import Stored, compute, prepare
from penstock.pipeline.archive.index.group_rows import GROUPS
from penstock.pipeline.archive.index.queries import Filters, GroupList
from penstock.pipeline.archive.index.run_index import RunIndex
from penstock.pipeline.archive.index.segments import Segments
from penstock.topics.wire.record import Record
from tests.support.a_run import RUN, RecordBuilder, as_records

REPEATS = 5
BLOCK = 65_536


def median_ms(function: Callable[[], Any]) -> str:
    """Median time of a call, and of its CPU time: what it takes on a quiet machine."""
    times = []
    for _ in range(REPEATS):
        started, cpu = time.perf_counter(), time.process_time()
        function()
        times.append((1000 * (time.perf_counter() - started), 1000 * (time.process_time() - cpu)))
    elapsed, computed = (statistics.median(column) for column in zip(*times, strict=True))
    return f"{elapsed:.1f} ms, {computed:.1f} ms of CPU time"


def folded(records: Sequence[Record]) -> tuple[pa.Table, float]:
    """(rows of these records, CPU seconds to fold them)."""
    index, started = RunIndex(RUN), time.process_time()
    for record in records:
        index.add(record)
    return index.groups(ended=True), time.process_time() - started


def repeated(table: pa.Table, first: int, count: int, *, partitions: int = 1, per_step: int = 8) -> pa.Table:
    """Rows of a table with other group numbers, steps and rewards."""
    numbers, chance = np.arange(first, first + count), np.random.default_rng(first)
    taken = table.take(pa.array(numbers % len(table)))
    columns = {
        "group": numbers, "row": numbers % 10_000, "partition": numbers % partitions, "offset": numbers // partitions,
        "step": numbers // per_step, "reward_mean": chance.random(count),
        "tokens": chance.integers(4, 400, count),
    }  # fmt: skip
    for name, values in columns.items():
        taken = taken.set_column(GROUPS.get_field_index(name), GROUPS.field(name), pa.array(values, GROUPS.field(name).type))
    return taken


def main(arguments: Sequence[str]) -> int:
    """Make the index, and measure what is done with it."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, groups=1_000_000, encoded=2_000)
    options = parser.parse_args(arguments)
    records = as_records(list(RecordBuilder(steps=options.encoded // 2).whole()))
    table, seconds = folded(records)
    print(f"{len(table):,} groups folded from the records: {1000 * seconds / len(table):.3f} ms a group")
    with tempfile.TemporaryDirectory() as folder:
        directory, process = Path(folder), psutil.Process()
        files = Segments(directory, "1")
        files.lock()
        for first in range(0, options.groups, BLOCK):
            files.append(repeated(table, first, min(BLOCK, options.groups - first)), {"positions": []})
        files.close()
        size = sum(path.stat().st_size for path in files.paths)
        print(f"{options.groups:,} groups in {len(files.paths)} files, {size / 2**20:,.0f} MiB")
        del files, table, records
        before = process.memory_info().rss - process.memory_info().shared
        opened, cpu = time.perf_counter(), time.process_time()
        listed = GroupList(pa.concat_tables(Segments(directory, "1").tables))
        first_page = listed.page()
        elapsed, computed = (1000 * (now - then) for now, then in ((time.perf_counter(), opened), (time.process_time(), cpu)))
        print(f"opened, first page of {len(first_page['rows'])}: {elapsed:.1f} ms, {computed:.1f} ms of CPU time")
        narrow = Filters(statuses=("trained",), reward=(0.0, 0.1))
        cases: dict[str, Callable[[], Any]] = {
            "next page": lambda: listed.page(after=first_page["next"]),
            "worst first, the order is sorted": lambda: (listed._orders.pop("worst", None), listed.page(order="worst")),
            "worst first, next page": lambda: listed.page(order="worst", after=first_page["next"]),
            "filter of two columns": lambda: listed.page(narrow),
        }
        for name, case in cases.items():
            print(f"{name}: {median_ms(case)}")
        after = process.memory_info().rss - process.memory_info().shared
        print(f"memory of this process, files not counted: {(after - before) / 2**20:,.0f} MiB more")
        stored = {"g": Stored(files=Segments(directory, "1").paths, rest=GROUPS.empty_table())}
        for query in ("select status, count(*) from g group by 1", "select count(*), avg(reward_mean) from g where step > 1000"):
            times = []
            for _ in range(REPEATS):
                prepare()
                time.sleep(5)  # the process has started: a server has one ready
                started = time.perf_counter()
                compute(stored, (), query)
                times.append(1000 * (time.perf_counter() - started))
            print(f"SQL, {query}: {statistics.median(times):.0f} ms")
    return 0
