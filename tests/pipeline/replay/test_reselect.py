"""Plans made anew from recorded groups: which are taken, and in which order."""

from collections.abc import Iterable

import pytest

from penstock.pipeline.replay.overrides import what_if
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.steps import Selection
from penstock.topics.wire.record import Outgoing
from tests.support.a_run import RUN, RecordBuilder
from tests.support.page_records import log_with


def recording_of(records: Iterable[Outgoing]) -> Recording:
    return Recording.open(log_with(records), RUN)


def plans(recording: Recording, *overrides: str, follow: bool = False) -> list[list[int]]:
    selection = Selection(recording, what_if(recording.config, overrides).config, follow=follow)
    return [[planned.group for planned in plan] for plan in selection.plans()]


def test_scored_groups_are_taken_in_their_order_and_those_nobody_trained_too() -> None:
    recording = recording_of(RecordBuilder(steps=3).whole())  # group 0 is filtered, 1 to 6 are trained, 7 is unused
    assert plans(recording) == [[1, 2], [3, 4], [5, 6]]
    assert plans(recording, "schedule.prompts_per_step=3") == [[1, 2, 3], [4, 5, 6]]
    assert Selection(recording, recording.config).steps() == 3


def test_without_the_filter_groups_of_equal_rewards_are_taken_and_with_it_they_are_not() -> None:
    recording = recording_of(RecordBuilder(steps=3).whole())
    assert plans(recording, "algorithm.filter_zero_variance=false") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    recording.config = what_if(recording.config, ["algorithm.filter_zero_variance=false"]).config
    # All rewards of a told group are equal.
    assert plans(recording, "algorithm.filter_zero_variance=true") == []


@pytest.mark.parametrize(
    ("rewards", "taken"),
    [([0.5, 0.5, None], True), ([0.5, 0.5], True), ([0.5], True), ([0.5, None, None], False), ([None, None], False), ([None], False)],
)
def test_a_group_without_two_rewards_is_never_taken(rewards: list[float | None], taken: bool) -> None:
    builder = RecordBuilder(steps=1)
    records = [*builder.start(), *builder.group([1.0, 0.0], version=0)]
    recording = recording_of([*records, *builder.group(rewards, version=0, outcome="filtered"), builder.closed()])
    plan = plans(recording, "algorithm.filter_zero_variance=false", "schedule.prompts_per_step=1")
    assert plan == ([[0], [1]] if taken else [[0]])


def test_the_order_of_arrival_is_that_of_the_records() -> None:
    builder = RecordBuilder(steps=2)
    head = [builder.record(), builder.made(), builder.opened()]
    first, second = builder.group([1.0, 0.0], version=0), builder.group([0.0, 1.0], version=0)
    recording = recording_of([*head, *second, *first, *second])  # written within a millisecond or not, offsets rise
    assert plans(recording, "schedule.order=submission") == [[0, 1]]
    assert plans(recording, "schedule.order=arrival") == [[1, 0]]


def test_a_group_without_an_outcome_holds_nobody_up_once_the_run_is_over() -> None:
    builder = RecordBuilder(steps=1)
    records = [builder.record(), builder.made(), builder.opened(), builder.version(0), *builder.group([1.0, 0.0], version=0)]
    lost = builder.group([1.0, 0.0], version=0)
    records += [record for record in lost if not record.topic.endswith(".groups")]
    records += [*builder.group([1.0, 0.0], version=0), builder.closed()]
    recording = recording_of(records)
    assert plans(recording) == [[0, 2]]
    assert plans(recording, follow=True) == [[0, 2]]
