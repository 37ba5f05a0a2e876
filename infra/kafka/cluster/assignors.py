"""How a consumer group shares partitions: in even ranges, or by the pools of its members.

The rule: equal partition numbers of topics with equal counts go to one member.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor, ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kafka.coordinator.assignors.range import RangePartitionAssignor

from penstock.infra.log import Pools


def assignor_of(pools: Pools | None) -> Any:
    """What a member of a group brings along for the one that leads it."""
    # Range gives the same partition numbers of two topics with equal counts to one member; sticky ones do not.
    return RangePartitionAssignor() if pools is None else PoolAssignor(pools)


class PoolAssignor(AbstractPartitionAssignor):  # type: ignore[misc]
    """Shares partitions as `Pools` says; every member tells the pool it is in."""

    name = "pools"
    version = 0

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def metadata(self, topics: Sequence[str]) -> Any:
        """What this member sends when it joins."""
        return ConsumerProtocolSubscription(self.version, list(topics), self._pools.own.encode())

    def assign(self, cluster: Any, members: Sequence[Any]) -> Mapping[str, Any]:
        """Member id -> its partitions; called in the member that leads the group."""
        shares = self._pools.share_out({member.member_id: bytes(member.metadata.user_data or b"").decode() for member in members})
        return {
            member.member_id: ConsumerProtocolAssignment(
                self.version, [(topic, shares[member.member_id]) for topic in sorted(member.metadata.topics)], b""
            )
            for member in members
        }

    def on_assignment(self, assignment: Any, generation: int) -> None:
        """Nothing is kept from one assignment to the next."""
