"""Comparing a sample that was drawn again with the recorded one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.engines.base import Completion, Span
from penstock.pipeline.replay.resample import compare, summary
from penstock.topics.rollouts import Rollout
from tests.support.examples import completion_of, sample_of


def recorded(tokens: list[int], *, versions: list[int] | None = None, starts: list[int] | None = None) -> Rollout:
    spans = np.array([versions or [2], starts or [0]], np.int32)
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return sample_of(3, 1, tokens, behaviour_logprobs=logprobs, span_versions=spans[0], span_starts=spans[1])


def drawn(tokens: list[int], *, logprob: float = -0.5) -> Completion:
    return completion_of(3, 1, tokens, logprob=logprob, spans=(Span(2, 0),))


TOKENS = st.lists(st.integers(3, 6), min_size=1, max_size=12)


@given(TOKENS, TOKENS)
def test_the_first_difference_is_the_first_place_where_the_two_are_not_equal(before: list[int], now: list[int]) -> None:
    found = compare(recorded(before), drawn(now), version=2)
    if before == now:
        assert found.same
    else:
        place = found.first_difference
        assert place is not None
        assert before[:place] == now[:place]
        assert before[place : place + 1] != now[place : place + 1]


@given(TOKENS, st.integers(1, 11))
def test_tokens_of_later_versions_are_not_compared(before: list[int], cut: int) -> None:
    cut = min(cut, len(before))
    versions, starts = ([2, 3], [0, cut]) if cut < len(before) else ([2], [0])
    again = before[:cut] + [9] * (len(before) - cut)
    found = compare(recorded(before, versions=versions, starts=starts), drawn(again), version=2)
    assert found.same
    assert found.comparable == cut


def test_a_sample_that_ends_early_or_goes_on_differs_where_it_ends() -> None:
    assert compare(recorded([3, 4, 5]), drawn([3, 4]), version=2).first_difference == 2
    assert compare(recorded([3, 4]), drawn([3, 4, 5]), version=2).first_difference == 2
    assert compare(recorded([3, 4, 5, 6], versions=[2, 3], starts=[0, 3]), drawn([3, 4]), version=2).first_difference == 2


def test_under_a_version_that_was_asked_for_on_purpose_all_tokens_count() -> None:
    found = compare(recorded([3, 4, 5]), drawn([3, 6, 5]), version=7)
    assert (found.comparable, found.first_difference, found.version, found.recorded_versions) == (3, 1, 7, (2,))


def test_logprobs_are_compared_before_the_difference_only_and_the_summary_adds_up() -> None:
    one = compare(recorded([3, 4, 5]), drawn([3, 4, 6], logprob=-0.75), version=2)
    other = compare(recorded([3]), drawn([3]), version=2)
    assert one.logprob_difference == 0.25
    assert summary([one, other]) == {
        "samples": 2,
        "same_samples": 1,
        "tokens": 4,
        "tokens_before_a_difference": 3,
        "samples_of_several_versions": 0,
        "logprob_difference_max": 0.25,
    }
