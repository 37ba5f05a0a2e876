"""Runs a user's program as a child process, and serves an ASGI application to it on the loopback."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from penstock.infra.sandbox.spawn import CONTINUED_S, KILLED_S, ORDERLY_S, ChildRules, Lifeline, child_environment, keeper_of, kill_stopped

OUTPUT_BYTES = 4096
"""Number of last bytes of a program's output that are stored."""


class Program:
    """A running program with the keeper that limits it."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: Lifeline, stdin: bytes) -> None:
        self._process, self._lifeline = process, lifeline
        self._reason = ""
        self._tail = bytearray()
        self._talking = asyncio.create_task(self._talk(stdin))
        self._ending = asyncio.create_task(process.wait())

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, stdin: bytes, environment: Mapping[str, str], rules: ChildRules, folder: Path | None = None
    ) -> "Program":
        """Start a program with `stdin` as its standard input and `environment` in addition to what children get."""
        lifeline = Lifeline()
        with lifeline.theirs as theirs:
            process = await asyncio.create_subprocess_exec(
                *keeper_of(argv, rules, lifeline), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),), start_new_session=True, cwd=folder,
                env={**child_environment(os.environ, rules.pass_env), **environment},
            )  # fmt: skip
        return cls(process, lifeline, stdin)

    async def wait(self) -> int:
        """Return the exit status, negative for a signal, once the program and everything it started have ended."""
        while (status := await self._ends(CONTINUED_S)) is None:
            pass
        await self._close()
        return status

    async def kill(self) -> None:
        """End the program by SIGTERM and, a second later, everything it started; in bounded time, even if a process remains."""
        self._lifeline.end_orderly()
        await self._ends(ORDERLY_S)
        self._lifeline.end()
        limit_s = time.monotonic() + KILLED_S
        while self._process.returncode is None and time.monotonic() < limit_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGCONT)  # the program may have stopped its keeper
            await self._ends(CONTINUED_S)
        if self._process.returncode is None:
            kill_stopped(self._process.pid)
            await self._ends(CONTINUED_S)
        await self._close()

    async def _ends(self, limit_s: float) -> int | None:
        """Return the exit status, None after `limit_s`. Does not wait for the pipes, which a remaining process may have open."""
        if self._process.returncode is None:
            await asyncio.wait({self._ending}, timeout=limit_s)
        return self._process.returncode

    async def _close(self) -> None:
        self._reason = self._reason or self._lifeline.close()
        await asyncio.wait({self._talking}, timeout=ORDERLY_S)
        self._talking.cancel()

    @property
    def output(self) -> str:
        """The last `OUTPUT_BYTES` of standard output and errors together, and the limit that ended the program, if any."""
        return self._tail.decode(errors="replace") + (f"\n{self._reason}" if self._reason else "")

    async def _talk(self, stdin: bytes) -> None:
        """Write `stdin` to the program and store the end of its output, until its output is closed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        writing = asyncio.create_task(_give(self._process.stdin, stdin))
        try:
            while piece := await self._process.stdout.read(1 << 16):
                self._tail = (self._tail + piece)[-OUTPUT_BYTES:]
        finally:
            writing.cancel()


async def _give(pipe: asyncio.StreamWriter, stdin: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        pipe.write(stdin)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


def how_it_ended(status: int, output: str) -> str:
    """Format an exit status and the last line of the output in one line.

    Example:
        how_it_ended(1, "...\\nKeyError: 'x'\\n")  # -> "exit status 1: KeyError: 'x'"
    """
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{how}: {lines[-1][:300]}" if lines else how


class Loopback:
    """A server on 127.0.0.1, on a free port."""

    def __init__(self, app: Any) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(settings)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # signals are the process's
        # The socket listens already: a client that connects before the server runs only waits.
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Stop serving; open requests are cut off within a second."""
        self._server.should_exit = True
        await self._serving
        self._socket.close()
