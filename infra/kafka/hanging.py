"""Finds and ends open transactions that the cluster has lost.

Such a transaction in `__consumer_offsets` hides the committed offset of a partition from its next owner.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kafka import TopicPartition
from kafka.admin import ProducerState, TransactionDescription, TransactionState

from penstock.infra.kafka.admin import GROUP_OFFSETS, Admin
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.log import TRANSACTION_S, Partition

PATIENCE_S = TRANSACTION_S + 5.0
"""An active transaction ends within `TRANSACTION_S`, and the last stable offset moves past it."""
_ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE)
_COMMITTED = (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
_ABORTED = (TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE, TransactionState.COMPLETE_ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanging:
    """An open transaction in one partition that no coordinator will end.

    A coordinator takes a partition without a leader for deleted: it writes no end there and marks the transaction as complete (Apache Kafka
    4.1 to 4.3.1, KAFKA-20734). Readers of committed records then wait there for ever, and the next action of the same producer in the
    partition also decides about these records. A transaction that its coordinator may still end is left alone, and only the coordinator's
    decision is written.
    """

    topic: str
    partition: int
    offset: int
    """Offset of its first record, at which readers of committed records wait."""
    producer_id: int
    epoch: int
    transactional_id: str | None
    """None if no coordinator has the producer."""
    committed: bool | None
    """The coordinator's decision; None if it is lost."""

    def __str__(self) -> str:
        decided = {True: "was committed", False: "was aborted", None: "ended with an unknown outcome"}[self.committed]
        owner = self.transactional_id or f"producer {self.producer_id}"
        return f"{self.topic}/{self.partition}: the transaction of {owner} at offset {self.offset} {decided}, but its end marker is missing"


def _transactions_of(admin: Admin, producer_ids: Collection[int]) -> dict[int, tuple[str, TransactionDescription]]:
    """Return producer id -> (transactional id, its coordinator's description), without producers that no coordinator has."""
    if not producer_ids:
        return {}
    ids = list(producer_ids)
    listed = admin.request("cannot list transactions", lambda client: client.list_transactions(producer_id_filters=ids))
    names = {listing.producer_id: listing.transactional_id for of_broker in listed.values() for listing in of_broker}
    described = admin.request("cannot look up transactions", lambda client: client.describe_transactions(list(names.values())))
    return {number: (name, described[name]) for number, name in names.items() if name in described}


def hanging_transactions(admin: Admin, topics: Iterable[str], *, patience_s: float = PATIENCE_S) -> list[Hanging]:
    """Return open transactions of these topics and of group offsets that no coordinator will end; takes `patience_s` if any is open."""
    partitions = [(topic, number) for topic in (*topics, GROUP_OFFSETS) for number in range(admin.partitions(topic) or 0)]
    before = _open_offsets(admin, partitions)
    if not before:
        return []
    time.sleep(patience_s)
    after = _open_offsets(admin, before)
    stuck = [TopicPartition(*partition) for partition, offset in after.items() if before[partition] == offset]
    states = admin.request("cannot look up the producers", lambda client: client.describe_producers(stuck)) if stuck else {}
    first = {
        (tp.topic, tp.partition): producer
        for tp, state in states.items()
        for producer in state.active_producers
        if producer.current_transaction_start_offset == after[tp.topic, tp.partition]
    }
    transactions = _transactions_of(admin, {state.producer_id for state in first.values()})
    results = [_hanging(tp, state, transactions.get(state.producer_id)) for tp, state in first.items()]
    return [hanging for hanging in results if hanging is not None]


def end_hanging(admin: Admin, hanging: Hanging, *, commit: bool) -> None:
    """Write the missing end marker; requires the right to alter the cluster. Raises `LogError`."""
    where = TopicPartition(hanging.topic, hanging.partition)
    admin.request(
        f"cannot end the transaction at {hanging.topic}/{hanging.partition}/{hanging.offset}",
        lambda client: private_api.write_end_marker(client, where, hanging.producer_id, hanging.epoch, commit=commit),
    )


def _open_offsets(admin: Admin, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """Return partition -> start offset of its oldest open transaction, without partitions that have none."""
    partitions = list(partitions)
    readable, written = (admin.offsets(partitions, end=True, committed=committed) for committed in (True, False))
    return {partition: readable[partition] for partition in partitions if readable[partition] < written[partition]}


def _hanging(partition: Partition, state: ProducerState, transaction: tuple[str, TransactionDescription] | None) -> Hanging | None:
    """Describe a hanging transaction; None while its coordinator has it open or may still end it in this partition."""
    name, described = transaction if transaction is not None else (None, None)
    committed = None
    if described is not None:
        if TopicPartition(*partition) in described.topic_partitions and described.state in (TransactionState.ONGOING, *_ENDING):
            return None
        # Since Kafka 4.0 the end of a transaction raises the epoch by one; a larger difference means another transaction.
        if described.producer_epoch - state.producer_epoch in (0, 1):
            committed = True if described.state in _COMMITTED else False if described.state in _ABORTED else None
    return Hanging(
        topic=partition[0], partition=partition[1], offset=state.current_transaction_start_offset, producer_id=state.producer_id,
        epoch=state.producer_epoch, transactional_id=name, committed=committed,
    )  # fmt: skip
