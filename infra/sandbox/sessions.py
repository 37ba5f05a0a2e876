"""Stateful sessions in child processes, such as environments: opened, called many times, closed; driven by one asyncio loop.

A call ends in bounded time. If it overruns its limit, its child is killed with every session in it, and each of their callers gets
`SessionLost`. The limit covers the child's work on the call, not the wait for a free child.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.spawn import ENVIRONMENT, START_ATTEMPTS, STRAY, ChildError, ChildRules, end_child
from penstock.infra.sandbox.timed_pool import PipedChild


class SessionLost(PenstockError):
    """The child of a session has exited; the message has the cause. `guilty` is True for the session whose call caused it."""

    def __init__(self, reason: str, *, guilty: bool) -> None:
        super().__init__(reason)
        self.guilty = guilty


class CallFailed(PenstockError):
    """The handler raised an exception; the session continues."""


class Sessions:
    """At most `size` children that serve `target`, a `module:function` that takes `init` and returns an async handler of payloads.

    The handler's attribute `at_once` is the number of concurrent calls of one child, 1 if absent. Children start on demand.
    """

    def __init__(
        self, target: str, *, size: int, init: object = None, start_timeout_s: float = 180.0, rules: ChildRules = ENVIRONMENT
    ) -> None:
        if size < 1:
            raise ValueError(f"size {size}: expected at least 1")
        self._target, self._size, self._init, self._start_timeout_s = target, size, init, start_timeout_s
        self._rules = rules
        self._children: list[_Child] = []
        self._failed_starts = 0
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def open(self) -> "Session":
        """Open a session in the child with the fewest sessions. Raises `ChildError` if no child can be started."""
        async with self._starting:
            self._children = [child for child in self._children if child.ended is None]
            if len(self._children) < self._size and all(child.sessions for child in self._children):
                self._children.append(await self._start())
        child = min((child for child in self._children if child.ended is None), key=lambda child: child.sessions, default=None)
        if child is None:
            return await self.open()
        return Session(child, next(self._numbers))

    async def close(self) -> None:
        for child in self._children:
            child.lifeline.end_orderly()
        for child in self._children:
            child.end("was closed", guilty=None, orderly=True)
        self._children = []

    async def _start(self) -> "_Child":
        """Start a child and return it once it has loaded the target. Raises `ChildError` after `START_ATTEMPTS` failures in a row."""
        reason = ""
        while self._failed_starts < START_ATTEMPTS:
            child = _Child(self._target, self._rules, self._init)
            try:
                first = await asyncio.wait_for(child.started(), self._start_timeout_s)
            except TimeoutError:
                child.end(reason := f"took longer than {self._start_timeout_s:g} s and was killed", guilty=None)
                self._failed_starts += 1
                continue
            if "broken" in first:
                child.end(first["broken"], guilty=None)
                raise ChildError(f"cannot load {self._target}: {first['broken']}")
            if "ready" in first:
                self._failed_starts = 0
                return child
            reason = child.ended or "ended"
            self._failed_starts += 1
        raise ChildError(f"cannot start {self._target}: {START_ATTEMPTS} processes failed during startup; the last one {reason}")


class Session:
    """One session; its calls must not overlap."""

    def __init__(self, child: "_Child", number: int) -> None:
        self._child, self.number = child, number
        self.last_s = 0.0
        """Seconds of the child's work on the last call."""
        self.last_replaced = 0
        """Number of lone surrogates in the last result that were replaced by U+FFFD."""
        child.sessions += 1

    async def call(self, payload: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the handler's result for `payload`. Raises `SessionLost` if the child exits, `CallFailed` if the handler raises."""
        child = self._child
        self.last_s, self.last_replaced = 0.0, 0
        async with child.room:
            if child.ended is not None:
                raise SessionLost(f"another environment in the same process {child.ended}", guilty=False)
            start = time.monotonic()
            try:
                reply = await asyncio.wait_for(child.request({"session": self.number, **payload}), timeout_s)
                self.last_replaced = reply.get("replaced", 0)
                return reply["result"]
            except TimeoutError:
                reason = f"took longer than {timeout_s:g} s and was killed"
                child.end(reason, guilty=self.number)
                raise SessionLost(reason, guilty=True) from None
            finally:
                self.last_s = time.monotonic() - start

    def close(self) -> None:
        """Close the session in the child."""
        self._child.sessions -= 1
        if self._child.ended is None:
            self._child.post([-1, {"session": self.number, "do": "close"}])


class _Child(PipedChild):
    def __init__(self, target: str, rules: ChildRules, init: object) -> None:
        super().__init__(target, rules)
        self.sessions = 0
        self.ended: str | None = None
        """Reason of its end; None while it runs."""
        self.room = asyncio.Semaphore(1)
        self._calls: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._loop.add_reader(self.stdout, self._read)
        self.post(init)

    async def started(self) -> dict[str, Any]:
        """Return the child's first message, `ready` or `broken`; empty if the child ended before."""
        first = await asyncio.shield(self._first)
        self.room = asyncio.Semaphore(self.at_once)
        return first

    def post(self, value: object) -> None:
        """Write one line; the end of the child is detected by its closed output."""
        self.send(json.dumps(value))
        if self.unsent:
            self._loop.add_writer(self.stdin, self._write_more)

    async def request(self, payload: Mapping[str, Any]) -> Any:
        """Send a call and return the child's reply."""
        number, reply = next(self._numbers), self._loop.create_future()
        self._calls[number] = payload["session"], reply
        self.post([number, payload])
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    def end(self, reason: str, *, guilty: int | None, orderly: bool = False) -> None:
        """End the child and fail all its calls by `SessionLost`, `guilty` for the session that caused it, or for all if None."""
        if self.ended is not None:
            return
        self.ended = reason
        self._loop.remove_reader(self.stdout)
        self._loop.remove_writer(self.stdin)
        self.close(orderly=orderly)
        for session, reply in self._calls.values():
            if not reply.done():
                innocent = guilty is not None and session != guilty
                text = f"another environment in the same process {reason}" if innocent else reason
                reply.set_exception(SessionLost(text, guilty=not innocent))
        if not self._first.done():
            self._first.set_result({})

    def _write_more(self) -> None:
        self.write()
        if not self.unsent:
            self._loop.remove_writer(self.stdin)

    def _read(self) -> None:
        """Receive available replies; end the child if its pipe is closed or it sent anything else."""
        try:
            replies, ended = self.read()
        except (ValueError, RecursionError):
            self.end(STRAY, guilty=None)
            return
        for reply in replies:
            self._take(reply)
        if ended:  # any of several calls may have ended it
            self.end(end_child(self.process, self.lifeline), guilty=None)

    def _take(self, reply: dict[str, Any]) -> None:
        """Resolve the call, or the start, that a reply belongs to."""
        if "call" not in reply:
            if "doing" not in reply and not self._first.done():
                self._first.set_result(reply)
            return
        _, waiting = self._calls.get(reply["call"], (0, None))
        if waiting is not None and not waiting.done():
            if "error" in reply:
                waiting.set_exception(CallFailed(reply["error"]))
            else:
                waiting.set_result(reply)
