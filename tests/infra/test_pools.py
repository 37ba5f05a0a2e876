"""Partitions by pools: each belongs to the first of its pools that has members, and to nobody else."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.log import Pools

NAMES = ("a", "b", "c")
ORDERS = [names for count in (1, 2, 3) for names in permutations(NAMES, count)]


@given(
    by_partition=st.lists(st.sampled_from(ORDERS), max_size=12).map(tuple),
    members=st.lists(st.sampled_from(NAMES), max_size=6).map(lambda pools: {str(number): pool for number, pool in enumerate(pools)}),
)
def test_a_partition_has_one_owner_of_its_first_pool_that_has_members_or_none(
    by_partition: tuple[tuple[str, ...], ...], members: dict[str, str]
) -> None:
    shares = Pools(own="a", by_partition=by_partition).share_out(members)
    assert set(shares) == set(members)
    for number, pools in enumerate(by_partition):
        served = next((pool for pool in pools if pool in members.values()), None)
        assert [members[member] for member, numbers in shares.items() if number in numbers] == [served] * (served is not None)
    for pool in NAMES:
        counts = [len(shares[member]) for member, name in members.items() if name == pool]
        assert not counts or max(counts) - min(counts) <= 1
