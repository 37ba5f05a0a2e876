"""Child processes that run code which may hang, crash or print; each call has a time limit of its own.

The rule: a call ends in bounded time, as `Done` or as `Failed` with the reason; a child that overran is killed with everything it started.
One thread drives a pool; children speak JSON lines over pipes, so nothing they send is ever executed.
"""

import contextlib
import json
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.infra.sandbox.spawn import START_ATTEMPTS, ChildError, kill_group, last_words, spawn

Key = TypeVar("Key")
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Generic[Key]):
    """A call that returned."""

    key: Key
    result: Any
    """The JSON value that the handler returned."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Generic[Key]):
    """A call that failed in every attempt, with the last attempt's reason."""

    key: Key
    reason: str


@dataclass(slots=True, kw_only=True)
class _Call(Generic[Key]):
    key: Key
    line: bytes
    attempts_left: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Child(Generic[Key]):
    process: "subprocess.Popen[bytes]"
    stdin: int
    stdout: int
    lifeline: int
    deadline: float
    ready: bool = False
    call: _Call[Key] | None = None
    called: float = 0.0
    unsent: bytearray = field(default_factory=bytearray)
    unread: bytearray = field(default_factory=bytearray)


class ChildPool(Generic[Key]):
    """`size` children that serve `target`, a `module:function` that takes `init` and returns the handler of one payload.

    Not thread-safe. `init`, payloads and results are JSON values. A call that fails, overruns `timeout_s` or kills its child is tried
    again `retries` times. The limit runs from when a started child has the call, so imports (limit `start_timeout_s`) do not count.
    """

    def __init__(
        self, target: str, *, size: int, timeout_s: float, retries: int = 1, init: object = None, start_timeout_s: float = 180.0
    ) -> None:
        if size < 1 or timeout_s <= 0 or retries < 0:
            raise ValueError(f"size {size}, timeout_s {timeout_s}, retries {retries}: expected at least 1, more than 0, at least 0")
        self._target, self._timeout_s, self._retries, self._start_timeout_s = target, timeout_s, retries, start_timeout_s
        self._init = json.dumps(init).encode() + b"\n"
        self._waiting: deque[_Call[Key]] = deque()
        self._ended: list[Done[Key] | Failed[Key]] = []
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._children: list[_Child[Key]] = []
        for _ in range(size):
            self._start()

    @property
    def pending(self) -> int:
        """Number of calls that `poll` has not returned yet."""
        return len(self._waiting) + len(self._ended) + sum(child.call is not None for child in self._children)

    def submit(self, key: Key, payload: object) -> None:
        """Queue a call; it goes to a child at once if one is free."""
        self._waiting.append(_Call(key=key, line=json.dumps(payload).encode() + b"\n", attempts_left=1 + self._retries))
        self._dispatch()

    def cancel(self, keys: Container[Key]) -> None:
        """Drop these calls, whatever became of them; a child that works on one is killed and started anew."""
        self._waiting = deque(call for call in self._waiting if call.key not in keys)
        self._ended = [result for result in self._ended if result.key not in keys]
        for child in [child for child in self._children if child.call is not None and child.call.key in keys]:
            self._end(child)
            self._start()

    def poll(self, timeout_s: float = 0.0) -> list[Done[Key] | Failed[Key]]:
        """Finished calls, in the order they finished; waits up to `timeout_s` for the first, and not at all if none is pending.

        Raises:
            ChildError: the target itself does not load, or three children in a row died before they were ready.
        """
        end = time.monotonic() + timeout_s
        while True:
            self._dispatch()
            now = time.monotonic()
            patience = 0.0 if self._ended or not self.pending else max(0.0, min([end, *(child.deadline for child in self._children)]) - now)
            for key, events in self._selector.select(patience):
                # A child that was replaced in this loop has closed its descriptors.
                if key.data not in self._children:
                    continue
                if events & selectors.EVENT_WRITE:
                    self._write(key.data)
                else:
                    self._read(key.data)
            # Check limits after reading: an answer that was in the pipe while the caller was busy is not late.
            self._kill_overdue()
            if self._ended or not self.pending or time.monotonic() >= end:
                self._dispatch()
                ended, self._ended = self._ended, []
                return ended

    def close(self) -> None:
        """Kill the children and drop pending calls."""
        for child in list(self._children):
            self._end(child)
        self._waiting.clear()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        process, ours = spawn(self._target)
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + self._start_timeout_s
        child: _Child[Key] = _Child(
            process=process, stdin=process.stdin.fileno(), stdout=process.stdout.fileno(), lifeline=ours, deadline=deadline
        )
        os.set_blocking(child.stdin, False)
        os.set_blocking(child.stdout, False)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        self._send(child, self._init)

    def _dispatch(self) -> None:
        for child in self._children:
            if not self._waiting:
                return
            if child.ready and child.call is None:
                child.call, child.called = self._waiting.popleft(), time.monotonic()
                child.call.attempts_left -= 1
                child.deadline = child.called + self._timeout_s
                self._send(child, child.call.line)

    def _send(self, child: _Child[Key], line: bytes) -> None:
        child.unsent += line
        self._write(child)
        if child.unsent:
            self._selector.register(child.stdin, selectors.EVENT_WRITE, child)

    def _write(self, child: _Child[Key]) -> None:
        # A broken pipe is a dead child, which its closed stdout reports.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while child.unsent:
                del child.unsent[: os.write(child.stdin, child.unsent)]
        if not child.unsent:
            if child.call is not None:
                child.deadline = time.monotonic() + self._timeout_s
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.stdin)

    def _read(self, child: _Child[Key]) -> None:
        ended = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(child.stdout, READ_BYTES):
                child.unread += data
            ended = True
        # An answer that a child sent before it ended counts, even when both are read at once.
        while (cut := child.unread.find(b"\n")) >= 0:
            line = bytes(child.unread[:cut])
            del child.unread[: cut + 1]
            self._take(child, json.loads(line))
        if ended:
            self._replace(child, last_words(child.process))

    def _take(self, child: _Child[Key], answer: dict[str, Any]) -> None:
        if "broken" in answer:
            raise ChildError(f"cannot serve {self._target}: {answer['broken']}")
        if "ready" in answer:
            child.ready, child.deadline, self._failed_starts = True, float("inf"), 0
            return
        call, child.call, child.deadline = child.call, None, float("inf")
        assert call is not None, f"an answer without a call: {str(answer)[:200]}"
        if "error" in answer:
            self._fail(call, answer["error"])
        else:
            self._ended.append(Done(key=call.key, result=answer["result"], seconds=time.monotonic() - child.called))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for child in [child for child in self._children if child.deadline <= now]:
            limit = self._timeout_s if child.ready else self._start_timeout_s
            self._replace(child, f"took longer than {limit:g} s and was killed")

    def _replace(self, child: _Child[Key], reason: str) -> None:
        call, ready = child.call, child.ready
        self._end(child)
        if not ready:
            self._failed_starts += 1
            if self._failed_starts >= START_ATTEMPTS:
                raise ChildError(f"cannot serve {self._target}: {START_ATTEMPTS} children were lost at their start; the last one {reason}")
        if call is not None:
            self._fail(call, reason)
        self._start()

    def _fail(self, call: _Call[Key], reason: str) -> None:
        if call.attempts_left > 0:
            self._waiting.appendleft(call)
        else:
            self._ended.append(Failed(key=call.key, reason=reason))

    def _end(self, child: _Child[Key]) -> None:
        self._children.remove(child)
        for descriptor in (child.stdin, child.stdout):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        if child.process.returncode is None:
            kill_group(child.process.pid)
            child.process.wait()
        for pipe in (child.process.stdin, child.process.stdout):
            if pipe is not None:
                pipe.close()
        os.close(child.lifeline)
