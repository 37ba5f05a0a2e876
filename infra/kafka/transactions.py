"""Writes records and group offsets together or not at all.

A producer that met any error is never used again. Its successor takes the id only if no other process has, checks whether the last
transaction was committed, and repeats it only if it certainly was not. The newest claim in the log names the owner of the id: it is
read after every renewal of the epoch, before anything else is written.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka import ConsumerGroupMetadata, KafkaProducer, errors

from penstock.infra import faults
from penstock.infra.errors import Fenced, LogError, LogUnreachable, LostPartition, OutcomeUnknown, SendFailed
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.outage import Contact, Wait
from penstock.infra.kafka.producer import send
from penstock.infra.kafka.reading import consumer
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import Commits, Membership, Written
from penstock.topics.wire.record import Outgoing

Visible = Callable[[str, int, int], bool]
"""Returns True if a committed record is at (topic, partition, offset). Raises `LogError` if that cannot be read."""

Newest = Callable[[str, int, bytes | None], bytes | None]
"""Returns the value of the newest committed record with (topic, partition, key). Raises `LogError` if that cannot be read."""

_FINAL = (*edge.NEVER_WRITTEN, *edge.REFUSED, ValueError, TypeError)
"""Errors that are not retried. All others are transient, even `Fenced` if only our own transaction took too long."""


class KafkaTransactions:
    """Transactions of one id, one at a time; the newest instance for an id is its only writer."""

    def __init__(
        self,
        connection: Connection,
        costs: CpuCosts,
        contact: Contact,
        admin: Admin,
        visible: Visible,
        newest: Newest,
        *,
        transactional_id: str,
        claim: Outgoing | None,
        timeout_s: float,
        give_up_s: float,
    ) -> None:
        self._connection, self._costs, self._admin = connection, costs, admin
        self._visible, self._newest, self._claim = visible, newest, claim
        self._contact, self._wait = contact, Wait(contact)
        self._id, self._timeout_s, self._give_up_s = transactional_id, timeout_s, give_up_s
        self._configs = settings.transactional(connection, transactional_id=transactional_id, timeout_s=timeout_s)
        self._identity: Any = None
        """Last producer id and epoch; None before the id was taken: then no other epoch is newer than ours."""
        self._kafka: Any = None
        self._fenced, self._written = False, Written()
        self._wait.start()
        self._take_over(time.monotonic() + give_up_s)
        self._wait.responded()

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]:
        """Write everything or nothing and return the records' offsets; waits out an outage.

        Raises `SendFailed` if certainly nothing was written, `OutcomeUnknown` if that is uncertain, `Fenced` if another process has
        taken this id, `LostPartition` if `member`'s generation is over, `LogUnreachable` after `give_up_s`: then, too, the outcome is
        unknown.
        """
        if offsets and member is None:
            raise ValueError("offsets in a transaction need the membership they are committed for")
        deadline = time.monotonic() + self._give_up_s
        self._wait.start()
        try:
            self._admin.require((record.topic, record.partition) for record in records)  # waiting for a missing one would never end
        except LogUnreachable:
            raise
        except LogError as error:
            raise SendFailed(f"nothing was written as {self._id}: {error}") from error
        try:
            with self._costs.count("send_s"):
                return self._commit(records, offsets or {}, member, deadline)
        finally:
            self._wait.end()

    def _commit(self, records: Sequence[Outgoing], offsets: Commits, member: Membership | None, deadline: float) -> list[int]:
        while True:
            try:
                self._open(deadline)
                written = self._attempt(records, offsets, member, deadline)
                self._wait.responded()
                self._written.check(records, written)
                return written
            except LogUnreachable as error:
                raise self._contact.unreachable(self._give_up_s) from error
            except SendFailed as failure:
                if isinstance(failure.__cause__, _FINAL):
                    raise
                if time.monotonic() > deadline:
                    raise self._contact.unreachable(self._give_up_s) from failure
                self._contact.counts["transaction_retries"] += 1
                time.sleep(0.05)

    def _attempt(self, records: Sequence[Outgoing], offsets: Commits, member: Membership | None, deadline: float) -> list[int]:
        """Run one transaction; discards the producer on any error."""
        kafka = self._kafka
        end = time.monotonic() + self._timeout_s
        try:
            kafka.begin_transaction()
            futures = [send(kafka, record) for record in records]
            if offsets and member is not None:
                group = ConsumerGroupMetadata(member.group, member.generation, member.member_id, None)
                private_api.send_offsets(kafka, consumer.to_kafka(offsets), group, self._timeout_s)
            written = [future.get(max(0.01, end - time.monotonic())).offset for future in futures]
        except (errors.KafkaError, ValueError, TypeError) as error:
            cause = private_api.first_error(kafka) or error  # later calls only report that an earlier one failed
            self._drop()
            raise self._unwritten(cause) from cause
        faults.reach("transaction.sent")
        try:
            private_api.commit_transaction(kafka, self._timeout_s)
        except errors.KafkaError as error:
            cause = private_api.first_error(kafka) or error
            self._drop()
            self._settle(records, written, cause, deadline)
        return written

    def _unwritten(self, error: Exception) -> Exception:
        """The error to raise for a failure before the commit was sent; the successor aborts the transaction."""
        what = f"nothing was written as {self._id}"
        if isinstance(error, edge.GENERATION_OVER):
            return LostPartition(f"{what}: the consumer group has moved on to another generation")
        return SendFailed(f"{what}: {edge.one_line(error)}")

    def _settle(self, records: Sequence[Outgoing], written: Sequence[int], error: Exception, deadline: float) -> None:
        """Find out the outcome of a commit that timed out: return if it was committed, else raise `SendFailed` or `OutcomeUnknown`."""
        unknown = OutcomeUnknown(f"no answer to the commit as {self._id}: read the log to find out whether it was written")
        try:
            self._open(deadline)  # when it returns, the old transaction is committed or aborted
            if not records:
                raise unknown from error
            visible = self._visible(records[0].topic, records[0].partition, written[0])
        except (Fenced, LogUnreachable):
            raise
        except LogError:
            raise unknown from error
        if not visible:
            raise SendFailed(f"nothing was written as {self._id}: the broker aborted the transaction") from error

    def _drop(self) -> None:
        kafka, self._kafka = self._kafka, None
        self._identity = private_api.producer_identity(kafka)
        self._costs.unwatch(private_api.io_thread(kafka))
        private_api.close_producer(kafka, 0)

    def _take_over(self, deadline: float) -> None:
        """Take the id from its current owner and write the claim under the fresh epoch, before anything else.

        A failed attempt restarts with another fresh epoch: before the claim is written, a writer that renews its own may interfere.
        """
        while True:
            self._open(deadline)
            try:
                if self._claim is not None:
                    self._kafka.begin_transaction()
                    send(self._kafka, self._claim).get(self._timeout_s)
                    private_api.commit_transaction(self._kafka, self._timeout_s)
                return
            except (errors.KafkaError, ValueError, TypeError) as error:
                cause = private_api.first_error(self._kafka) or error
                self._drop()
                self._identity = None
                if isinstance(cause, _FINAL) or time.monotonic() > deadline:
                    raise edge.translate(cause, f"cannot take over {self._id}") from cause
                time.sleep(0.05)

    def _open(self, deadline: float) -> None:
        """Create the producer if there is none; waits for the broker until `deadline`. Raises `Fenced` or `LogUnreachable`."""
        while self._kafka is None:
            if self._fenced:
                raise self._refusal()
            kafka: Any = None
            try:
                kafka = edge.make(KafkaProducer, self._connection, self._configs)
                private_api.init_transactions(kafka, self._identity, self._timeout_s)
                self._require_own_claim()
            except (errors.KafkaError, LogError) as error:
                if kafka is not None:
                    private_api.close_producer(kafka, 0)
                self._open_failed(error, deadline)
            else:
                self._kafka = kafka
                self._costs.watch(private_api.io_thread(kafka), "io_s")

    def _open_failed(self, error: errors.KafkaError | LogError, deadline: float) -> None:
        """Raise unless another attempt may succeed."""
        if isinstance(error, errors.ProducerFencedError):
            self._adopt_own_epoch(error)
        elif isinstance(error, LogError) and not isinstance(error, LogUnreachable):
            raise error
        if time.monotonic() > deadline or isinstance(error, _FINAL):
            raise edge.translate(error, f"cannot write as {self._id}") from error
        time.sleep(0.05)

    def _adopt_own_epoch(self, error: errors.ProducerFencedError) -> None:
        """Adopt the epoch to which the broker has raised ours. Raises `Fenced` if another process raised it.

        A broker that crashes between raising the epoch and responding leaves us with the old one, also after its restart.
        """
        if self._claim is None or self._identity is None:
            self._fenced = True
            raise self._refusal() from error
        self._require_own_claim()
        holder = self._admin.holder(self._id)
        self._identity = type(self._identity)(holder.producer_id, holder.epoch)

    def _require_own_claim(self) -> None:
        """Raise `Fenced` for good unless the newest claim is ours; without effect before ours is written."""
        claim = self._claim
        if claim is None or self._identity is None:
            return
        if self._newest(claim.topic, claim.partition, claim.key) != bytes(claim.value):
            self._fenced = True
            raise self._refusal()

    def _refusal(self) -> Fenced:
        self._contact.counts["fenced"] += 1
        return Fenced(f"another process writes as {self._id} now: this one must stop")

    def close(self, timeout_s: float = 3.0) -> None:
        """Stop, within `timeout_s`."""
        if self._kafka is not None:
            kafka, self._kafka = self._kafka, None
            self._costs.unwatch(private_api.io_thread(kafka))
            private_api.close_producer(kafka, timeout_s)
