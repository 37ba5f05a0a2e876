"""The status of a group: one, whatever was said of it."""

import pytest

from penstock.pipeline.scheduling.rules import OPEN, SETTLED, STATUSES, group_status, group_statuses


@pytest.mark.parametrize(
    ("outcome", "trained", "stale", "ended", "status"),
    [
        ("scored", True, False, True, "trained"),
        ("scored", False, True, True, "stale"),
        ("scored", False, False, True, "unused"),
        ("scored", False, False, False, OPEN),
        ("filtered", False, False, False, "filtered"),
        ("failed", False, False, True, "failed"),
        ("abandoned", False, True, False, "stale"),
        (None, False, False, True, "unused"),
        (None, False, False, False, OPEN),
    ],
)
def test_what_the_trainer_did_comes_before_what_the_scorer_said(
    outcome: str | None, trained: bool, stale: bool, ended: bool, status: str
) -> None:
    assert group_status(outcome, trained=trained, stale=stale, ended=ended) == status


def test_only_the_end_of_a_run_turns_an_open_group_into_an_unused_one() -> None:
    cases = [(outcome, trained, stale) for outcome in ("scored", "filtered", None) for trained in (True, False) for stale in (True, False)]
    for outcome, trained, stale in cases:
        before, after = (group_status(outcome, trained=trained, stale=stale, ended=ended) for ended in (False, True))
        assert (before, after) == (OPEN, "unused") or (before == after and before in SETTLED)
        assert after in STATUSES


def test_groups_beyond_a_gap_were_not_admitted_unless_they_were_trained() -> None:
    found = group_statuses({0, 1, 5, 9}, {0: "filtered", 5: "failed"}, trained=[9], stale={1}, ended=True)
    assert found == {0: "filtered", 1: "stale", 9: "trained"}
