"""The schedule's integer rules, one by one."""

import pytest

from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.rules import MODES, Schedule, preset
from penstock.pipeline.scheduling.step_selector import Candidate, Selector


def schedule_of(mode: str = "pipelined", *, groups: int = 4, steps_per_version: int = 1, **chosen: object) -> Schedule:
    return preset(mode, prompts_per_step=groups, samples_per_prompt=2, steps_per_version=steps_per_version, **chosen)  # type: ignore[arg-type]


def candidate(group: int, outcome: str = "scored", *, version: int = 0) -> Candidate:
    return Candidate(group=group, outcome=outcome, policy_version_min=version, partition=0, offset=group, sha256="")


def test_nothing_is_admitted_before_version_0_is_published():
    assert rules.admission_limit(schedule_of(), newest_version=-1, dropped=0, steps=10) == 0


def test_a_version_admits_one_round_and_the_lag_admits_that_many_more():
    assert rules.admission_limit(schedule_of(steps_per_version=3), newest_version=0, dropped=0, steps=100) == 12
    assert rules.admission_limit(schedule_of("one_step_off", steps_per_version=3), newest_version=0, dropped=0, steps=100) == 24


def test_every_dropped_group_admits_one_more_at_once_also_at_the_end_of_the_run():
    assert rules.admission_limit(schedule_of(), newest_version=9, dropped=3, steps=10) == 43
    assert rules.admission_limit(schedule_of(), newest_version=10, dropped=3, steps=10) == 43


def test_the_last_version_is_published_even_when_the_steps_do_not_fill_its_round():
    assert [step for step in range(7) if rules.publishes(step, steps=7, steps_per_version=3)] == [2, 5, 6]
    assert rules.versions_of(7, steps_per_version=3) == 3


def test_a_worker_waits_for_weights_instead_of_starting_a_prompt_under_older_ones():
    assert rules.next_in_line([(8, 2), (9, 1)], loaded_version=0, newest_version=0) is None
    assert rules.next_in_line([(8, 2), (9, 1)], loaded_version=0, newest_version=1) == 1
    assert rules.next_in_line([(8, 2), (9, 1)], loaded_version=0, newest_version=2) == 0


def test_between_rounds_weights_change_only_when_the_prompt_needs_it_and_between_groups_always():
    between_rounds, between_groups = MODES["pipelined"], MODES["one_step_off"]
    assert rules.version_to_load(between_rounds, min_version=1, newest_version=2, loaded_version=1) is None
    assert rules.version_to_load(between_rounds, min_version=2, newest_version=2, loaded_version=1) == 2
    assert rules.version_to_load(between_groups, min_version=0, newest_version=2, loaded_version=1) == 2
    assert rules.version_to_load(between_groups, min_version=0, newest_version=2, loaded_version=2) is None


def test_a_joiner_gets_the_next_group_and_a_full_owner_none():
    assert rules.choose_partition(unfinished=[1, 1, 0, 0], slots=[2, 2, 2, 2], owners=["a", "a", "b", "b"]) == 2
    assert rules.choose_partition(unfinished=[2, 1], slots=[2, 1], owners=["a", "b"]) is None
    assert rules.choose_partition(unfinished=[0, 0], slots=[2, 2], owners=[None, None]) is None


def test_submission_order_waits_for_the_lowest_number_and_passes_over_dropped_ones():
    selector = Selector(schedule_of())
    for found in (candidate(2), candidate(1, "filtered")):
        assert selector.add(found)
    assert selector.take(learner_version=0) is None
    selector.add(candidate(0))
    assert [selector.take(learner_version=0).group for _ in range(2)] == [0, 2]


def test_arrival_order_takes_what_is_there():
    selector = Selector(schedule_of(order="arrival"))
    for found in (candidate(5), candidate(1), candidate(3, "failed")):
        selector.add(found)
    assert [selector.take(learner_version=0).group for _ in range(2)] == [5, 1]
    assert selector.take(learner_version=0) is None


def test_a_repeated_outcome_changes_nothing():
    selector = Selector(schedule_of())
    assert selector.add(candidate(0, "filtered"))
    assert not selector.add(candidate(0))
    assert selector.take(learner_version=0) is None
    assert selector.drops == 1


@pytest.mark.parametrize("order", ["submission", "arrival"])
def test_when_all_groups_of_a_step_are_filtered_their_replacements_train(order):
    schedule = schedule_of(order=order)
    selector = Selector(schedule)
    for group in range(4):
        selector.add(candidate(group, "filtered"))
    assert rules.admission_limit(schedule, newest_version=0, dropped=selector.drops, steps=1) == 8
    assert all(rules.min_version(schedule, slot=4 + i - 4, newest_version=0) == 0 for i in range(4))
    for group in range(4, 8):
        selector.add(candidate(group))
    assert [selector.take(learner_version=0).group for _ in range(4)] == [4, 5, 6, 7]


def test_one_group_that_never_finishes_holds_a_submission_step_until_it_is_abandoned_and_an_arrival_step_not_at_all():
    waiting, going_on = Selector(schedule_of()), Selector(schedule_of(order="arrival"))
    for selector in (waiting, going_on):
        for group in (1, 2, 3):
            selector.add(candidate(group))
    assert waiting.take(learner_version=0) is None
    assert not waiting.ready(3)
    assert [going_on.take(learner_version=0).group for _ in range(3)] == [1, 2, 3]
    waiting.add(candidate(0, "abandoned"))
    waiting.add(candidate(4))
    assert [waiting.take(learner_version=0).group for _ in range(4)] == [1, 2, 3, 4]
    assert rules.admission_limit(waiting.schedule, newest_version=0, dropped=waiting.drops, steps=1) == 5


def test_a_group_that_is_too_old_is_set_aside_as_stale_and_counts_as_dropped():
    selector = Selector(schedule_of("one_step_off"))
    for found in (candidate(0, version=0), candidate(1, version=1)):
        selector.add(found)
    assert selector.take(learner_version=2).group == 1
    assert [found.group for found in selector.newly_stale] == [0]
    assert selector.drops == 1
