"""Writes the outcomes of groups, with the offsets from which the next owner continues.

Outcomes and offsets are one transaction, and only the owner of a partition commits; after an unknown result the log decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.infra.errors import LostPartition, OutcomeUnknown
from penstock.infra.log import Member, Partition, Transactions
from penstock.pipeline.runtime.session import Session
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.wire.record import Outgoing
from penstock.workers.scorer.group_buffer import PartitionGroups

WRITE_BYTES, WRITE_GROUPS = 32 << 20, 256
"""Limits of one transaction, except for a larger single group: on a slow link it must end before the broker aborts it."""


@dataclass(frozen=True, slots=True)
class OutcomeWriter:
    """Writes outcomes of the owned partitions' groups."""

    session: Session
    transactions: Transactions
    member: Member
    owned: Mapping[int, PartitionGroups]
    read_finished: Callable[[list[int]], None]
    """Reads from the log which groups of these partitions have ended."""

    def write(self, ended: Sequence[Group]) -> None:
        """Write outcomes, in as few transactions as the limits allow."""
        batch, size = dict[int, list[Outgoing]](), 0
        for group in ended:
            partition = next((p for p, state in self.owned.items() if group.group in state.open), None)
            if partition is None:
                continue
            records = self._encoded(group, partition)
            nbytes = sum(len(record.value) for record in records)
            if batch and (size + nbytes > WRITE_BYTES or len(batch) == WRITE_GROUPS):
                self._commit(batch)
                batch, size = {}, 0
            batch[group.group], size = records, size + nbytes
        if batch:
            self._commit(batch)

    def _encoded(self, group: Group, partition: int) -> list[Outgoing]:
        topic, key = self.session.topic("groups"), str(group.group).encode()
        with self.session.reporter.encoding:
            parts = groups.encode_parts(group, run=self.session.run, worker=self.session.worker)
            return [
                Outgoing(topic=topic, partition=partition, key=key, headers=headers.encode(value), value=value) for headers, value in parts
            ]

    def _commit(self, batch: Mapping[int, Sequence[Outgoing]]) -> None:
        """Commit the outcomes of these groups with offsets; if the result is unknown, read from the log which were written."""
        records = [record for parts in batch.values() for record in parts]
        partitions = {record.partition for record in records}
        try:
            offsets = self.transactions.commit(
                records, offsets=self._offsets(partitions, without=batch.keys()), member=self.member.membership()
            )
        except LostPartition:
            return  # Revoked and Assigned follow: the new owner, maybe this worker, reads the groups again
        except OutcomeUnknown:
            self.read_finished(sorted(partitions))
            if still_open := {group: parts for group, parts in batch.items() if group in self.owned[parts[0].partition].open}:
                self._commit(still_open)
            return
        for record, offset in zip(records, offsets, strict=True):
            self.owned[record.partition].finish(int(record.key or b""), offset=offset)

    def _offsets(self, partitions: Collection[int], *, without: Collection[int]) -> dict[Partition, tuple[int, str]]:
        """Offsets and metadata for a new owner once the groups in `without` have ended."""
        offsets: dict[Partition, tuple[int, str]] = {}
        for partition in partitions:
            state = self.owned[partition]
            prompts_offset, rollouts_offset = state.offsets(without=without)
            offsets[self.session.topic("prompts"), partition] = prompts_offset, state.note(without=without)
            offsets[self.session.topic("rollouts"), partition] = rollouts_offset, ""
        return offsets
