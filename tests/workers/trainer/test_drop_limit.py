"""When a run that drops too many groups ends, and what it says."""

from penstock.pipeline.scheduling.schedule import preset
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.drop_limit import DropLimit
from penstock.workers.trainer.group_inbox import GroupInbox


def refused(record: Record, error: Unusable) -> None:
    raise AssertionError(f"{record} is not usable: {error}")


def limit_of(limit: int) -> DropLimit:
    schedule = preset("pipelined", prompts_per_step=2, samples_per_prompt=4, steps_per_version=1, max_drops_per_step=limit)
    return DropLimit(GroupInbox(run="demo", schedule=schedule, dead_letter=refused, duplicate=print))


def drop(found: DropLimit, **causes: int) -> None:
    found.inbox.drop_causes.update(causes)
    found.inbox.selector.drops += sum(causes.values())


def test_as_many_drops_as_the_limit_are_borne_and_one_more_ends_the_run() -> None:
    drops = limit_of(3)
    drop(drops, stale=2, abandoned=1)
    assert drops.passed(steps_done=0) is None
    drop(drops, stale=1)
    assert drops.passed(steps_done=0) == "4 groups were dropped before step 0 (schedule.max_drops_per_step = 3): 3 stale, 1 abandoned"


def test_a_committed_step_begins_the_count_anew() -> None:
    drops = limit_of(3)
    drop(drops, stale=3)
    drops.committed()
    drop(drops, stale=3)
    assert (drops.since_last_step, drops.passed(steps_done=1)) == (3, None)
    drop(drops, abandoned=1)
    assert drops.passed(steps_done=1) == "4 groups were dropped since step 0 (schedule.max_drops_per_step = 3): 3 stale, 1 abandoned"


def test_drops_that_were_there_when_the_trainer_began_do_not_count() -> None:
    drops = limit_of(3)
    drops.at_last_step = 1
    drop(drops, stale=9)
    drops.tolerate()
    assert (drops.since_last_step, drops.passed(steps_done=2)) == (8, None)
    drop(drops, stale=4)
    assert str(drops.passed(steps_done=2)).startswith("4 groups were dropped since the trainer was started (")


def test_where_most_dropped_groups_had_equal_rewards_it_says_what_to_change() -> None:
    drops = limit_of(3)
    drop(drops, **{"filtered at reward 1": 3, "stale": 1})
    assert str(drops.passed(steps_done=0)).endswith("more samples a group or a denser reward")
