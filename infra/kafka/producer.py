"""Writing single records.

The rule: a record is acknowledged by the log, or its `Pending` and the next `flush` raise; nothing is lost silently.
"""

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
"""[bytes] a small record holds in memory beyond its value: futures, headers, batch bookkeeping."""


def send(kafka: Any, outgoing: Outgoing) -> Any:
    """Give a record to a client and return its future. Raises KafkaError; KafkaTimeoutError while the topic is unknown."""
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
        """The record's offset; raises SendFailed, OutcomeUnknown or, after `timeout_s`, LogError; None waits as long as the producer."""
        try:
            offset: int = self._future.get(timeout_s).offset
        except errors.KafkaError as error:
            if not self._future.is_done and timeout_s is not None:
                raise LogError(f"no answer from {self._what} within {timeout_s:.0f} s; the record is still on its way") from None
            raise edge.translate(error, f"cannot write to {self._what}") from error
        return offset

    def done(self) -> bool:
        """True once the record is acknowledged or has failed."""
        return bool(self._future.is_done)

    def error(self) -> Exception | None:
        """The reason it was not written; None while in flight or when written."""
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
        self._meter = costs.meter("send_s")
        costs.watch(private_api.io_thread(self._kafka), "io_s")
        self._room = threading.Condition()
        self._held = 0
        self._waiting = 0
        self._failure: LogError | None = None

    def send(self, outgoing: Outgoing) -> KafkaPending:
        """Send a record; blocks while the byte budget is used up. Raises LogError after `give_up_s`."""
        began = time.thread_time()
        size = len(outgoing.value) + _RECORD_OVERHEAD
        self._reserve(size)
        try:
            future = self._append(outgoing)
        except BaseException:
            self._release(size)
            raise
        pending = KafkaPending(future, self, size, f"{outgoing.topic}/{outgoing.partition}")
        with self._room:
            self._meter.seconds += time.thread_time() - began
        return pending

    def _reserve(self, size: int) -> None:
        with self._room:
            if self._held and self._held + size > self._budget:
                self._waiting += 1
                free = self._room.wait_for(lambda: not self._held or self._held + size <= self._budget, self._give_up_s)
                self._waiting -= 1
                if not free:
                    raise SendFailed(f"the broker took nothing for {self._give_up_s:.0f} s with {self._held} bytes waiting; is it running?")
            self._held += size
            self._wait.begin()

    def _append(self, outgoing: Outgoing) -> Any:
        """Give the record to the client, waiting for the topic's metadata while the broker is away."""
        self._admin.require([(outgoing.topic, outgoing.partition)])  # waiting for a missing topic would be in vain
        deadline = time.monotonic() + self._give_up_s
        while True:
            try:
                return send(self._kafka, outgoing)
            except errors.KafkaTimeoutError as error:
                if time.monotonic() > deadline:
                    raise SendFailed(f"no broker told about {outgoing.topic} for {self._give_up_s:.0f} s") from error
            except (errors.KafkaError, ValueError) as error:
                raise SendFailed(f"cannot write to {outgoing.topic}/{outgoing.partition}: {edge.one_line(error)}") from error

    def _settle(self, size: int, failure: LogError | None) -> None:
        """Note that a record is acknowledged or has failed."""
        if failure is None:
            self._wait.answered(more=True)
        elif self._failure is None:
            self._failure = failure
        self._release(size)

    def _release(self, size: int) -> None:
        with self._room:
            self._held -= size
            if not self._held:
                self._wait.end()
            if self._waiting:
                self._room.notify_all()

    def check(self) -> None:
        """Raise the first failure since the last flush; a caller that sends without waiting calls this from time to time."""
        if self._failure is not None:
            raise self._failure

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until every record sent so far is written; raises the first failure since the last flush."""
        try:
            self._kafka.flush(timeout_s)
        except errors.KafkaTimeoutError:
            raise OutcomeUnknown(f"{self._held} bytes are not acknowledged after {timeout_s:.0f} s") from None
        with self._room:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self, timeout_s: float = 3.0) -> None:
        """Finish what is in flight, within `timeout_s`, and stop."""
        self._costs.unwatch(private_api.io_thread(self._kafka))
        self._costs.retire(self._meter)
        private_api.close_producer(self._kafka, timeout_s)
