"""A set of group numbers, small for what is usual and right for anything."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.scheduling.rules import PAGE_BITS, IdSet

NUMBERS = st.one_of(st.integers(0, 300), st.integers(PAGE_BITS - 2, PAGE_BITS + 2), st.integers(0, 2**63 - 1))


@given(put=st.sets(NUMBERS, max_size=20), asked=st.sets(NUMBERS, max_size=20))
def test_it_holds_what_was_put_in_and_nothing_else(put: set[int], asked: set[int]) -> None:
    numbers = IdSet()
    for number in put:
        numbers.add(number)
    assert {number for number in put | asked if number in numbers} == put
    assert len(numbers) == len(put)
    assert IdSet.from_json(numbers.as_json()) == numbers


def test_numbers_given_out_in_order_take_no_memory_once_their_page_is_full() -> None:
    numbers, late = IdSet(), 5
    for number in range(10 * PAGE_BITS + 3):
        if number != late:
            numbers.add(number)
    assert late not in numbers
    held = len(str(numbers.as_json()))
    numbers.add(late)
    numbers.add(late)
    assert len(numbers) == 10 * PAGE_BITS + 3
    assert all(number in numbers for number in range(10 * PAGE_BITS + 3))
    assert 10 * PAGE_BITS + 3 not in numbers
    assert len(str(numbers.as_json())) < held / 5
