"""Records as rows: groups with and without the time of their reward functions lie in one table and come back byte for byte."""

from dataclasses import replace

import pytest

from penstock.pipeline.archive.layout import KINDS
from penstock.pipeline.archive.rows import to_table
from penstock.topics import groups
from penstock.topics.wire.record import Record
from tests.support.a_run import RUN, RecordBuilder, stored, with_group


def record_of(offset: int, *, reward_ns: int | None) -> Record:
    """A group's record; without the time as an earlier release wrote all of them."""
    written = stored(RecordBuilder().group([0.0, 1.0], version=0)[-1], offset)
    return with_group(written, replace(groups.decode(written.value), reward_ns=reward_ns))[0]


@pytest.mark.parametrize("times", [(None, 7, None), (7, 8), (None, None)])
def test_groups_with_and_without_a_time_are_rows_of_one_table(times: tuple[int | None, ...]) -> None:
    records = [record_of(offset, reward_ns=time) for offset, time in enumerate(times)]
    table = to_table(KINDS["groups"], records, run=RUN)
    assert table["reward_ns"].to_pylist() == list(times)
    assert table["raw"].null_count == len(times), "the row alone gives back the bytes"
