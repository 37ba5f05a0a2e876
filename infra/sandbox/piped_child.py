"""A child process behind two non-blocking pipes of JSON lines, so that nothing it sends is executed; driven by a selector or by asyncio."""

import contextlib
import json
import os
from typing import Any

from penstock.infra.sandbox.rules import ChildRules
from penstock.infra.sandbox.spawn import end_child, spawn

READ_BYTES = 1 << 16
MAX_UNREAD_BYTES = 80 << 20
"""Of one reply: more than a child sends."""


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
        """The complete replies, and True if the child has ended; replies sent before its end count.

        Raises:
            ValueError, RecursionError: the code in the child has written to the pipe of the replies.
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
        """Kill it and everything it has started."""
        if self.process.returncode is None:
            end_child(self.process, self.lifeline, orderly=orderly)
        self.lifeline.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
