"""Tracks when a broker last answered the clients of one log, and how long they wait for one that does not.

The rule: time limits of calls count only while a broker answers; every client waits for one that is away for `give_up_s`, no longer and
no shorter.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from kafka import errors

from penstock.infra.errors import LogUnreachable
from penstock.infra.kafka.client_repairs import private_api

T = TypeVar("T")

REPORT_AFTER_S = 5.0
"""An outage is reported, once, when no waiting client has had an answer for this long."""
SILENT_S = 3.0
"""The broker counts as away after this much silence: it answers a connected reader that polls at least twice a second."""
_CHECK_EVERY_S = 1.0


class Contact:
    """The state of the broker's answers that all clients of one log share."""

    def __init__(self, bootstrap: str, give_up_s: float) -> None:
        self.bootstrap, self.give_up_s = bootstrap, give_up_s
        self._answered = time.monotonic()
        self.counts: Counter[str] = Counter()
        """What has happened to the clients so far: `rebalances`, `transaction_retries`, `fenced`."""
        self._waits: WeakSet[Wait] = WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.notify: Callable[[str], None] = lambda _: None
        """Takes a line for the user; `report_to` sets it."""

    @property
    def silent_s(self) -> float:
        """Seconds without an answer to any client although one waits; 0.0 when none waits."""
        with self._lock:
            begun = [began for wait in self._waits if (began := wait.since) is not None]
        return max(0.0, time.monotonic() - max(self._answered, min(begun))) if begun else 0.0

    def join(self, wait: "Wait") -> None:
        """Include this wait in `silent_s`."""
        with self._lock:
            self._waits.add(wait)

    def answered(self) -> None:
        """Note that a broker has just answered one of the clients."""
        self._answered = time.monotonic()

    def unreachable(self, after_s: float | None = None) -> LogUnreachable:
        """The error to raise when the time is over."""
        return LogUnreachable(
            f"the broker at {self.bootstrap} has not answered for {after_s or self.give_up_s:.0f} s (kafka.give_up_s): giving up; "
            "what was not acknowledged is done again after a restart"
        )

    def reach(self, attempt: Callable[[], T], *, ended: Callable[[], bool] = lambda: False) -> T:
        """The result of `attempt`, retried while no broker can be reached; raises LogUnreachable after `give_up_s` or when `ended`."""
        wait = Wait(self)
        wait.begin()
        while True:
            try:
                result = attempt()
            except (LogUnreachable, errors.RetriableError) as error:
                if ended():
                    raise self.unreachable() from error
                wait.check()
                time.sleep(0.1)
            else:
                wait.answered()
                return result

    def report_to(self, notify: Callable[[str], None]) -> None:
        """Report the start and the end of every outage, and deleted records that a member skips."""
        self.notify = notify
        threading.Thread(target=self._report_outages, daemon=True, name="log-contact").start()

    def _report_outages(self) -> None:
        away_since: float | None = None
        looked = time.monotonic()
        while not self._closed.wait(_CHECK_EVERY_S):
            last, looked = looked, time.monotonic()
            if looked - last > REPORT_AFTER_S:
                continue  # this process itself was suspended: no client could receive an answer
            silent_s = self.silent_s
            if away_since is None and silent_s >= REPORT_AFTER_S:
                away_since = time.monotonic() - silent_s
                self.notify(
                    f"the broker at {self.bootstrap} has not answered for {silent_s:.0f} s; waiting for it, {self.give_up_s:.0f} s at most"
                )
            elif away_since is not None and self._answered > away_since + REPORT_AFTER_S:
                self.notify(f"the broker answers again, after {self._answered - away_since:.0f} s")
                away_since = None

    def close(self) -> None:
        """Stop reporting outages."""
        self._closed.set()


class Wait:
    """One client's wait for an answer; cheap enough for every record."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self.since: float | None = None
        contact.join(self)

    @property
    def seconds(self) -> float:
        """Seconds this client has waited; 0.0 when it does not wait."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def begin(self) -> None:
        """Start waiting for an answer, unless already waiting."""
        if self.since is None:
            self.since = time.monotonic()

    def answered(self, *, more: bool = False) -> None:
        """Note an answer; with `more`, start waiting for the next one."""
        self._contact.answered()
        self.since = time.monotonic() if more else None

    def end(self) -> None:
        """Stop waiting."""
        self.since = None

    def check(self) -> None:
        """Raise LogUnreachable once the wait has lasted `give_up_s`."""
        if self.seconds >= self._contact.give_up_s:
            raise self._contact.unreachable()


class Outage:
    """Measures how long no broker has answered a consumer, for the thread that polls it."""

    def __init__(self, contact: Contact) -> None:
        self._contact, self._wait = contact, Wait(contact)
        self._heard = 0.0
        self._since = self._looked = time.monotonic()
        self._down = False

    def look(self, consumer: Any, *, due: bool = True) -> float:
        """Check the consumer's connections; returns `seconds`, raises LogUnreachable after `give_up_s`.

        `due` is False while a connected broker owes this consumer no answer, as while a group gathers.
        """
        now, last_answer = time.monotonic(), private_api.last_received(consumer)
        if last_answer > self._heard:
            self._heard = self._since = last_answer
            self._contact.answered()
        elif not self._down and now - self._looked > SILENT_S:
            self._since = now  # no poll took place, so no answer could arrive
        connected = private_api.connected(consumer)
        if connected and not due:
            self._since = now
        self._looked = now
        self._down = not connected or now - self._since > SILENT_S
        if not self._down:
            self._wait.end()
            return 0.0
        self._wait.since = self._since
        self._wait.check()
        return now - self._since

    def over(self) -> None:
        """Note that records have arrived."""
        self._heard = self._since = self._looked = time.monotonic()
        self._down = False
        self._wait.answered()

    @property
    def seconds(self) -> float:
        """Seconds since a broker last answered; 0.0 unless one is overdue."""
        return time.monotonic() - self._since if self._down else 0.0
