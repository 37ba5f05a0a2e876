"""Ends an engine's processes when their worker exits, and notifies the worker when they exit."""

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

import psutil

EXTENSION = "penstock.infra.engines.vllm.transfer.Extension"
"""vLLM imports it in every process with a part of the model."""
BACKEND = "penstock"
"""Name of our weight transfer in vLLM."""
OWNER = "PENSTOCK_ENGINE_OWNER"
"""Environment variable of an engine's processes: process id of the worker."""
SCRATCH = "PENSTOCK_ENGINE_SCRATCH"
"""Environment variable of an engine's processes: directory of temporary files, which is removed with them."""
STAGED_OF_FREE = 0.5
"""Largest share of the device's free memory in which an engine's process stages a version while it generates."""

_SHARED = Path("/dev/shm")


def end_with_owner() -> None:
    """In a process of an engine, watch the worker from a thread and exit when it exits; no effect in other processes."""
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
    """Wait until the worker exits, then end this process."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll():
        pass
    _end(between)


def _end(between: list[int]) -> None:
    """Kill this process, and first those between the worker and this one, which would wait forever; free shared memory and files."""
    for name in _shared_segments():
        with contextlib.suppress(OSError):
            (_SHARED / name).unlink()
    if scratch := os.environ.get(SCRATCH):
        shutil.rmtree(scratch, ignore_errors=True)
    for pid in [*between, os.getpid()]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _ancestors(*, upto: int) -> list[int]:
    """Return the process ids of this process's ancestors below `upto`; empty if `upto` is not an ancestor."""
    try:
        ancestors = [parent.pid for parent in psutil.Process().parents()]
    except psutil.Error:  # one of them has just exited
        return []
    return ancestors[: ancestors.index(upto)] if upto in ancestors else []


def _shared_segments() -> set[str]:
    """Return the names in /dev/shm of the shared memory segments that this process has open."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {Path(line.split()[-1]).name for line in lines if f"{_SHARED}/psm_" in line and not line.endswith("(deleted)")}


_POLL_S = 0.2


def watch_processes(client: Any, exited: threading.Event) -> None:
    """In the worker, when one of the engine's processes exits, set `exited` and let every waiting call fail.

    vLLM itself only marks the client; a call that waits for an output of a killed engine would wait forever.
    """
    sentinels = [process.sentinel for process in client.resources.engine_manager.processes]
    calls, outputs = client.utility_results, client.outputs_queue

    def wait() -> None:
        connection.wait(sentinels)
        exited.set()
        outputs.put_nowait(RuntimeError("the engine's process ended"))
        while True:  # fail also calls that are made concurrently, which vLLM would let wait
            for future in list(calls.values()):
                with contextlib.suppress(Exception):  # it may be done already
                    future.set_exception(RuntimeError("the engine's process ended"))
            time.sleep(_POLL_S)

    threading.Thread(target=wait, daemon=True, name="engine-exit").start()
