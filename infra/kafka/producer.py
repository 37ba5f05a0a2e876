"""Writes single records: each is acknowledged, or its `Pending` and the next `flush` raise."""

import threading
import time
from typing import Any

from kafka import KafkaProducer, errors

from penstock.infra.errors import LogError, OutcomeUnknown, SendFailed
from penstock.infra.kafka import errors as edge
from penstock.infra.kafka import settings
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.cluster.admin import Admin
from penstock.infra.kafka.cpu_meter import CpuCosts
from penstock.infra.kafka.outage import Contact, Wait
from penstock.infra.kafka.settings import Connection
from penstock.topics.wire.record import Outgoing

_RECORD_OVERHEAD = 512
"""[bytes] of futures, headers and batch bookkeeping that a record occupies beyond its value."""


def send(kafka: Any, outgoing: Outgoing) -> Any:
    """Pass a record to a client and return its future. Raises `KafkaError`; `KafkaTimeoutError` while the topic is unknown."""
    headers = list(outgoing.headers)
    return kafka.send(outgoing.topic, outgoing.value, key=outgoing.key, headers=headers, partition=outgoing.partition)


class KafkaPending:
    """A record that was sent; `offset` waits for the acknowledgement."""

    __slots__ = ("_future", "_owner", "_size", "_what")

    def __init__(self, future: Any, owner: "KafkaProducerOfRecords", size: int, what: str) -> None:
        self._future, self._owner, self._size, self._what = future, owner, size, what
        future._add_cb_eb(self._written, self._lost)

    def _written(self, _: Any) -> None:
        self._owner._settle(self._size, None)

    def _lost(self, error: BaseException) -> None:
        self._owner._settle(self._size, edge.translate(error, f"cannot write to {self._what}"))

    def offset(self, timeout_s: float | None = None) -> int:
        """Return the offset; None waits as long as the producer. Raises `SendFailed`, `OutcomeUnknown`, or `LogError` after `timeout_s`."""
        try:
            offset: int = self._future.get(timeout_s).offset
        except errors.KafkaError as error:
            if not self._future.is_done and timeout_s is not None:
                raise LogError(f"no answer from {self._what} within {timeout_s:.0f} s; the record is still in flight") from None
            raise edge.translate(error, f"cannot write to {self._what}") from error
        return offset

    def done(self) -> bool:
        """True once the record is acknowledged or has failed."""
        return bool(self._future.is_done)

    def error(self) -> Exception | None:
        """Cause of the failure; None while in flight or once written."""
        failed = self._future.exception
        return None if failed is None else edge.translate(failed, f"cannot write to {self._what}")


class KafkaProducerOfRecords:
    """An idempotent producer with a byte budget; safe to share between threads."""

    def __init__(
        self,
        connection: Connection,
        costs: CpuCosts,
        contact: Contact,
        admin: Admin,
        *,
        max_in_flight_bytes: int,
        give_up_s: float,
        linger_ms: float,
    ) -> None:
        self._admin, self._costs, self._wait = admin, costs, Wait(contact)
        self._budget, self._give_up_s = max_in_flight_bytes, give_up_s
        configs = settings.producer(connection, give_up_s=give_up_s, linger_ms=linger_ms)
        self._kafka = contact.reach(lambda: edge.make(KafkaProducer, connection, configs))
        costs.watch(private_api.io_thread(self._kafka), "io_s")
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
        with self._room:
            if self._in_flight and self._in_flight + size > self._budget:
                self._waiting += 1
                free = self._room.wait_for(lambda: not self._in_flight or self._in_flight + size <= self._budget, self._give_up_s)
                self._waiting -= 1
                if not free:
                    raise SendFailed(
                        f"the broker took nothing for {self._give_up_s:.0f} s with {self._in_flight} bytes waiting; is it running?"
                    )
            self._in_flight += size
            self._wait.start()

    def _append(self, outgoing: Outgoing) -> Any:
        """Pass the record to the client; waits for the topic's metadata during an outage."""
        self._admin.require([(outgoing.topic, outgoing.partition)])  # waiting for a missing topic would never end
        deadline = time.monotonic() + self._give_up_s
        while True:
            try:
                return send(self._kafka, outgoing)
            except errors.KafkaTimeoutError as error:
                if time.monotonic() > deadline:
                    raise SendFailed(f"no broker sent metadata of {outgoing.topic} within {self._give_up_s:.0f} s") from error
            except (errors.KafkaError, ValueError) as error:
                raise SendFailed(f"cannot write to {outgoing.topic}/{outgoing.partition}: {edge.one_line(error)}") from error

    def _settle(self, size: int, failure: LogError | None) -> None:
        """Record that a send was acknowledged or has failed."""
        if failure is None:
            self._wait.responded(more=True)
        elif self._failure is None:
            self._failure = failure
        self._release(size)

    def _release(self, size: int) -> None:
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
            raise OutcomeUnknown(f"{self._in_flight} bytes are not acknowledged after {timeout_s:.0f} s") from None
        with self._room:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = 3.0) -> None:
        """Finish the records in flight, within `timeout_s`, and stop."""
        self._costs.unwatch(private_api.io_thread(self._kafka))
        private_api.close_producer(self._kafka, timeout_s)
