"""The descendants of this process, which adopts their orphans: listed from /proc, measured, ended until none is left."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

SWEEP_EVERY_S = (0.02, 5.0)
"""Time between two sweeps: doubles from the first to the second."""
STUCK_S = 25.0
"""Processes that SIGKILL has not ended after this time, with no new ones, are left: another user's, or one that waits for a device."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessTree:
    """A child of this process and everything it has started.

    With PR_SET_CHILD_SUBREAPER orphans become children of this process: no child means no descendant, daemons included.
    """

    def __init__(self, child: int) -> None:
        self._child = child
        self.status: int | None = None
        """Wait status of the child, None while it runs."""
        self.empty = False

    def reap(self) -> None:
        """Collect the exit statuses of ended processes."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self._child:
                    self.status = ended[1]
            return
        self.empty = True

    def processes(self) -> dict[int, int]:
        """Process ids of the descendants of this process -> their process groups."""
        children, groups = dict[int, list[int]](), dict[int, int]()
        for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
            if name.isdigit() and (fields := _stat(name)) and fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(name))
                groups[int(name)] = int(fields[2])
        pids, front = list[int](), [os.getpid()]
        while front:
            below = children.get(front.pop(), [])
            pids += below
            front += below
        return {pid: groups[pid] for pid in pids}

    def end(self, grace_s: float) -> None:
        """Kill until no process is left, except those that SIGKILL does not end.

        Before that, the child gets SIGTERM and the others `grace_s` seconds to end, then SIGTERM too.
        """
        if grace_s:
            if self.status is None:
                os.kill(self._child, signal.SIGTERM)
            self._wait(grace_s)
            if not self.empty:
                self._signal(signal.SIGTERM)
                self._wait(grace_s / 4)
        every_s, longest_s = SWEEP_EVERY_S
        reached, limit_s = set[int](), time.monotonic() + STUCK_S
        while not self.empty:
            before, reached = reached, self._signal(signal.SIGKILL)
            if reached != before:
                limit_s = time.monotonic() + STUCK_S
            elif time.monotonic() > limit_s:
                return
            self._wait(every_s)
            every_s = min(2 * every_s, longest_s)

    def _signal(self, number: signal.Signals) -> set[int]:
        """Signal whole groups, whose members then cannot fork, then each process; the child's group before /proc is read.

        Returns the processes that may be signalled.
        """
        if self.status is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child, number)
        processes = self.processes()
        for group in {*processes.values()} - {os.getpgrp()}:
            with contextlib.suppress(OSError):
                os.killpg(group, number)
        return {process for process in processes if _may_signal(process, number)}

    def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        self.reap()
        while not self.empty and time.monotonic() < end:
            time.sleep(0.001)
            self.reap()


def memory_gb(pids: Iterable[int], most_gb: float) -> float:
    """Memory of these processes; shared pages count once if it matters for `most_gb`."""
    pids = list(pids)
    used_gb = _sum_gb(_resident, pids)
    return used_gb if used_gb <= most_gb else _sum_gb(_proportional, pids)


def _may_signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def _sum_gb(measure: Callable[[int], int], pids: list[int]) -> float:
    return sum(map(measure, pids)) / 1e9


def _stat(pid: str) -> list[bytes]:
    """State, parent, group and more of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return []


def statm_bytes(pid: int, field: int) -> int:
    """A field of /proc/PID/statm in bytes: 0 mapped, 1 resident, 5 data and stack; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[field]) * PAGE
    except OSError:
        return 0


def _resident(pid: int) -> int:
    """Resident bytes; shared pages count in each process."""
    return statm_bytes(pid, 1)


def _proportional(pid: int) -> int:
    """Resident bytes; shared pages count in parts. Slow."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)
