"""The search of a bisect: the last change from good to bad of any curve, the fewest items that matter, and the test that decides."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.errors import ConfigError, PenstockError
from penstock.pipeline.replay.bisect.search import Criterion, ddmin, last_transition, share_of_change, smallest_prefix


@given(middle=st.lists(st.booleans(), max_size=60), measured=st.sets(st.integers(0, 70)), cheap=st.sets(st.integers(0, 70)))
def test_the_step_follows_a_good_state_and_every_tested_state_after_it_is_bad(
    middle: list[bool], measured: set[int], cheap: set[int]
) -> None:
    curve = [True, *middle, False]
    low, points = last_transition(0, len(curve) - 1, curve.__getitem__, measured=measured, cheap=cheap)
    assert points == {number: curve[number] for number in points}
    assert points[low] and not points[low + 1]
    assert not any(passes for number, passes in points.items() if number > low)


@given(steps=st.integers(2, 5000), data=st.data())
def test_a_curve_that_falls_once_takes_three_logarithms_of_evaluations(steps: int, data: st.DataObject) -> None:
    last_good, tested = data.draw(st.integers(0, steps - 1)), list[int]()

    def is_good(number: int) -> bool:
        tested.append(number)
        return number <= last_good

    assert last_transition(0, steps, is_good)[0] == last_good
    assert len(tested) == len(set(tested)) <= 3 * steps.bit_length() + 2


def test_a_state_that_is_good_again_moves_the_search_behind_it() -> None:
    bad = {*range(20, 30), *range(90, 101)}
    low, points = last_transition(0, 100, lambda number: number not in bad, measured=[25])
    assert (low, points[25]) == (89, False)


@pytest.mark.parametrize(
    ("good", "bad", "why"), [(30, 100, "--good 30: the test already fails after 30 steps"), (0, 10, "--bad 10: the test passes")]
)
def test_ends_that_are_not_good_and_bad_are_refused(good: int, bad: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        last_transition(good, bad, lambda number: number < 20)


@given(count=st.integers(1, 50), data=st.data())
def test_the_fewest_items_are_identified_under_any_ranking(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    ranking = data.draw(st.permutations(range(count)))

    def passes(subset: Sequence[int]) -> bool:
        return culprits <= set(subset)

    assert set(ddmin(smallest_prefix(ranking, passes) or ranking, passes)[0]) == culprits


def test_one_heavy_item_of_fifty_takes_one_test_and_any_one_takes_few() -> None:
    tests = list[Sequence[int]]()

    def passes(subset: Sequence[int]) -> bool:
        tests.append(subset)
        return 17 in subset

    assert smallest_prefix([17, *range(17)], passes) == [17]
    assert len(tests) == 1
    assert ddmin(smallest_prefix(range(50), passes) or [], passes) == ([17], True)
    assert len(tests) <= 1 + 17


VALUES = {"eval/greedy_accuracy": 0.7, "train/kl": 0.2, "eval/sums/greedy_accuracy": 0.1, "train/ess": 0.9}


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("greedy_accuracy > 0.6", True),
        ("greedy_accuracy>=0.7 and kl < 0.1", False),
        ("greedy_accuracy > 0.9 or kl < 1 and train/ess != 1", True),
        ("eval/sums/greedy_accuracy > 0.5", False),
    ],
)
def test_an_expression_is_over_metrics_of_evaluations_and_steps(text: str, passes: bool) -> None:
    assert Criterion.of(text).passes(VALUES) is passes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("greedy_acuracy > 0.6", "greedy_acuracy is not a metric of an evaluation or a step; did you mean 'greedy_accuracy'"),
        ("greedy_accuracy > much", "'greedy_accuracy > much' is not a comparison"),
        ("greedy_accuracy > 0.6 and", "is not a comparison"),
        ("no-such-program --fast", "expected a condition such as 'greedy_accuracy > 0.6', or a program"),
        ("'open", "No closing quotation"),
        ("", "expected a condition"),
    ],
)
def test_a_test_that_is_neither_an_expression_nor_a_program_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Criterion.of(text)


def test_a_command_passes_by_its_exit_status() -> None:
    command = Criterion.of("sh -c 'exit 3'")
    assert not command.any_of and not command.evaluates
    assert [command.passes({"exit_status": status}) for status in (0.0, 3.0)] == [True, False]


def test_a_state_without_the_metric_is_an_error_and_neither_good_nor_bad() -> None:
    with pytest.raises(PenstockError, match="eval/pass_at_4 was not measured"):
        Criterion.of("pass_at_4 > 0.1").passes(VALUES)


def test_the_steps_part_of_a_fall_tells_one_step_from_many() -> None:
    start, before, after, end = ({"eval/greedy_accuracy": value} for value in (0.9, 0.52, 0.48, 0.1))
    metric = Criterion.of("greedy_accuracy > 0.5").failing(before, after)
    assert share_of_change(metric, (before, after), (start, end)) == pytest.approx(0.05)
    assert share_of_change(Criterion.of("true").failing({}, {}), (before, after), (start, end)) is None
