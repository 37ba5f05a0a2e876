"""The clocks of a run: work between signs of life counts, a pause does not, in whatever order the signs are read."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.inspect.report.summary import summarise
from penstock.pipeline.inspect.run_view_types import PAUSE_S, WorkingTime
from tests.support.a_run import RecordBuilder, view_of


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60))
def test_the_order_of_the_signs_does_not_matter(moments: list[int]) -> None:
    worked, in_order = WorkingTime(), sorted(moments)
    for moment in moments:
        worked.add(float(moment))
    gaps = [later - earlier for earlier, later in itertools.pairwise(in_order)]
    expected = sum(gap for gap in gaps if gap <= PAUSE_S)
    assert worked.between(0.0, 2000.0) == pytest.approx(expected)
    assert worked.until(0.0) == pytest.approx(expected)


def test_what_is_under_way_counts_on_until_it_must_be_a_pause() -> None:
    worked = WorkingTime()
    for moment in (0.0, 30.0):
        worked.add(moment)
    assert worked.until(50.0) == 50.0
    assert worked.until(500.0) == 30.0
    assert worked.between(10.0, 20.0) == 10.0
    assert worked.between(None, 20.0) is None


@given(st.permutations([*(("sign", moment) for moment in (0.0, 2.0, 4.0, 30.0, 32.0, 60.0)), ("stop", 4.0)]))
def test_a_pause_after_a_stop_is_none_of_the_work_however_short(records: list[tuple[str, float]]) -> None:
    worked = WorkingTime()
    for what, moment in records:
        worked.add(moment) if what == "sign" else worked.stop(moment)
    assert worked.between(0.0, 100.0) == 4.0 + 30.0
    assert worked.until(70.0) == 4.0 + 30.0 + 10.0
    worked.stop(60.0)
    assert worked.until(70.0) == 4.0 + 30.0


@pytest.mark.parametrize(("again", "worked_s"), [("b", 3.0 + 3.0), ("a", 3.0 + 30.0 + 3.0)])
def test_a_silence_that_a_restarted_worker_ends_is_a_pause_and_one_that_goes_on_is_none(again: str, worked_s: float) -> None:
    builder, records = RecordBuilder(steps=4), []
    for incarnation, silence_s in (("a", 0.0), (again, 30.0)):
        builder.now_s += silence_s
        for _ in range(4):
            records.append(builder.measured_by("scorer-0", incarnation=incarnation))
            builder.now_s += 1.0
        builder.now_s -= 1.0
    assert view_of(records).worked.between(0.0, builder.now_s) == pytest.approx(worked_s)


def test_start_training_and_end_add_up_to_the_time_of_a_run_that_was_paused_for_an_hour() -> None:
    builder = RecordBuilder(steps=4)
    records = [builder.record()]
    builder.now_s += 10.0
    records += [builder.opened(), builder.version(0)]
    for step in range(4):
        if step == 2:
            builder.now_s += 3600.0
        records += builder.round(step)
    builder.now_s += 5.0
    records.append(builder.closed())
    time = summarise(view_of(records))["time"]
    assert (time["start_s"], time["train_s"], time["end_s"]) == (10.0, 4.0, 5.0)
    assert time["wall_s"] == 19.0
    assert time["paused_s"] == 3600.0
