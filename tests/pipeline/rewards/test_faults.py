"""A reward that fails in the same way for more than one group in twenty stops the run; other failures do not."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.rewards.scoring import FEWEST, SHARE, FaultCount, fault_of
from penstock.pipeline.rewards.values import BrokenReward
from penstock.pipeline.runtime.exit_status import BROKEN, exit_status

ZERO = "reward f.py:f broke: ZeroDivisionError: division by zero (f.py line 3)"


def stops(outcomes: Sequence[str | None], *, on_error: str = "stop") -> bool:
    """Whether a worker stops that has seen these: None for a group with rewards, else its failure."""
    count = FaultCount(on_error)
    for outcome in outcomes:
        if outcome is None:
            count.partly((), 1)
        else:
            count.failed(outcome)
        try:
            count.check()
        except BrokenReward:
            return True
    return False


def test_six_equal_failures_stop_a_run_that_has_just_begun() -> None:
    assert not stops([ZERO] * 5)
    assert stops([ZERO] * 6)
    assert not stops([ZERO] * 600, on_error="drop")


@given(st.lists(st.booleans(), max_size=400))
def test_a_run_stops_at_the_first_group_at_which_more_than_the_share_have_failed(passed: list[bool]) -> None:
    over = (n - sum(passed[:n]) > SHARE * max(n, FEWEST) for n in range(1, len(passed) + 1))
    assert stops([None if well else ZERO for well in passed]) == any(over)


def test_failures_are_equal_by_function_exception_and_place_and_not_by_what_they_name() -> None:
    missing = [f"reward f.py:f broke: KeyError: 'x{n}' (f.py line 3)" for n in range(2)]
    assert fault_of(missing[0]) == fault_of(missing[1]) != fault_of(ZERO)
    assert fault_of("took longer than 30 s and was killed") == fault_of("took longer than 1.5 s and was killed")
    assert not stops([f"reward f.py:f broke: E{n}: no (f.py line {n})" for n in range(60)])


def test_the_line_names_the_failure_and_the_way_on_and_the_status_is_its_own() -> None:
    count = FaultCount("stop")
    for _ in range(6):
        count.failed(ZERO)
    with pytest.raises(BrokenReward, match=r"division by zero .*for 6 of 6 groups: fix the function, or set reward.on_error") as caught:
        count.check()
    assert exit_status(caught.value) == BROKEN


def test_a_group_of_which_a_part_failed_counts_as_that_part() -> None:
    count = FaultCount("stop")
    for _ in range(10):
        count.partly([ZERO, ZERO], 4)  # half of a group
    count.check()
    count.partly([ZERO], 4)
    with pytest.raises(BrokenReward, match=r"for 5\.25 of 11 groups"):
        count.check()
