"""Runs a user's program as a child process: its output is kept in part, and nothing of it outlives its end or its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.infra.sandbox.rules import ChildRules, child_environment
from penstock.infra.sandbox.spawn import kill_group

KEPT_BYTES = 4096
"""Of a program's output: the last ones."""
# Handles signals by default, asks the kernel to kill the program with its parent (PR_SET_PDEATHSIG), then becomes the program.
_LAUNCHER = """
import ctypes, os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""


class Program:
    """A running program in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process, given: bytes) -> None:
        self._process = process
        self._kept = bytearray()
        self._talking = asyncio.create_task(self._talk(given))

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, given: bytes, environment: Mapping[str, str], rules: ChildRules, folder: Path | None = None
    ) -> "Program":
        """Start a program with `given` on its standard input and `environment` in addition to what children get."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
            env={**child_environment(os.environ, rules.pass_env), **environment},
        )
        return cls(process, given)

    async def wait(self) -> int:
        """Its exit status, negative for a signal, once it has ended; what it has started is killed then."""
        status = await self._process.wait()
        kill_group(self._process.pid)
        with contextlib.suppress(TimeoutError):  # who left the group may still hold the output
            await asyncio.wait_for(self._talking, 1.0)
        return status

    async def kill(self) -> None:
        """Kill it and everything it has started."""
        kill_group(self._process.pid)
        await self.wait()

    @property
    def output(self) -> str:
        """The end of what it wrote, standard output and errors together."""
        return self._kept.decode(errors="replace")

    async def _talk(self, given: bytes) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        writing = asyncio.create_task(_give(self._process.stdin, given))
        try:
            while piece := await self._process.stdout.read(1 << 16):
                self._kept = (self._kept + piece)[-KEPT_BYTES:]
        finally:
            writing.cancel()


async def _give(pipe: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        pipe.write(given)
        await pipe.drain()
        pipe.close()
        await pipe.wait_closed()


def how_it_ended(status: int, output: str) -> str:
    """An exit status and the last line of the output, in a line.

    Example:
        how_it_ended(1, "...\\nKeyError: 'x'\\n")  # -> "exit status 1: KeyError: 'x'"
    """
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"{how}: {lines[-1][:300]}" if lines else how
