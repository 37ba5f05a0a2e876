"""Runs one command for its parent, limits it, and kills everything it started when the command or the parent ends.

Arguments: `LIFELINE SECTION MEMORY_GB PROCESSES FILE_GB LANDLOCK COMMAND…`. LIFELINE is one end of a socket: if its other end closes,
everything is killed; a byte from there requests an orderly end; the reason of a kill is written to it.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from penstock.infra.sandbox.keeper.confined import PR_SET_DUMPABLE, become, prctl
from penstock.infra.sandbox.keeper.process_tree import ProcessTree, memory_gb

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""Time for the remaining processes at an orderly end."""
EVERY_S, SHARE = 0.25, 0.01
"""Shortest time between two checks of the limits, and the largest share of a core for them."""


def main() -> None:
    """Run the command and exit as it does."""
    lifeline, section, most_gb, most_processes, file_gb, landlock, *command = sys.argv[1:]
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_DUMPABLE, 0)
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        os.close(int(lifeline))
        become(command, parent=keeper, file_gb=float(file_gb), landlock=landlock == "landlock")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the command's pipes close when the command ends
        os.dup2(nothing, stream)
    tree = ProcessTree(child)
    tree.end(_watched(tree, lambda: _exceeded(tree, section, float(most_gb), int(most_processes)), int(lifeline), wake))
    _end_as(tree.status)


def _watched(tree: ProcessTree, exceeded: Callable[[], str], lifeline: int, wake: int) -> float:
    """Wait for the end of the command or of the parent, or for a limit; returns the grace period of the remaining processes."""
    poller = select.poll()
    for descriptor in (lifeline, wake):
        poller.register(descriptor, select.POLLIN)
    next_s = 0.0
    while True:
        ready = [descriptor for descriptor, _ in poller.poll(1000 * max(0.0, next_s - time.monotonic()))]
        if lifeline in ready:
            return GRACE_S if _read(lifeline) else 0.0
        if wake in ready:
            _read(wake)
            tree.reap()
            if tree.status is not None:
                return 0.0
        if time.monotonic() >= next_s:
            start = time.process_time()
            if reason := exceeded():
                with contextlib.suppress(OSError):
                    os.write(lifeline, reason.encode())
                return 0.0
            next_s = time.monotonic() + max(EVERY_S, (time.process_time() - start) / SHARE)


def _exceeded(tree: ProcessTree, section: str, most_gb: float, most_processes: int) -> str:
    """The exceeded limit with its key; empty if none is exceeded."""
    pids = tree.processes()
    if len(pids) > most_processes:
        return f"had {len(pids)} processes and was killed: {section}.max_processes is {most_processes}"
    if (used_gb := memory_gb(pids, most_gb)) > most_gb:
        return f"used {used_gb:.3g} GB of memory and was killed: {section}.memory_gb is {most_gb:.3g}"
    return ""


def _end_as(status: int | None) -> None:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    os._exit(code)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end was reset
        return b""
