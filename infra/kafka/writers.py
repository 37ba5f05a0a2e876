"""Writes single records, each acknowledged or reported, and transactions of records and group offsets.

A transactional producer that met any error is never used again. Its successor takes the id only if no other process has, checks whether the
last transaction was committed, and repeats it only if it certainly was not. The newest claim in the log names the owner of the id: it is
read after every renewal of the epoch, before anything else is written.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka import ConsumerGroupMetadata, KafkaProducer, errors

from penstock.infra import faults
from penstock.infra.errors import Fenced, LogError, LogUnreachable, LostPartition, OutcomeUnknown, SendFailed
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.admin import Admin
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.outage import Wait
from penstock.infra.kafka.tail import to_kafka
from penstock.infra.log import Commits, Membership, Written
from penstock.topics.wire.record import Outgoing

_RECORD_OVERHEAD = 512
"""[bytes] of futures, headers and batch bookkeeping that a record occupies beyond its value."""


def send(kafka: Any, outgoing: Outgoing) -> Any:
    """Pass a record to a client and return its future. Raises `KafkaError`; `KafkaTimeoutError` while the topic is unknown."""
    headers = list(outgoing.headers)
    return kafka.send(outgoing.topic, outgoing.value, key=outgoing.key, headers=headers, partition=outgoing.partition)


class KafkaPending:
    """A sent record; `offset` waits for its acknowledgement."""

    __slots__ = ("_future", "_what")

    def __init__(self, future: Any, owner: "KafkaProducerOfRecords", size: int, what: str) -> None:
        self._future, self._what = future, what
        lost = f"cannot write to {what}"
        future._add_cb_eb(lambda _: owner._settle(size, None), lambda error: owner._settle(size, edge.translate(error, lost)))

    def offset(self, timeout_s: float | None = None) -> int:
        """Return the offset; None waits as long as the producer. Raises `SendFailed`, `OutcomeUnknown`, or `LogError` after `timeout_s`."""
        try:
            offset: int = self._future.get(timeout_s).offset
        except errors.KafkaError as error:
            if not self._future.is_done and timeout_s is not None:
                raise LogError(f"{self._what}: the record was not acknowledged within {timeout_s:.0f} s; it is still in flight") from None
            raise edge.translate(error, f"cannot write to {self._what}") from error
        return offset

    def done(self) -> bool:
        """Return True once the record is acknowledged or has failed."""
        return bool(self._future.is_done)


class KafkaProducerOfRecords:
    """An idempotent producer with a byte budget; safe to share between threads."""

    def __init__(self, admin: Admin, *, max_in_flight_bytes: int, give_up_s: float, linger_ms: float) -> None:
        self._admin, self._costs, self._wait = admin, admin.cpu, Wait(admin.contact)
        self._budget, self._give_up_s = max_in_flight_bytes, give_up_s
        configs = settings.producer(admin.connection, give_up_s=give_up_s, linger_ms=linger_ms)
        self._kafka = admin.contact.reach(lambda: edge.make(KafkaProducer, admin.connection, configs))
        self._costs.watch(private_api.io_thread(self._kafka), "io_s")
        self._room = threading.Condition()
        self._in_flight = 0
        self._waiting = 0
        self._failure: LogError | None = None

    def send(self, outgoing: Outgoing) -> KafkaPending:
        """Send a record; blocks while the byte budget is used up. Raises `LogError` after `give_up_s`."""
        with self._costs.count("send_s"):
            size = len(outgoing.value) + _RECORD_OVERHEAD
            self._reserve(size)
            try:
                future = self._append(outgoing)
            except BaseException:
                self._release(size)
                raise
            return KafkaPending(future, self, size, f"{outgoing.topic}/{outgoing.partition}")

    def _reserve(self, size: int) -> None:
        """Wait until the byte budget has room for a record. Raises `SendFailed` if the broker accepts nothing for `give_up_s`."""
        with self._room:
            if self._in_flight and self._in_flight + size > self._budget:
                self._waiting += 1
                free = self._room.wait_for(lambda: not self._in_flight or self._in_flight + size <= self._budget, self._give_up_s)
                self._waiting -= 1
                if not free:
                    raise SendFailed(f"the broker accepted no record for {self._give_up_s:.0f} s (kafka.give_up_s): is it running?")
            self._in_flight += size
            self._wait.start()

    def _append(self, outgoing: Outgoing) -> Any:
        """Pass the record to the client and return its future; waits for the topic's metadata during an outage. Raises `SendFailed`."""
        self._admin.require([(outgoing.topic, outgoing.partition)])  # waiting for a missing topic would never end
        deadline = time.monotonic() + self._give_up_s
        while True:
            try:
                return send(self._kafka, outgoing)
            except errors.KafkaTimeoutError as error:
                if time.monotonic() > deadline:
                    raise SendFailed(f"no broker returned metadata of topic {outgoing.topic} within {self._give_up_s:.0f} s") from error
            except (errors.KafkaError, ValueError) as error:
                raise SendFailed(f"cannot write to {outgoing.topic}/{outgoing.partition}: {edge.one_line(error)}") from error

    def _settle(self, size: int, failure: LogError | None) -> None:
        """Account for a record that was acknowledged or has failed: free its bytes, and store the first failure for `check`."""
        if failure is None:
            self._wait.responded(more=True)
        elif self._failure is None:
            self._failure = failure
        self._release(size)

    def _release(self, size: int) -> None:
        """Free `size` bytes of the budget, and wake the threads that wait for room."""
        with self._room:
            self._in_flight -= size
            if not self._in_flight:
                self._wait.end()
            if self._waiting:
                self._room.notify_all()

    def check(self) -> None:
        """Raise the first failure since the last flush; for callers that send without waiting."""
        if self._failure is not None:
            raise self._failure

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until every record sent so far is acknowledged. Raises the first failure since the last flush."""
        try:
            self._kafka.flush(timeout_s)
        except errors.KafkaTimeoutError:
            raise OutcomeUnknown(f"{self._in_flight} bytes are not acknowledged after {timeout_s:.0f} s, and may yet be written") from None
        with self._room:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = 3.0) -> None:
        """Finish the records in flight, within `timeout_s`, and stop."""
        self._costs.unwatch(private_api.io_thread(self._kafka))
        private_api.close_producer(self._kafka, timeout_s)


Visible = Callable[[str, int, int], bool]
"""Returns True if a committed record is at (topic, partition, offset). Raises `LogError` if that cannot be read."""

Newest = Callable[[str, int, bytes | None], bytes | None]
"""Returns the value of the newest committed record with (topic, partition, key). Raises `LogError` if that cannot be read."""

_FINAL = (*edge.NEVER_WRITTEN, *edge.REFUSED, ValueError, TypeError)
"""Errors that are not retried. All others are transient, even `Fenced` if only our own transaction took too long."""


class KafkaTransactions:
    """Writes transactions with one transactional id, one at a time; the newest instance for an id is its only writer."""

    def __init__(
        self, admin: Admin, visible: Visible, newest: Newest, *, transactional_id: str, claim: Outgoing | None, timeout_s: float,
        give_up_s: float,
    ) -> None:  # fmt: skip
        self._admin, self._costs = admin, admin.cpu
        self._visible, self._newest, self._claim = visible, newest, claim
        self._contact, self._wait = admin.contact, Wait(admin.contact)
        self._id, self._timeout_s, self._give_up_s = transactional_id, timeout_s, give_up_s
        self._configs = settings.transactional(admin.connection, transactional_id=transactional_id, timeout_s=timeout_s)
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
            raise ValueError("offsets can be committed in a transaction only together with the consumer group's generation")
        deadline = time.monotonic() + self._give_up_s
        self._wait.start()
        try:
            self._admin.require((record.topic, record.partition) for record in records)  # waiting for a missing one would never end
        except LogUnreachable:
            raise
        except LogError as error:
            raise SendFailed(f"the transaction of {self._id} wrote nothing: {error}") from error
        try:
            with self._costs.count("send_s"):
                return self._commit(records, offsets or {}, member, deadline)
        finally:
            self._wait.end()

    def _commit(self, records: Sequence[Outgoing], offsets: Commits, member: Membership | None, deadline: float) -> list[int]:
        """Repeat the transaction until it is committed, fails for good, or the deadline has passed."""
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
        """Run one transaction and return the records' offsets; on any error, discard the producer and raise or find out the outcome."""
        kafka = self._kafka
        end = time.monotonic() + self._timeout_s
        try:
            kafka.begin_transaction()
            futures = [send(kafka, record) for record in records]
            if offsets and member is not None:
                group = ConsumerGroupMetadata(member.group, member.generation, member.member_id, None)
                private_api.send_offsets(kafka, to_kafka(offsets), group, self._timeout_s)
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
        """Return the error to raise for a failure before the commit was sent; the next producer aborts the transaction."""
        what = f"the transaction of {self._id} wrote nothing"
        if isinstance(error, edge.GENERATION_OVER):
            return LostPartition(f"{what}: the consumer group has moved on to another generation")
        return SendFailed(f"{what}: {edge.one_line(error)}")

    def _settle(self, records: Sequence[Outgoing], written: Sequence[int], error: Exception, deadline: float) -> None:
        """Find out the outcome of a commit that timed out: return if it was committed, else raise `SendFailed` or `OutcomeUnknown`."""
        unknown = OutcomeUnknown(f"no response to the commit of a transaction of {self._id}: it may or may not be written")
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
            raise SendFailed(f"the transaction of {self._id} wrote nothing: the broker aborted it") from error

    def _drop(self, timeout_s: float = 0.0) -> None:
        """Close the producer within `timeout_s`, but remember its id and epoch for the next one."""
        kafka, self._kafka = self._kafka, None
        self._identity = private_api.producer_identity(kafka)
        self._costs.unwatch(private_api.io_thread(kafka))
        private_api.close_producer(kafka, timeout_s)

    def _take_over(self, deadline: float) -> None:
        """Take the transactional id from its current owner, and write the claim under the new epoch before anything else.

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
                    raise edge.translate(cause, f"cannot take over the transactional id {self._id}") from cause
                time.sleep(0.05)

    def _open(self, deadline: float) -> None:
        """Create the producer if there is none; waits for the broker until `deadline`. Raises `Fenced` or `LogUnreachable`."""
        while self._kafka is None:
            if self._fenced:
                raise self._refusal()
            kafka: Any = None
            try:
                kafka = edge.make(KafkaProducer, self._admin.connection, self._configs)
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
        """Return after a pause if opening the producer may succeed later; otherwise raise the translated error."""
        error = private_api.specific(error)
        if isinstance(error, errors.ProducerFencedError):
            self._adopt_own_epoch(error)
        elif isinstance(error, LogError) and not isinstance(error, LogUnreachable):
            raise error
        if time.monotonic() > deadline or isinstance(error, _FINAL):
            raise edge.translate(error, f"cannot write with the transactional id {self._id}") from error
        time.sleep(0.05)

    def _adopt_own_epoch(self, error: errors.ProducerFencedError) -> None:
        """Adopt the epoch to which the broker has raised ours. Raises `Fenced` if another process raised it.

        A broker that crashes between raising the epoch and responding leaves us with the old one, also after its restart.
        """
        if self._claim is None or self._identity is None:
            raise self._refusal() from error
        self._require_own_claim()
        self._identity = type(self._identity)(*self._admin.holder(self._id))

    def _require_own_claim(self) -> None:
        """Raise `Fenced`, now and ever after, if the newest claim is another process's; no effect before our claim is written."""
        claim = self._claim
        if claim is None or self._identity is None:
            return
        if self._newest(claim.topic, claim.partition, claim.key) != bytes(claim.value):
            raise self._refusal()

    def _refusal(self) -> Fenced:
        """Return the error to raise because another process has taken the id; from now on every transaction raises it."""
        self._fenced = True
        self._contact.counts["fenced"] += 1
        return Fenced(f"another process now writes with the transactional id {self._id}: this process must stop")

    def close(self, timeout_s: float = 3.0) -> None:
        """Stop the writer; wait at most `timeout_s`."""
        if self._kafka is not None:
            self._drop(timeout_s)
