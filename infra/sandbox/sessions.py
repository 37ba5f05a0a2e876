"""Stateful sessions in child processes, such as environments: opened, called many times, closed; driven by one asyncio loop.

A call ends in bounded time. If it overruns its limit, its child is killed with every session in it, and each of their callers gets
`SessionLost`. The limit covers the child's work on the call, not the wait for a free child.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.sandbox.child import LINE_BYTES
from penstock.infra.sandbox.rules import ENVIRONMENT, ChildRules
from penstock.infra.sandbox.spawn import START_ATTEMPTS, STRAY, ChildError, Lifeline, end_child, spawn


class SessionLost(PenstockError):
    """The child of a session has ended; one line has the reason. `guilty` is True for the session whose call ended it."""

    def __init__(self, reason: str, *, guilty: bool) -> None:
        super().__init__(reason)
        self.guilty = guilty


class CallFailed(PenstockError):
    """The handler raised; the session continues."""


class Sessions:
    """At most `size` children that serve `target`, a `module:function` that takes `init` and returns an async handler of payloads.

    The handler's attribute `at_once` is the number of concurrent calls of one child, 1 if absent. Children start on demand.
    """

    def __init__(
        self,
        target: str,
        *,
        size: int,
        init: object = None,
        start_timeout_s: float = 180.0,
        rules: ChildRules = ENVIRONMENT,
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
        """Open a session in the child that has the fewest. Raises `ChildError` if no child can be started."""
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
            await child.end("was closed", guilty=None, orderly=True)
        self._children = []

    async def _start(self) -> "_Child":
        reason = ""
        while self._failed_starts < START_ATTEMPTS:
            child = _Child(*spawn(self._target, self._rules))
            try:
                ready = await asyncio.wait_for(child.start(self._init), self._start_timeout_s)
            except TimeoutError:
                await child.end(reason := f"took longer than {self._start_timeout_s:g} s and was killed", guilty=None)
                self._failed_starts += 1
                continue
            if "broken" in ready:
                await child.end(ready["broken"], guilty=None)
                raise ChildError(f"cannot serve {self._target}: {ready['broken']}")
            if "ready" in ready:
                self._failed_starts = 0
                return child
            reason = child.ended or "ended"
            self._failed_starts += 1
        raise ChildError(f"cannot serve {self._target}: {START_ATTEMPTS} children were lost at their start; the last one {reason}")


class Session:
    """One session; not to be called concurrently."""

    def __init__(self, child: "_Child", number: int) -> None:
        self._child, self.number = child, number
        self.last_s = 0.0
        """Seconds of the child's work on the last call."""
        self.last_replaced = 0
        """Number of lone surrogates in the last result that were replaced by U+FFFD."""
        child.sessions += 1

    async def call(self, payload: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The handler's result. Raises `SessionLost` or `CallFailed`."""
        child = self._child
        self.last_s, self.last_replaced = 0.0, 0
        async with child.room:
            if child.ended is not None:
                raise SessionLost(f"another environment in its process {child.ended}", guilty=False)
            start = time.monotonic()
            try:
                reply = await asyncio.wait_for(child.request({"session": self.number, **payload}), timeout_s)
                self.last_replaced = reply.get("replaced", 0)
                return reply["result"]
            except TimeoutError:
                reason = f"took longer than {timeout_s:g} s and was killed"
                await child.end(reason, guilty=self.number)
                raise SessionLost(reason, guilty=True) from None
            finally:
                self.last_s = time.monotonic() - start

    def close(self) -> None:
        """Close the session in the child."""
        self._child.sessions -= 1
        if self._child.ended is None:
            self._child.send([-1, {"session": self.number, "do": "close"}])


class _Child:
    """One child process and the calls it works on."""

    def __init__(self, process: "subprocess.Popen[bytes]", lifeline: Lifeline) -> None:
        self._process, self.lifeline = process, lifeline
        self.sessions = 0
        self.ended: str | None = None
        """Reason of its end; None while it runs."""
        self.room = asyncio.Semaphore(1)
        self._calls: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._reader: asyncio.ReadTransport | None = None

    async def start(self, init: object) -> dict[str, Any]:
        """Send `init` and return the child's first message; empty if it ended."""
        loop, process = asyncio.get_running_loop(), self._process
        assert process.stdin is not None and process.stdout is not None
        self._writer, _ = await loop.connect_write_pipe(asyncio.Protocol, process.stdin)
        lines = asyncio.StreamReader(limit=LINE_BYTES)
        self._reader, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
        self.send(init)
        self._reading = asyncio.create_task(self._read(lines))
        ready = await asyncio.shield(self._ready)
        self.room = asyncio.Semaphore(int(ready.get("at_once", 1)))
        return ready

    def send(self, value: object) -> None:
        """Write one line; the end of the child is detected by its closed output."""
        assert self._writer is not None
        self._writer.write(json.dumps(value).encode() + b"\n")

    async def request(self, payload: Mapping[str, Any]) -> Any:
        """Send a call and return the child's reply."""
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = payload["session"], reply
        self.send([number, payload])
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    async def end(self, reason: str, *, guilty: int | None, orderly: bool = False) -> None:
        """End it; all its calls fail, that of the session `guilty` by its own fault."""
        if self.ended is not None:
            return
        self.ended = reason
        self._kill(orderly=orderly)
        calls, self._calls = self._calls, {}
        for session, reply in calls.values():
            if not reply.done():
                innocent = guilty is not None and session != guilty
                text = f"another environment in its process {reason}" if innocent else reason
                reply.set_exception(SessionLost(text, guilty=not innocent))
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading

    def _kill(self, *, orderly: bool) -> None:
        if self._process.returncode is None:
            end_child(self._process, self.lifeline, orderly=orderly)
        if self._writer is not None and not self._writer.is_closing():
            self._writer.abort()
        if self._reader is not None and not self._reader.is_closing():
            self._reader.close()
        self.lifeline.close()

    async def _read(self, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                self._take(json.loads(line))
            ending = end_child(self._process, self.lifeline)
        except (ValueError, RecursionError):
            ending = STRAY
        # Any of several calls may have ended the child.
        await self.end(ending, guilty=None)
        if not self._ready.done():
            self._ready.set_result({})

    def _take(self, reply: Any) -> None:
        match reply:
            case {"ready": True, "at_once": int()} | {"broken": str()} if not self._ready.done():
                self._ready.set_result(reply)
            case {"call": int(number), "result": _} | {"call": int(number), "error": str()} if self._ready.done():
                _, waiting = self._calls.get(number, (0, None))
                if waiting is not None and not waiting.done():
                    if "error" in reply:
                        waiting.set_exception(CallFailed(reply["error"]))
                    else:
                        waiting.set_result(reply)
            case {"doing": _}:
                pass
            case _:
                raise ValueError
