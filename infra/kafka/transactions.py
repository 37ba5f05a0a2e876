"""Writes records and group offsets together or not at all.

The rule: a producer that met any error is never used again. Its successor takes the id only if no other process has, checks
whether the last transaction was committed, and repeats it only when it certainly was not. Whose the id is, the newest claim in the
log says: after every renewal it is read again, before anything else is written.
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
"""Returns whether a committed record is at (topic, partition, offset); raises LogError when that cannot be read."""

Newest = Callable[[str, int, bytes | None], bytes | None]
"""Returns the value of the newest committed record with (topic, partition, key); raises LogError when that cannot be read."""

_FINAL = (*edge.NEVER_WRITTEN, *edge.REFUSED, ValueError, TypeError)
"""Errors that another attempt would meet again. All others are transient, even Fenced when only our own transaction took too long."""


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
        self._meter = costs.meter("send_s")
        self._identity: Any = None
        """Producer id and epoch as last known; None before the id was taken: then nobody else's epoch outlives ours."""
        self._kafka: Any = None
        self._fenced, self._written = False, Written()
        self._wait.begin()
        self._take_over(time.monotonic() + give_up_s)
        self._wait.answered()

    def commit(self, records: Sequence[Outgoing], *, offsets: Commits | None = None, member: Membership | None = None) -> list[int]:
        """Write all of it or nothing and return the records' offsets; waits for a broker that is away.

        Raises SendFailed when certainly nothing was written, OutcomeUnknown when that is uncertain, Fenced when another
        process has this id, LostPartition when `member`'s assignment is over, LogUnreachable when the broker stays away: what
        became of the records is unknown then, too.
        """
        if offsets and member is None:
            raise ValueError("offsets in a transaction need the membership they are committed for")
        began = time.thread_time()
        deadline = time.monotonic() + self._give_up_s
        self._wait.begin()
        try:
            self._admin.require((record.topic, record.partition) for record in records)  # waiting for a missing one would be in vain
        except LogUnreachable:
            raise
        except LogError as error:
            raise SendFailed(f"nothing was written as {self._id}: {error}") from error
        try:
            while True:
                try:
                    self._open(deadline)
                    written = self._attempt(records, offsets or {}, member, deadline)
                    self._wait.answered()
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
        finally:
            self._wait.end()
            self._meter.seconds += time.thread_time() - began

    def _attempt(self, records: Sequence[Outgoing], offsets: Commits, member: Membership | None, deadline: float) -> list[int]:
        """Run one transaction from begin to end; on any error the producer is discarded."""
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
            cause = private_api.first_error(kafka) or error  # later calls only report that something failed before
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
        """The error to raise for a failure before the commit was sent; the successor aborts what was begun."""
        what = f"nothing was written as {self._id}"
        if isinstance(error, edge.GENERATION_OVER):
            return LostPartition(f"{what}: the consumer group has moved on to another generation")
        return SendFailed(f"{what}: {edge.one_line(error)}")

    def _settle(self, records: Sequence[Outgoing], written: Sequence[int], error: Exception, deadline: float) -> None:
        """After a commit without an answer: return when it was committed, else raise SendFailed or OutcomeUnknown."""
        unknown = OutcomeUnknown(f"no answer to the commit as {self._id}: read the log to learn whether it was written")
        try:
            self._open(deadline)  # by its return the old transaction has ended one way or the other
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
        """Take the id from whoever has it, and write the claim under the fresh epoch, before anything else.

        An attempt that fails begins again with another fresh epoch: until the claim stands, a writer that renews its own may come between.
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
        """Make the producer if there is none; waits for the broker until `deadline`, raises Fenced or LogUnreachable."""
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
        """Return where another attempt may do, else raise."""
        if isinstance(error, errors.ProducerFencedError):
            self._adopt_own_epoch(error)
        elif isinstance(error, LogError) and not isinstance(error, LogUnreachable):
            raise error
        if time.monotonic() > deadline or isinstance(error, _FINAL):
            raise edge.translate(error, f"cannot write as {self._id}") from error
        time.sleep(0.05)

    def _adopt_own_epoch(self, error: errors.ProducerFencedError) -> None:
        """Take the epoch that the broker has raised ours to, unless another process did that; then raise Fenced.

        A broker that dies between raising the epoch and answering leaves us with the old one, also after its restart.
        """
        if self._claim is None or self._identity is None:
            self._fenced = True
            raise self._refusal() from error
        self._require_own_claim()
        holder = self._admin.holder(self._id)
        self._identity = type(self._identity)(holder.producer_id, holder.epoch)

    def _require_own_claim(self) -> None:
        """Raise Fenced for good unless the newest claim is ours; nothing to ask before ours is written."""
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
        self._costs.retire(self._meter)
        if self._kafka is not None:
            kafka, self._kafka = self._kafka, None
            self._costs.unwatch(private_api.io_thread(kafka))
            private_api.close_producer(kafka, timeout_s)
