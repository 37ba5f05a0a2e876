"""Child processes that run code which may hang, crash or print; each call has a time limit of its own.

A call ends in bounded time, as `Done` or as `Failed` with the reason; a child that overran is killed with everything it started. One thread
drives a pool; children send JSON lines over pipes, so nothing they send is ever executed.
"""

import contextlib
import itertools
import json
import os
import selectors
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.infra.sandbox.spawn import REWARD, START_ATTEMPTS, STRAY, ChildError, ChildRules, end_child, spawn

READ_BYTES = 1 << 16
MAX_UNREAD_BYTES = 80 << 20
"""[bytes] Limit of one reply; a child sends less."""


class PipedChild:
    """A child process, its unsent lines and its replies."""

    def __init__(self, target: str, rules: ChildRules) -> None:
        self.process, self.lifeline = spawn(target, rules)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.ready = False
        self.at_once = 1
        """Number of concurrent calls."""
        self.can_cancel = False
        """True if it can cancel a call without being killed."""
        self._unsent, self._unread = bytearray(), bytearray()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    def send(self, line: str) -> None:
        """Queue a line and write as much as the pipe takes; `write` continues."""
        self._unsent += line.encode() + b"\n"
        self.write()

    @property
    def unsent(self) -> bool:
        """True if data wait for the pipe."""
        return bool(self._unsent)

    def write(self) -> None:
        """Write as much of the queue as the pipe takes."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._unsent:
                    del self._unsent[: os.write(self.stdin, self._unsent)]
            except BrokenPipeError:  # it has ended, which its closed stdout reports
                self._unsent.clear()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete replies, and True if the child has ended; replies sent before its end are included.

        Raises `ValueError` or `RecursionError`: the code in the child has written to the pipe of the replies.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.stdout, READ_BYTES):
                self._unread += data
                if len(self._unread) > MAX_UNREAD_BYTES and b"\n" not in data:
                    raise ValueError
            ended = True
        *lines, self._unread = self._unread.split(b"\n")
        return [self._parsed(line) for line in lines], ended

    def _parsed(self, line: bytearray) -> dict[str, Any]:
        """Return a reply, storing the capabilities in the first one. Raises `ValueError` for a reply that is not allowed now."""
        match json.loads(line):
            case {"call": int(), "result": _} | {"call": int(), "error": str()} | {"doing": str()} as reply if self.ready:
                return dict(reply)
            case {"ready": True, "at_once": int(at_once), "can_cancel": bool(can_cancel)} as reply if not self.ready:
                self.ready, self.at_once, self.can_cancel = True, at_once, can_cancel
                return dict(reply)
            case {"broken": str()} as reply if not self.ready:
                return dict(reply)
        raise ValueError

    def close(self, *, orderly: bool = False) -> None:
        """Kill the child and everything it has started; with `orderly` by SIGTERM first."""
        if self.process.returncode is None:
            end_child(self.process, self.lifeline, orderly=orderly)
        self.lifeline.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


Key = TypeVar("Key")
GRACE_S = 2.0
"""Time within which a child with several calls has to cancel one of them; else it hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[Key]):
    """A call that returned."""

    key: Key
    result: Any
    """The JSON value that the handler returned."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[Key]):
    """A call that failed in every attempt, with the reason of the last one."""

    key: Key
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class _Call(Generic[Key]):
    key: Key
    payload: str
    attempts_left: int
    timeout_s: float
    alone: bool = False
    """True if it gets a child to itself: a child crashed while it worked on this call and others, and any of them may be the cause."""
    deadline: float = float("inf")
    called: float = 0.0
    stopped: str | None = None
    """Reason of its cancellation; None if it was not cancelled."""
    cancelled: bool = False


class _Child(PipedChild, Generic[Key]):
    def __init__(self, target: str, rules: ChildRules, *, deadline: float) -> None:
        super().__init__(target, rules)
        self.deadline = deadline
        """Time by which the child must have started."""
        self.doing = ""
        """Its current work, as it last reported it."""
        self.calls: dict[int, _Call[Key]] = {}
        self._sending: list[_Call[Key]] = []

    @property
    def active_calls(self) -> int:
        """Number of calls whose results are needed."""
        return sum(not call.cancelled for call in self.calls.values())

    def has_room(self, call: _Call[Key]) -> bool:
        """True if the child can take another call."""
        room = 1 if call.alone or any(other.alone for other in self.calls.values()) else self.at_once
        return self.ready and len(self.calls) < room

    def call(self, number: int, call: _Call[Key]) -> None:
        """Send a call; its time limit starts when it is completely written."""
        self.calls[number] = call
        self.doing = ""
        call.called = time.monotonic()
        call.deadline = call.called + call.timeout_s
        self._sending.append(call)
        self.send(f"[{number}, {call.payload}]")

    def cancel(self, number: int, reason: str) -> None:
        """Request the child to cancel a call, which it has to confirm within `GRACE_S`; the call then fails with `reason`."""
        self.calls[number].stopped, self.calls[number].deadline = self.named(reason), time.monotonic() + GRACE_S
        self.send(f"[{number}]")

    def write(self) -> None:
        """Write as much of the queue as the pipe takes."""
        super().write()
        if not self.unsent:
            for call in self._sending:
                if call.stopped is None:
                    call.deadline = time.monotonic() + call.timeout_s
            self._sending.clear()

    def named(self, reason: str) -> str:
        """Return the reason, prefixed with what the child was doing if that belongs to its only call."""
        return f"{self.doing} {reason}" if self.doing and len(self.calls) == 1 else reason


class ChildPool(Generic[Key]):
    """`size` children that serve `target`, a `module:function` that takes `init` and returns the handler of one payload.

    Not thread-safe. `init`, payloads and results are JSON values. A handler that is a coroutine function works on `at_once` calls
    concurrently, its attribute. A call that fails, overruns `timeout_s` or crashes its child is tried again `retries` times; if a child
    crashes with several calls, each is tried again in a child of its own. The time limit starts when a running child has the call, so
    it excludes imports, which are limited by `start_timeout_s`.
    """

    def __init__(
        self, target: str, *, size: int, timeout_s: float, retries: int = 1, init: object = None, start_timeout_s: float = 180.0,
        rules: ChildRules = REWARD,
    ) -> None:  # fmt: skip
        if size < 1 or timeout_s <= 0 or retries < 0:
            raise ValueError(f"expected size >= 1, timeout_s > 0 and retries >= 0, got {size}, {timeout_s} and {retries}")
        self._target, self._timeout_s, self._retries, self._start_timeout_s = target, timeout_s, retries, start_timeout_s
        self._init, self._rules = json.dumps(init), rules
        self._numbers = itertools.count()
        self._waiting: deque[_Call[Key]] = deque()
        self._ended: list[Done[Key] | Failed[Key]] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._children: list[_Child[Key]] = []
        self.busy_s = 0.0
        """Seconds of work of its children: with half of the possible concurrent calls, a second counts half."""
        self._counted = time.monotonic()
        for _ in range(size):
            self._start()

    @property
    def pending(self) -> int:
        """Number of calls that `poll` has not returned yet."""
        return len(self._waiting) + len(self._ended) + sum(child.active_calls for child in self._children)

    def submit(self, key: Key, payload: object, *, timeout_s: float | None = None) -> None:
        """Queue a call, for a child at once if one is free. `timeout_s` replaces the pool's limit for this call."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._waiting.append(_Call(key=key, payload=json.dumps(payload), attempts_left=1 + self._retries, timeout_s=limit_s))
        self._dispatch()

    def cancel(self, keys: Container[Key]) -> None:
        """Drop these calls and their results; a child that works on one cancels it, or is killed and replaced."""
        self._count_time()
        self._waiting = deque(call for call in self._waiting if call.key not in keys)
        self._ended = [result for result in self._ended if result.key not in keys]
        for child in list(self._children):
            void = [number for number, call in child.calls.items() if call.key in keys and not call.cancelled]
            for number in void:
                child.calls[number].cancelled = True
                self._cancel(child, number, "was cancelled")
            if void and not child.can_cancel:
                self._end(child)
                self._start()

    def poll(self, timeout_s: float = 0.0) -> list[Done[Key] | Failed[Key]]:
        """Return finished calls in the order they finished; waits up to `timeout_s` for the first, but not if none is pending.

        Raises `ChildError` if the target does not load, or `START_ATTEMPTS` children in a row ended before they were ready.
        """
        end = time.monotonic() + timeout_s
        while True:
            self._dispatch()
            calls = [call for child in self._children for call in child.calls.values()]
            wake = min([end, *(child.deadline for child in self._children), *(call.deadline for call in calls)])
            patience = 0.0 if self._ended or not self.pending else max(0.0, wake - time.monotonic())
            for key, events in self._selector.select(patience):
                # A child that was replaced in this loop has closed its descriptors.
                if key.data not in self._children:
                    continue
                if events & selectors.EVENT_WRITE:
                    key.data.write()
                    self._watch(key.data)
                else:
                    self._read(key.data)
            # Check limits after reading: a reply that was in the pipe while the caller was busy is not late.
            self._stop_overdue()
            if self._ended or not self.pending or time.monotonic() >= end:
                self._dispatch()
                ended, self._ended = self._ended, []
                return ended

    def close(self) -> None:
        """End the children and drop pending calls."""
        for child in self._children:
            child.lifeline.end_orderly()
        for child in list(self._children):
            self._end(child, orderly=True)
        self._waiting.clear()
        self._selector.close()

    def _start(self) -> None:
        """Start a child and send it `init`."""
        child: _Child[Key] = _Child(self._target, self._rules, deadline=time.monotonic() + self._start_timeout_s)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        child.send(self._init)
        self._watch(child)

    def _count_time(self) -> None:
        """Add the work since the last call to `busy_s`; to be called before calls or children change."""
        now, room = time.monotonic(), sum(child.at_once for child in self._children if child.ready)
        if room:
            self.busy_s += (now - self._counted) * sum(child.active_calls for child in self._children) / room
        self._counted = now

    def _dispatch(self) -> None:
        """Send waiting calls to children with room, the least busy first."""
        self._count_time()
        while self._waiting:
            free = [child for child in self._children if child.has_room(self._waiting[0])]
            if not free:
                return
            child, call = min(free, key=lambda child: len(child.calls)), self._waiting.popleft()
            call.attempts_left -= 1
            child.call(next(self._numbers), call)
            self._watch(child)

    def _watch(self, child: _Child[Key]) -> None:
        """Let the selector report when a child's input pipe is writable, while data wait for it."""
        watched = child.stdin in self._selector.get_map()
        if child.unsent and not watched:
            self._selector.register(child.stdin, selectors.EVENT_WRITE, child)
        elif watched and not child.unsent:
            self._selector.unregister(child.stdin)

    def _read(self, child: _Child[Key]) -> None:
        """Receive a child's replies; replace the child if it has ended or sent anything else."""
        self._count_time()
        try:
            replies, ended = child.read()
        except (ValueError, RecursionError):
            self._replace(child, STRAY)
            return
        for reply in replies:
            self._take(child, reply)
        if ended:
            self._replace(child, end_child(child.process, child.lifeline))

    def _take(self, child: _Child[Key], reply: dict[str, Any]) -> None:
        """Process one reply of a child: its start, its current work, or the outcome of a call. Raises `ChildError` if it cannot load."""
        if "broken" in reply:
            raise ChildError(f"cannot load {self._target}: {reply['broken']}")
        if "doing" in reply:
            child.doing = reply["doing"]
            return
        if "ready" in reply:
            child.deadline, self._failed_starts = float("inf"), 0
            return
        call = child.calls.pop(reply["call"], None)
        if call is None or call.cancelled:
            return
        if "error" in reply:
            self._fail(call, call.stopped or reply["error"])
        else:
            self._ended.append(Done(key=call.key, result=reply["result"], seconds=time.monotonic() - call.called))

    def _stop_overdue(self) -> None:
        """Cancel calls past their time limit, and replace children that cannot cancel them or did not start in time."""
        now = time.monotonic()
        for child in list(self._children):
            overdue = [number for number, call in child.calls.items() if call.deadline <= now]
            limit_s = min((child.calls[number].timeout_s for number in overdue), default=self._start_timeout_s)
            reason = f"took longer than {limit_s:g} s"
            if child.deadline <= now or (overdue and not child.can_cancel) or any(child.calls[number].stopped for number in overdue):
                self._replace(child, f"{reason} and was killed")
                continue
            for number in overdue:
                self._cancel(child, number, reason)

    def _cancel(self, child: _Child[Key], number: int, reason: str) -> None:
        if child.can_cancel:
            child.cancel(number, reason)
            self._watch(child)

    def _replace(self, child: _Child[Key], reason: str) -> None:
        """Kill a child and start another; its calls are retried or fail with `reason`."""
        self._count_time()
        calls, ready, reason = [call for call in child.calls.values() if not call.cancelled], child.ready, child.named(reason)
        shared = len(child.calls) > 1
        self._end(child)
        if not ready:
            self._failed_starts += 1
            if self._failed_starts >= START_ATTEMPTS:
                raise ChildError(f"cannot start {self._target}: {START_ATTEMPTS} processes failed during startup; the last one {reason}")
        for call in reversed(calls):
            if shared:
                call.alone, call.attempts_left = True, call.attempts_left + 1
            self._fail(call, reason)
        self._start()

    def _fail(self, call: _Call[Key], reason: str) -> None:
        """Queue a call again as the next one, or report it as failed if it has no attempt left."""
        if call.attempts_left > 0:
            call.stopped, call.deadline = None, float("inf")
            self._waiting.appendleft(call)
        else:
            self._ended.append(Failed(key=call.key, reason=reason))

    def _end(self, child: _Child[Key], *, orderly: bool = False) -> None:
        """End a child and stop watching its pipes; its calls are not touched."""
        self._children.remove(child)
        for descriptor in (child.stdin, child.stdout):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        child.close(orderly=orderly)
