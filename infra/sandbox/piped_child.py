"""One child of a pool: its pipes, which never block, and the calls it works on."""

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
"""Of one answer: more than a child sends."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call(Generic[Key]):
    """One call of a pool's user."""

    key: Key
    payload: str
    attempts_left: int
    timeout_s: float
    alone: bool = False
    """Whether it gets a child to itself, because a child died while it worked on this call and others, and any of them may be the cause."""
    deadline: float = float("inf")
    called: float = 0.0
    stopped: str | None = None
    """Why the child was asked to give it up; None if it was not."""
    cancelled: bool = False


class PipedChild(Generic[Key]):
    """A child process, the requests still to be written to it, and the answers read so far."""

    def __init__(self, target: str, *, rules: ChildRules, deadline: float) -> None:
        self.process, self.lifeline = spawn(target, rules)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.deadline = deadline
        """For its start."""
        self.ready = False
        self.at_once = 1
        """Calls it works on side by side."""
        self.can_cancel = False
        """Whether it can give up a call and live on."""
        self.doing = ""
        """Its current work, as it last reported it."""
        self.calls: dict[int, Call[Key]] = {}
        self._sending: list[Call[Key]] = []
        self._unsent, self._unread = bytearray(), bytearray()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    @property
    def active_calls(self) -> int:
        """Number of its calls whose answers are still wanted."""
        return sum(not call.cancelled for call in self.calls.values())

    def has_room(self, call: Call[Key]) -> bool:
        """Whether it can take another call."""
        room = 1 if call.alone or any(held.alone for held in self.calls.values()) else self.at_once
        return self.ready and len(self.calls) < room

    def call(self, number: int, call: Call[Key]) -> None:
        """Send a call; its limit runs from when it is written whole."""
        self.calls[number] = call
        self.doing = ""
        call.called = time.monotonic()
        call.deadline = call.called + call.timeout_s
        self._sending.append(call)
        self.send(f"[{number}, {call.payload}]")

    def cancel(self, number: int, reason: str, *, grace_s: float) -> None:
        """Tell it to give up a call, which it has to answer within `grace_s`."""
        self.calls[number].stopped, self.calls[number].deadline = reason, time.monotonic() + grace_s
        self.send(f"[{number}]")

    def send(self, line: str) -> None:
        """Write as much as the pipe takes; `write` goes on with the rest."""
        self._unsent += line.encode() + b"\n"
        self.write()

    @property
    def unsent(self) -> bool:
        """Whether something waits for the pipe."""
        return bool(self._unsent)

    def write(self) -> None:
        """Write what waits, as much as the pipe takes."""
        # A broken pipe is a dead child, which its closed stdout reports.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(self.stdin, self._unsent)]
        if not self._unsent:
            for call in self._sending:
                if call.stopped is None:
                    call.deadline = time.monotonic() + call.timeout_s
            self._sending.clear()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The complete answers, and True if the child has ended; answers that it sent before its end count.

        Raises:
            ValueError: the code in the child has written to the pipe of the answers.
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
        return [self._answer(line) for line in lines], ended

    def _answer(self, line: bytearray) -> dict[str, Any]:
        match json.loads(line):
            case {"call": int(), "result": _} | {"call": int(), "error": str()} | {"doing": str()} as answer if self.ready:
                return dict(answer)
            case {"ready": True, "at_once": int(), "can_cancel": bool()} | {"broken": str()} as answer if not self.ready:
                return dict(answer)
        raise ValueError

    def close(self) -> None:
        """Kill it and everything it has started."""
        if self.process.returncode is None:
            end_child(self.process, self.lifeline)
        self.lifeline.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
