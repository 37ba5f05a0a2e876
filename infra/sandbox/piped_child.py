"""One child of a pool: its non-blocking pipes and its current calls."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.infra.sandbox.rules import ChildRules
from penstock.infra.sandbox.spawn import end_child, spawn

Key = TypeVar("Key")
READ_BYTES = 1 << 16
MAX_UNREAD_BYTES = 80 << 20
"""Of one reply: more than a child sends."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call(Generic[Key]):
    """One call of a pool's user."""

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


class PipedChild(Generic[Key]):
    """A child process, its unsent requests and its replies."""

    def __init__(self, target: str, *, rules: ChildRules, deadline: float) -> None:
        self.process, self.lifeline = spawn(target, rules)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.deadline = deadline
        """Deadline of its start."""
        self.ready = False
        self.at_once = 1
        """Number of concurrent calls."""
        self.can_cancel = False
        """True if it can cancel a call without being killed."""
        self.doing = ""
        """Its current work, as it last reported it."""
        self.calls: dict[int, Call[Key]] = {}
        self._sending: list[Call[Key]] = []
        self._unsent, self._unread = bytearray(), bytearray()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    @property
    def active_calls(self) -> int:
        """Number of calls whose results are needed."""
        return sum(not call.cancelled for call in self.calls.values())

    def has_room(self, call: Call[Key]) -> bool:
        """True if it can take another call."""
        room = 1 if call.alone or any(other.alone for other in self.calls.values()) else self.at_once
        return self.ready and len(self.calls) < room

    def call(self, number: int, call: Call[Key]) -> None:
        """Send a call; its time limit starts when it is completely written."""
        self.calls[number] = call
        self.doing = ""
        call.called = time.monotonic()
        call.deadline = call.called + call.timeout_s
        self._sending.append(call)
        self.send(f"[{number}, {call.payload}]")

    def cancel(self, number: int, reason: str, *, grace_s: float) -> None:
        """Request the cancellation of a call, which the child has to confirm within `grace_s`."""
        self.calls[number].stopped, self.calls[number].deadline = reason, time.monotonic() + grace_s
        self.send(f"[{number}]")

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
        # A broken pipe means that the child has ended, which its closed stdout reports.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(self.stdin, self._unsent)]
        if not self._unsent:
            for call in self._sending:
                if call.stopped is None:
                    call.deadline = time.monotonic() + call.timeout_s
            self._sending.clear()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The complete replies, and True if the child has ended; replies sent before its end count.

        Raises:
            ValueError: the code in the child has written to the pipe of the replies.
        """
        ended = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.stdout, READ_BYTES):
                self._unread += data
                if len(self._unread) > MAX_UNREAD_BYTES and b"\n" not in data:
                    raise ValueError
            ended = True
        *lines, rest = self._unread.split(b"\n")
        self._unread = rest
        return [self._parsed(line) for line in lines], ended

    def _parsed(self, line: bytearray) -> dict[str, Any]:
        match json.loads(line):
            case {"call": int(), "result": _} | {"call": int(), "error": str()} | {"doing": str()} as reply if self.ready:
                return dict(reply)
            case {"ready": True, "at_once": int(), "can_cancel": bool()} | {"broken": str()} as reply if not self.ready:
                return dict(reply)
        raise ValueError

    def close(self) -> None:
        """Kill it and everything it has started."""
        if self.process.returncode is None:
            end_child(self.process, self.lifeline)
        self.lifeline.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
