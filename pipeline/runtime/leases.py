"""Writer leases: exclusive right of one process to write as, for example, `RUN.trainer`.

The newest record in the role's control topic names the owner. A starting process waits until the owner has released the lease or has been
silent for `watch_s`; it never fences a live owner, so that a fenced process that is restarted does not fence its successor.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.infra.errors import ConfigError, Fenced, PenstockError
from penstock.infra.log import Log, Producer, Tail, Transactions
from penstock.topics.catalogue import control_topic
from penstock.topics.internal import owners
from penstock.topics.internal.owners import Owner, OwnerKind
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

BEAT_S = 2.0
"""Heartbeat interval of an owner."""
SILENT_S = 10.0
"""An owner without a heartbeat for this long, while the broker responded, has lost its lease."""
TOKEN, ENDED = "PENSTOCK_TOKEN", "PENSTOCK_ENDED"
"""Environment of a worker: the token of this start, and those of earlier starts, whose processes have certainly exited."""


def new_token() -> str:
    """64 random bits: the identity of one process."""
    return secrets.token_hex(8)


def process_token() -> str:
    """Identity of this process: the token from its launcher, or a new one."""
    return os.environ.get(TOKEN) or new_token()


@dataclass(slots=True, kw_only=True)
class WriterLease:
    """The exclusive right of one process to write as `writer`."""

    log: Log
    run: str
    writer: str
    """Name of the lease: with the run before it, the transactional id."""
    token: str
    ended: frozenset[str] = field(default_factory=lambda: frozenset(filter(None, os.environ.get(ENDED, "").split(","))))
    """Tokens of processes that have certainly exited."""
    watch_s: float = 0.0
    """How long a silent owner is watched before its lease is taken; with 0 an owner is fenced at once."""
    notify: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to stop the thread."""
    first_wins: bool = False
    """If True, the first of two simultaneous claims wins; otherwise the last, whose producer epoch is the valid one."""
    _left: threading.Event = field(default_factory=threading.Event)
    _producer: Producer | None = None

    def acquire(self) -> Transactions:
        """Acquire the lease; returns its transactional writer. Raises `Fenced` if its owner is alive or another process claimed first,
        `LogError`, and `ConfigError` if the run has no such topic.
        """
        if self.log.partitions(self._topic) is None:
            raise ConfigError(
                f"run {self.run} was created by an earlier release and lacks the topic {self._topic}: add it with `penstock topics adopt "
                f"{self.run}`, or resume the run with `penstock run --resume {self.run}`, which adds it too"
            )
        with contextlib.closing(self.log.tail({(self._topic, 0): "earliest"})) as tail:
            self._await_silence(tail)
            transactions = self.log.transactions(f"{self.run}.{self.writer}", claim=self._record("taken"))
            claims = [claim for claim in self._read(tail.read_to_end(include_open=True)) if claim.kind == "taken"]
            own = [claim.token for claim in claims].index(self.token)
            concurrent = claims[:own] if self.first_wins else claims[own + 1 :]
        self._producer = self.log.producer()
        if self.watch_s:
            threading.Thread(target=self._beat, daemon=True, name=f"alive-{self.writer}").start()
        if concurrent:
            self.release()
            raise self._taken_by(concurrent[-1])
        return transactions

    def require_held(self) -> None:
        """Raise `Fenced` if another process has acquired the lease; reads the topic."""
        if self._producer is None:
            return
        with contextlib.closing(self.log.tail({(self._topic, 0): "earliest"})) as tail:
            owner = [claim for claim in self._read(tail.read_to_end(include_open=True)) if claim.kind == "taken"][-1]
        if owner.token != self.token:
            raise Fenced(f"another process, on {owner.host}, now writes as {self.run}.{self.writer}: this process must stop")

    def release(self) -> None:
        """Record that this process has ended, so that a successor need not wait; also if the lease was lost."""
        self._left.set()
        if self._producer is not None:
            with contextlib.suppress(PenstockError):  # without it the successor only waits
                self._producer.send(self._record("ended"))
                self._producer.flush(5.0)
            self._producer.close()

    @property
    def _topic(self) -> str:
        return control_topic(self.run, self.writer.partition("-")[0])

    def _await_silence(self, tail: Tail) -> None:
        """Return once no other process has sent heartbeats for `watch_s`. Raises `Fenced` as soon as one does."""
        owner, gone = None, set(self.ended)
        for claim in self._read(tail.read_to_end()):
            owner = claim if claim.kind == "taken" else owner
            gone |= {claim.token} if claim.kind == "ended" else set()
        if owner is None or owner.token in gone or not self.watch_s:
            return
        self.notify(f"waiting {self.watch_s:g} s to see whether {self.writer} on {owner.host} still runs")
        silent_s, last = 0.0, time.monotonic()
        while silent_s < self.watch_s and not self.stop.is_set():
            for claim in self._read(tail.poll(0.25)):
                if claim.kind == "ended" and claim.token == owner.token:
                    return
                if claim.kind != "ended" and claim.token not in gone:
                    raise self._taken_by(claim)
            now = time.monotonic()
            silent_s, last = silent_s + (0.0 if tail.outage_s else now - last), now

    def _taken_by(self, owner: Owner) -> Fenced:
        """The error to raise because the process in this record has the lease."""
        since = time.strftime("%H:%M:%S", time.localtime(owner.time_ns / 1e9))
        return Fenced(
            f"{self.writer} of run {self.run} is already running on {owner.host} (last heartbeat at {since}): this process "
            "exits, because it must not fence a live owner"
        )

    def _read(self, records: Iterable[Record]) -> Iterable[Owner]:
        """Yield the records about this lease, decoded; others and invalid ones are skipped."""
        for record in records:
            with contextlib.suppress(Unusable):  # no valid claim
                owner = owners.read(record, run=self.run)[1]
                if owner.writer == self.writer:
                    yield owner

    def _beat(self) -> None:
        """Send a heartbeat every `BEAT_S` until the lease is released; the body of a thread."""
        assert self._producer is not None
        while not self._left.wait(BEAT_S):
            with contextlib.suppress(PenstockError):  # the process's own calls raise errors of the log
                self._producer.send(self._record("alive"))

    def _record(self, kind: OwnerKind) -> Outgoing:
        """A record that this process has taken the lease, is alive, or has ended."""
        owner = Owner(writer=self.writer, token=self.token, kind=kind, host=socket.gethostname(), time_ns=time.time_ns())
        return owners.outgoing(owner, run=self.run, topic=self._topic, key=owners.key(owner))
