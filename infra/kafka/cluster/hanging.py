"""Finds transactions whose end was lost in a partition, and writes it.

A coordinator to which a partition has no leader at the moment takes it for deleted: it writes no end there, and notes the transaction as
complete (Apache Kafka 4.1 to 4.3.1, KAFKA-20734). Who reads committed records waits there for ever, and whatever the same producer does
in the partition next decides about these records as well.

The rule: nothing is ended that its coordinator may still end; what the coordinator has decided is what is written.
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
"""A transaction at work ends within `TRANSACTION_S`, and so does the place behind which its records wait."""
GROUP_OFFSETS = "__consumer_offsets"
"""Kafka's own topic of group offsets: an end lost there keeps the next owner of a partition from learning where to begin."""

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
    """An open transaction in one partition that nobody will end."""

    topic: str
    partition: int
    offset: int
    """Its first record; committed records behind it are unreadable."""
    producer_id: int
    epoch: int
    transactional_id: str | None
    """None when no coordinator knows the producer any more."""
    committed: bool | None
    """What its coordinator has decided; None when that is no longer known."""

    def __str__(self) -> str:
        """Format it as one line."""
        decided = {True: "was committed", False: "was aborted", None: "ended in a way that is no longer known"}[self.committed]
        who = self.transactional_id or f"producer {self.producer_id}"
        return f"{self.topic}/{self.partition}: the transaction of {who} at offset {self.offset} {decided}, but its end is missing there"


def find(admin: Admin, topics: Iterable[str], *, patience_s: float = PATIENCE_S) -> list[Hanging]:
    """The hanging transactions in these topics; takes `patience_s` where any transaction is open. Raises `LogError`."""
    places = [(topic, number) for topic in topics for number in range(admin.partitions(topic) or 0)]
    before = _held_up(admin, places)
    if not before:
        return []
    time.sleep(patience_s)
    after = _held_up(admin, before)
    stuck = [place for place, offset in after.items() if before[place] == offset]
    producers = admin.producers(stuck)
    first = {place: state for place in stuck for state in producers[place] if state.current_transaction_start_offset == after[place]}
    known = admin.transactions({state.producer_id for state in first.values()})
    found = [_judged(place, state, known.get(state.producer_id)) for place, state in first.items()]
    return [hanging for hanging in found if hanging is not None]


def end(admin: Admin, hanging: Hanging, *, commit: bool) -> None:
    """Write the missing end; needs the right to alter the cluster. Raises `LogError`."""
    where = TopicPartition(hanging.topic, hanging.partition)
    admin.ask(
        f"cannot end the transaction at {hanging.topic}/{hanging.partition}/{hanging.offset}",
        lambda client: private_api.write_end_marker(client, where, hanging.producer_id, hanging.epoch, commit=commit),
    )


def _held_up(admin: Admin, places: Iterable[Partition]) -> dict[Partition, int]:
    """Partition -> the offset at which its oldest open transaction begins; those without one are left out."""
    wanted = list(places)
    readable, written = (admin.offsets(wanted, end=True, committed=committed) for committed in (True, False))
    return {place: readable[place] for place in wanted if readable[place] < written[place]}


def _judged(place: Partition, state: ProducerState, known: tuple[str, TransactionDescription] | None) -> Hanging | None:
    """The transaction at a place as hanging; None while its coordinator knows that it is open or has to be ended here."""
    name, described = known if known is not None else (None, None)
    committed = None
    if described is not None:
        if TopicPartition(*place) in described.topic_partitions and described.state in (TransactionState.ONGOING, *_ENDING):
            return None
        # Since Kafka 4.0 the end of a transaction raises the epoch by one; one further on, another transaction has come.
        if described.producer_epoch - state.producer_epoch in (0, 1):
            committed = _DECIDED.get(described.state)
    return Hanging(
        topic=place[0],
        partition=place[1],
        offset=state.current_transaction_start_offset,
        producer_id=state.producer_id,
        epoch=state.producer_epoch,
        transactional_id=name,
        committed=committed,
    )
