"""How many copies a run's topics have follows the cluster; what would lose acknowledged records has to be asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.log import Copies


@given(brokers=st.integers(1, 9))
def test_copies_follow_the_cluster_and_one_lost_broker_loses_nothing(brokers: int) -> None:
    replicas, in_sync = Copies().on(brokers)
    assert replicas == min(3, brokers)
    assert in_sync == (2 if brokers > 1 else 1)


@pytest.mark.parametrize(
    ("copies", "brokers", "message"),
    [
        (Copies(replicas=1), 3, "kafka.replication_factor: with 1 replicas"),
        (Copies(in_sync=1), 3, "kafka.min_insync_replicas: with 3 replicas, 1 of them in sync"),
        (Copies(replicas=3), 2, "3 replicas need as many brokers, 2 are up"),
        (Copies(replicas=2, in_sync=3), 3, "3 is more than the 2 replicas of a topic"),
    ],
)
def test_copies_that_cannot_be_or_lose_records_are_refused(copies: Copies, brokers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copies.on(brokers)


def test_fewer_copies_are_taken_where_they_are_asked_for() -> None:
    assert Copies(replicas=1, loss_allowed=True).on(3) == (1, 1)
