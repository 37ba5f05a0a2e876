"""Tracks when a broker last responded to the clients of one log, and limits how long they wait for an unreachable one.

Time limits of calls count only while a broker responds; in an outage every client waits exactly `give_up_s`.
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
"""An outage is reported, once, after a waiting client has received nothing for this long."""
SILENT_S = 3.0
"""The broker counts as unreachable after this much silence: it responds to a reader that polls at least twice a second."""
_CHECK_EVERY_S = 1.0


class Contact:
    """Time of the last response of a broker, shared by all clients of one log."""

    def __init__(self, bootstrap: str, give_up_s: float) -> None:
        self.bootstrap, self.give_up_s = bootstrap, give_up_s
        self._last_response = time.monotonic()
        self.counts: Counter[str] = Counter()
        """Events so far: `rebalances`, `transaction_retries`, `fenced`."""
        self._waits: WeakSet[Wait] = WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.notify: Callable[[str], None] = lambda _: None
        """Takes a line for the user; `report_to` sets it."""

    @property
    def silent_s(self) -> float:
        """Seconds without a response to any client while one waits; 0.0 if none waits."""
        with self._lock:
            starts = [since for wait in self._waits if (since := wait.since) is not None]
        return max(0.0, time.monotonic() - max(self._last_response, min(starts))) if starts else 0.0

    def responded(self) -> None:
        """Record that a broker has just responded to one of the clients."""
        self._last_response = time.monotonic()

    def unreachable(self, after_s: float | None = None) -> LogUnreachable:
        """Return the error to raise after a timeout without a response."""
        return LogUnreachable(
            f"the broker at {self.bootstrap} has not responded for {after_s or self.give_up_s:.0f} s (kafka.give_up_s): stopping; "
            "after a restart it repeats the work that was not acknowledged"
        )

    def reach(self, attempt: Callable[[], T], *, ended: Callable[[], bool] = lambda: False) -> T:
        """Retry `attempt` while no broker can be reached; return its result. Raises `LogUnreachable` after `give_up_s` or if `ended`."""
        wait = Wait(self)
        wait.start()
        while True:
            try:
                result = attempt()
            except (LogUnreachable, errors.RetriableError) as error:
                if ended():
                    raise self.unreachable() from error
                wait.check()
                time.sleep(0.1)
            else:
                wait.responded()
                return result

    def report_to(self, notify: Callable[[str], None]) -> None:
        """Report the start and the end of every outage, and deleted records that a member skips."""
        self.notify = notify
        threading.Thread(target=self._report_outages, daemon=True, name="log-contact").start()

    def _report_outages(self) -> None:
        """Run in a thread until `close`: report an outage after `REPORT_AFTER_S`, once, and the first response after it."""
        since: float | None = None
        checked = time.monotonic()
        while not self._closed.wait(_CHECK_EVERY_S):
            last, checked = checked, time.monotonic()
            if checked - last > REPORT_AFTER_S:
                continue  # this process itself was suspended: no client could receive a response
            silent_s = self.silent_s
            if since is None and silent_s >= REPORT_AFTER_S:
                since = time.monotonic() - silent_s
                self.notify(
                    f"the broker at {self.bootstrap} has not responded for {silent_s:.0f} s; waiting for it, {self.give_up_s:.0f} s at most"
                )
            elif since is not None and self._last_response > since + REPORT_AFTER_S:
                self.notify(f"the broker responds again, after {self._last_response - since:.0f} s")
                since = None

    def close(self) -> None:
        self._closed.set()


class Wait:
    """Time that one client has waited for a response; cheap enough for every record."""

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self.since: float | None = None
        with contact._lock:
            contact._waits.add(self)

    @property
    def seconds(self) -> float:
        """Seconds this client has waited; 0.0 if it does not wait."""
        since = self.since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start to wait for a response, unless already waiting."""
        if self.since is None:
            self.since = time.monotonic()

    def responded(self, *, more: bool = False) -> None:
        """Record a response; with `more`, start to wait for the next one."""
        self._contact.responded()
        self.since = time.monotonic() if more else None

    def end(self) -> None:
        self.since = None

    def check(self) -> None:
        """Raise `LogUnreachable` after a wait of `give_up_s`."""
        if self.seconds >= self._contact.give_up_s:
            raise self._contact.unreachable()


class Outage:
    """Measures how long no broker has responded to a consumer, for the thread that polls it."""

    def __init__(self, contact: Contact) -> None:
        self._contact, self._wait = contact, Wait(contact)
        self._received = 0.0
        self._since = self._checked = time.monotonic()
        self._down = False

    def check(self, consumer: Any, *, due: bool = True) -> float:
        """Check the consumer's connections and return `seconds`. Raises `LogUnreachable` after `give_up_s`.

        `due` is False while no response of a connected broker is due, as while a group gathers.
        """
        now, received = time.monotonic(), private_api.last_received(consumer)
        if received > self._received:
            self._received = self._since = received
            self._contact.responded()
        elif not self._down and now - self._checked > SILENT_S:
            self._since = now  # no poll took place, so no response could arrive
        connected = private_api.connected(consumer)
        if connected and not due:
            self._since = now
        self._checked = now
        self._down = not connected or now - self._since > SILENT_S
        if not self._down:
            self._wait.end()
            return 0.0
        self._wait.since = self._since
        self._wait.check()
        return now - self._since

    def end(self) -> None:
        """End the outage, because the broker has responded."""
        self._received = self._since = self._checked = time.monotonic()
        self._down = False
        self._wait.responded()

    @property
    def seconds(self) -> float:
        """Seconds since a broker last responded; 0.0 unless a response is overdue."""
        return time.monotonic() - self._since if self._down else 0.0
