"""When a run that drops too many groups ends, and what it says."""

from dataclasses import replace

import pytest

from penstock.pipeline.algorithms.advantages import RewardScale
from penstock.pipeline.rewards.scoring import UNTRAINED
from penstock.pipeline.scheduling.rules import preset
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.workers.trainer.inbox import DropLimit, GroupInbox
from tests.support.a_run import RecordBuilder, as_records, with_group


def refused(record: Record, error: Unusable) -> None:
    raise AssertionError(f"{record} is not usable: {error}")


def limit_of(limit: int, *, scale: RewardScale | None = None) -> DropLimit:
    schedule = preset("pipelined", prompts_per_step=2, samples_per_prompt=4, steps_per_version=1, max_drops_per_step=limit)
    return DropLimit(GroupInbox(run="demo", schedule=schedule, dead_letter=refused, duplicate=print, scale=scale or RewardScale()))


def drop(found: DropLimit, *filtered: float, **causes: int) -> None:
    """Groups that were filtered with these mean rewards, and groups dropped for other causes."""
    inbox = found.inbox
    for reward in filtered:
        inbox.drop_causes[f"filtered at reward {reward:.3g}"] += 1
        inbox.filtered_rewards.append(reward)
        inbox.scale.see([reward])
    inbox.drop_causes.update(causes)
    inbox.selector.drops += len(filtered) + sum(causes.values())
    inbox.selector.outcomes.update(dict.fromkeys(range(inbox.selector.drops), "filtered"))


def reason(found: DropLimit, *, steps_done: int) -> str | None:
    passed = found.passed(steps_done=steps_done)
    assert passed is None or not passed[1]
    return None if passed is None else passed[0]


def test_as_many_drops_as_the_limit_are_borne_and_one_more_ends_the_run() -> None:
    drops = limit_of(3)
    drop(drops, stale=2, abandoned=1)
    assert reason(drops, steps_done=0) is None
    drop(drops, stale=1)
    line = "4 groups were dropped before step 0, more than schedule.max_drops_per_step allows (3): 3 stale, 1 abandoned"
    assert reason(drops, steps_done=0) == line


def test_a_committed_step_begins_the_count_anew() -> None:
    drops = limit_of(3)
    drop(drops, stale=3)
    drops.committed()
    drop(drops, stale=3)
    assert (drops.since_last_step, reason(drops, steps_done=1)) == (3, None)
    drop(drops, abandoned=1)
    line = "4 groups were dropped since step 0, more than schedule.max_drops_per_step allows (3): 3 stale, 1 abandoned"
    assert reason(drops, steps_done=1) == line


def test_drops_that_were_there_when_the_trainer_began_do_not_count() -> None:
    drops = limit_of(3)
    drops.at_last_step = 1
    drop(drops, *[1.0] * 9)
    drops.tolerate()
    assert (drops.since_last_step, reason(drops, steps_done=2)) == (8, None)
    drop(drops, stale=4)
    assert str(reason(drops, steps_done=2)).startswith("4 groups were dropped since the trainer was started, more than ")


@pytest.mark.parametrize(
    ("filtered", "low", "high"),
    [
        ([1.0] * 9, 0.0, 1.0),
        ([10.0] * 9, 0.0, 10.0),
        ([0.0] * 9, -1.0, 0.0),
        ([0.5] * 9, 0.125, 0.5),
        ([0.96, 0.93, 1.0, 1.0, 0.95, 0.97, 0.91, 1.0, 1.0], 0.0, 1.0),
        ([*[1.0] * 19, 0.0], 0.0, 1.0),
    ],
)
def test_groups_that_all_have_the_full_reward_end_the_run_as_solved(filtered: list[float], low: float, high: float) -> None:
    drops = limit_of(8, scale=RewardScale(low, high))
    drop(drops, *filtered, stale=2)
    passed = drops.passed(steps_done=14)
    assert passed is not None and passed[1]
    assert passed[0].startswith(f"solved: {len(filtered)} of {len(filtered) + 2} groups dropped since step 13 have equal rewards, ")
    assert f"the full reward is {high:.3g}" in passed[0]


EQUAL = "every sample has the reward 1"
UNSOLVED = [UNTRAINED] * 8, [EQUAL, *[UNTRAINED] * 7], [*[UNTRAINED] * 7, EQUAL], [EQUAL, UNTRAINED, UNTRAINED]
SOLVED: tuple[list[str], ...] = [], [EQUAL] * 8, [*[EQUAL] * 7, UNTRAINED], [UNTRAINED, *[EQUAL] * 7], [EQUAL, UNTRAINED]


@pytest.mark.parametrize(
    ("reasons", "solved"),
    [*((reasons, False) for reasons in UNSOLVED), *((reasons, True) for reasons in SOLVED)],
)
def test_groups_without_a_trained_token_are_no_sign_of_a_solved_task_and_one_of_them_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str], solved: bool
) -> None:
    drops = limit_of(8, scale=RewardScale(0.0, 1.0))
    drop(drops, *[0.95] * 9)
    monkeypatch.setattr(GroupInbox, "newest_reasons", lambda _: reasons)
    passed = drops.passed(steps_done=14)
    assert passed is not None and passed[1] == solved
    advice = f"9 filtered at reward 0.95; the last one: {(reasons or [''])[-1]}"
    assert solved or passed[0].endswith(advice), "no advice on the prompts' difficulty"


@pytest.mark.parametrize(
    ("filtered", "others", "advice"),
    [
        ([0.0] * 9, 0, "(0 on average in a range of 0 to 1): the task is too hard: use easier prompts"),
        ([0.2, 0.1, 0.0] * 3, 0, "the task is too hard: use easier prompts"),
        ([*[1.0] * 6, *[0.0] * 3], 0, "use easier or harder prompts"),
        ([0.7] * 9, 2, "use easier or harder prompts"),
        ([1.0] * 4, 5, "4 filtered at reward 1"),
    ],
)
def test_other_groups_of_equal_rewards_stop_the_run_with_the_rewards_and_true_advice(
    filtered: list[float], others: int, advice: str
) -> None:
    drops = limit_of(8, scale=RewardScale(0.0, 1.0))
    drop(drops, *filtered, stale=others)
    text = str(reason(drops, steps_done=14))
    assert advice in text
    assert text.count("harder") == advice.count("harder")


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.5, 0.1 + 0.2, -1.0])
def test_a_constant_reward_before_the_first_step_is_a_mistake_and_has_its_own_line(reward: float) -> None:
    drops = limit_of(8)
    drop(drops, *[reward] * 9)
    assert f"every reward before the first step was {reward:.6g}: the reward function is constant" in str(reason(drops, steps_done=0))


def test_a_task_that_is_solved_before_the_first_step_calls_for_harder_prompts() -> None:
    drops = limit_of(8, scale=RewardScale(0.0, 1.0))
    drop(drops, *[1.0] * 19, 0.0)
    assert str(reason(drops, steps_done=0)).endswith("use harder prompts")


def test_epochs_that_are_over_before_the_first_step_say_why() -> None:
    drops = limit_of(64)
    drop(drops, *[0.3] * 24)
    assert drops.passed(steps_done=0) is None
    text = drops.without_a_step(requested=24)
    why = "all 24 prompts of the run's epochs were used before the first step, which takes 2 groups with different rewards; "
    assert text.startswith(why)
    assert "24 groups were dropped: 24 filtered at reward 0.3; every reward before the first step was 0.3" in text


def test_groups_that_lack_rewards_do_not_end_the_run_as_solved() -> None:
    drops, builder = limit_of(1, scale=RewardScale(0.0, 1.0)), RecordBuilder("demo")
    for record in as_records([out for _ in range(2) for out in builder.group([1.0] * 4, version=0, outcome="filtered")]):
        if record.topic.endswith(".groups"):
            group = groups.decode(record.value)
            samples = (group.samples[0], *(replace(sample, reward=None, components=(None,)) for sample in group.samples[1:]))
            drops.inbox.receive(*with_group(record, replace(group, samples=samples), run="demo"))
    passed = drops.passed(steps_done=3)
    assert passed is not None and not passed[1] and "2 filtered for lack of rewards" in passed[0]
