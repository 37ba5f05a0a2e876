"""Finds transactions whose end was lost in a partition, and writes the end.

A coordinator takes a partition without a leader for deleted: it writes no end there and marks the transaction as complete (Apache Kafka
4.1 to 4.3.1, KAFKA-20734). Readers of committed records then wait there for ever, and the next action of the same producer in the
partition also decides about these records. A transaction that its coordinator may still end is left alone, and only the coordinator's
decision is written.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kafka import TopicPartition
from kafka.admin import ProducerState, TransactionDescription, TransactionState

from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin
from penstock.infra.log import TRANSACTION_S, Partition

PATIENCE_S = TRANSACTION_S + 5.0
"""An active transaction ends within `TRANSACTION_S`, and the last stable offset moves past it."""
GROUP_OFFSETS = "__consumer_offsets"
"""Kafka's topic of group offsets: an end lost there hides the start offset from the next owner of a partition."""

_ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE)
_DECIDED = {
    TransactionState.PREPARE_COMMIT: True,
    TransactionState.COMPLETE_COMMIT: True,
    TransactionState.PREPARE_ABORT: False,
    TransactionState.PREPARE_EPOCH_FENCE: False,
    TransactionState.COMPLETE_ABORT: False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanging:
    """An open transaction in one partition that no coordinator will end."""

    topic: str
    partition: int
    offset: int
    """Its first record; committed records after it are unreadable."""
    producer_id: int
    epoch: int
    transactional_id: str | None
    """None if no coordinator has the producer."""
    committed: bool | None
    """The coordinator's decision; None if it is lost."""

    def __str__(self) -> str:
        """Format it as one line."""
        decided = {True: "was committed", False: "was aborted", None: "ended with an unknown outcome"}[self.committed]
        owner = self.transactional_id or f"producer {self.producer_id}"
        return f"{self.topic}/{self.partition}: the transaction of {owner} at offset {self.offset} {decided}, but its end is missing there"


def find(admin: Admin, topics: Iterable[str], *, patience_s: float = PATIENCE_S) -> list[Hanging]:
    """Hanging transactions in these topics; takes `patience_s` if any transaction is open. Raises `LogError`."""
    partitions = [(topic, number) for topic in topics for number in range(admin.partitions(topic) or 0)]
    before = _open_offsets(admin, partitions)
    if not before:
        return []
    time.sleep(patience_s)
    after = _open_offsets(admin, before)
    stuck = [partition for partition, offset in after.items() if before[partition] == offset]
    producers = admin.producers(stuck)
    first = {tp: state for tp in stuck for state in producers[tp] if state.current_transaction_start_offset == after[tp]}
    transactions = admin.transactions({state.producer_id for state in first.values()})
    results = [_hanging(tp, state, transactions.get(state.producer_id)) for tp, state in first.items()]
    return [hanging for hanging in results if hanging is not None]


def end(admin: Admin, hanging: Hanging, *, commit: bool) -> None:
    """Write the missing end; requires the right to alter the cluster. Raises `LogError`."""
    where = TopicPartition(hanging.topic, hanging.partition)
    admin.request(
        f"cannot end the transaction at {hanging.topic}/{hanging.partition}/{hanging.offset}",
        lambda client: private_api.write_end_marker(client, where, hanging.producer_id, hanging.epoch, commit=commit),
    )


def _open_offsets(admin: Admin, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """Partition -> start offset of its oldest open transaction; omits partitions without one."""
    partitions = list(partitions)
    readable, written = (admin.offsets(partitions, end=True, committed=committed) for committed in (True, False))
    return {partition: readable[partition] for partition in partitions if readable[partition] < written[partition]}


def _hanging(partition: Partition, state: ProducerState, transaction: tuple[str, TransactionDescription] | None) -> Hanging | None:
    """The transaction as hanging; None while its coordinator has it open or has yet to end it here."""
    name, described = transaction if transaction is not None else (None, None)
    committed = None
    if described is not None:
        if TopicPartition(*partition) in described.topic_partitions and described.state in (TransactionState.ONGOING, *_ENDING):
            return None
        # Since Kafka 4.0 the end of a transaction raises the epoch by one; a larger difference means another transaction.
        if described.producer_epoch - state.producer_epoch in (0, 1):
            committed = _DECIDED.get(described.state)
    return Hanging(
        topic=partition[0],
        partition=partition[1],
        offset=state.current_transaction_start_offset,
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        transactional_id=name,
        committed=committed,
    )
