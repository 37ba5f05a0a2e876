"""Nobody outlives the other: an engine's processes end with the worker that owns them, and the worker learns of their end.

The rule: whatever kills the worker, SIGKILL too, its engine's processes are gone within seconds, and nothing of theirs is left.
"""

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

OWNER = "PENSTOCK_ENGINE_OWNER"
"""Process id of the worker, for the processes of its engine."""
SCRATCH = "PENSTOCK_ENGINE_SCRATCH"
"""Directory of the engine's temporary files, which ends with it."""

_SHARED = Path("/dev/shm")


def end_with_owner() -> None:
    """In a process of an engine: watch the worker from a thread, and end when it ends. Anywhere else: nothing."""
    owner = int(os.environ.get(OWNER, "0"))
    if not owner or owner == os.getpid():
        return
    between = _ancestors(upto=owner)
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end(between)
        return
    threading.Thread(target=_watch, args=(handle, between), daemon=True, name="end-with-owner").start()


def _watch(handle: int, between: list[int]) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll():
        pass
    _end(between)


def _end(between: list[int]) -> None:
    """End the processes between the worker and this one, which would wait for orders for ever, and then this one."""
    for name in _shared_segments():
        with contextlib.suppress(OSError):
            (_SHARED / name).unlink()
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    for pid in [*between, os.getpid()]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _ancestors(*, upto: int) -> list[int]:
    """Process ids of this one's ancestors below `upto`; none when `upto` is not among them."""
    found, pid = [], os.getppid()
    while pid > 1 and pid != upto:
        found.append(pid)
        try:
            # The name before the last parenthesis may hold anything, spaces too.
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return []
    return found if pid == upto else []


def _shared_segments() -> set[str]:
    """Names in /dev/shm of the segments of Python's shared memory that this process has open: its engine's own."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {Path(line.split()[-1]).name for line in lines if f"{_SHARED}/psm_" in line and not line.endswith("(deleted)")}


_AGAIN_S = 0.2


def watch_processes(client: Any, dead: threading.Event) -> None:
    """In the worker: when one of the engine's processes ends, set `dead` and fail every call that waits for an answer.

    vLLM's own watch only marks the client; whoever waits for an output or an answer of a killed engine would wait for ever.
    """
    sentinels = [process.sentinel for process in client.resources.engine_manager.processes]
    calls, outputs = client.utility_results, client.outputs_queue

    def wait() -> None:
        connection.wait(sentinels)
        dead.set()
        outputs.put_nowait(RuntimeError("the engine's process ended"))
        while True:  # a call may have been made at this very moment, and vLLM would let it wait
            for future in list(calls.values()):
                with contextlib.suppress(Exception):  # answered, or failed already
                    future.set_exception(RuntimeError("the engine's process ended"))
            time.sleep(_AGAIN_S)

    threading.Thread(target=wait, daemon=True, name="engine-death").start()
