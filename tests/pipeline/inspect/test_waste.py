"""What a run loses by drawing groups that are not trained, in words."""

import json
from dataclasses import replace

import pytest

from penstock.pipeline.inspect.report.headline import wastes
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import GroupFacts
from penstock.topics.runs import RunRecord


def view_of(*outcomes: tuple[str, float | None], stale: int = 0) -> RunView:
    """Groups with these outcomes and mean rewards; the first `stale` of them were too old for their step."""
    view = RunView(run="r")
    view.groups = {number: GroupFacts(outcome, 8, 80, mean, 0) for number, (outcome, mean) in enumerate(outcomes)}
    view.stale = set(range(stale))
    return view


def test_groups_whose_rewards_are_all_zero_call_for_easier_prompts() -> None:
    (waste,) = wastes(view_of(*[("filtered", 0.0)] * 8, ("filtered", 1.0), ("scored", 0.5)))
    assert waste.status == "filtered"
    assert str(waste) == (
        "90% of the groups are filtered, because equal rewards give no gradient (8 of 9 have the reward 0): "
        "the task is too hard: use easier prompts, more samples per group, or a denser reward"
    )


def test_groups_whose_rewards_are_all_full_call_for_harder_prompts() -> None:
    (waste,) = wastes(view_of(*[("filtered", 1.0)] * 10, ("filtered", 0.0), *[("scored", 0.5)] * 2))
    assert waste.advice == "use harder prompts"
    (waste,) = wastes(view_of(*[("filtered", 1.0)] * 7, *[("filtered", 0.0)] * 3, *[("scored", 0.5)] * 2))
    assert waste.advice == "use easier or harder prompts, more samples per group, or a denser reward"


def test_a_reward_that_breaks_now_and_then_is_said_although_most_groups_are_trained() -> None:
    (waste,) = wastes(view_of(*[("scored", 0.5)] * 18, *[("failed", None)] * 2))
    assert (waste.status, waste.share) == ("failed", 0.1)
    assert "their reward could not be computed" in waste.why


def test_the_most_expensive_cause_comes_first() -> None:
    found = wastes(view_of(*[("scored", 0.5)] * 6, *[("filtered", 0.0)] * 12, ("abandoned", None), ("abandoned", None), stale=4))
    assert [(waste.status, waste.share) for waste in found] == [("filtered", 0.6), ("stale", 0.2), ("abandoned", 0.1)]


@pytest.mark.parametrize("view", [view_of(*[("filtered", 0.0)] * 7), view_of(*[("scored", 0.5)] * 60, ("filtered", 0.0), ("failed", None))])
def test_a_run_that_has_hardly_begun_or_wastes_little_is_told_nothing(view: RunView) -> None:
    assert wastes(view) == []


def test_only_the_newest_outcomes_count_where_that_is_asked() -> None:
    view = view_of(*[("filtered", 0.0)] * 50, *[("scored", 0.5)] * 10)
    assert wastes(view) and wastes(view, last=10) == []


def test_groups_of_truncated_samples_alone_call_for_longer_completions_where_those_are_not_trained() -> None:
    config = json.dumps({"algorithm": {"truncated": "mask"}, "sampling": {"max_new_tokens": 10}})
    view = view_of(*[("filtered", 0.0)] * 8)
    view.record = RunRecord(run="r", status="running", config=config, info="{}", created_ns=0, updated_ns=0)
    (waste,) = wastes(view)
    assert waste.status == "truncated"
    assert str(waste).startswith("100% of the groups are filtered, because every sample is truncated") and "max_new_tokens" in waste.advice
    view.record = replace(view.record, config=config.replace("10", "11"))
    assert [waste.status for waste in wastes(view)] == ["filtered"]
