"""The process between a child and its parent: limits a command, and kills everything it started when the command or the parent ends.

Arguments: `LIFELINE SECTION MEMORY_GB PROCESSES FILE_GB LANDLOCK COMMAND…`. LIFELINE is one end of a socket: if its other end closes,
everything is killed; a byte from there requests an orderly end; the reason of a kill is written to it.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
"""Capabilities left to root, as in containers: without SYS_PTRACE, SYS_ADMIN, PERFMON, DAC_READ_SEARCH it cannot read other processes."""
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF, LANDLOCK_SCOPE_SIGNAL = 444, 446, 2
OOM_SCORE = 500
"""Added to the kernel's score: if memory runs out, it kills children before workers."""
DEFAULTS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def become(command: list[str], *, parent: int, file_gb: float, landlock: bool) -> None:
    """Replace this process by the command, in a session of its own, with default signals and limits; exits if `parent` has exited."""
    os.setsid()
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, int(min(file_gb, 1e6) * 1e9))
    if sys.platform == "linux":
        _confine(landlock=landlock)
    if not ends_with(parent):
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def limit(kind: int, most: int, *, for_good: bool = True) -> None:
    """Limit a resource of this process and its children to `most`, or the hard limit if lower; `for_good` lowers the hard limit too."""
    hard = resource.getrlimit(kind)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed if for_good else hard))


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def ends_with(parent: int) -> bool:
    """Let Linux kill this process when its parent exits; return False if `parent` has already exited."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def scope_signals() -> bool:
    """Let this process and those it starts signal, trace and inspect only each other, by Landlock. False before Linux 6.12."""
    libc, rules = ctypes.CDLL(None), (ctypes.c_uint64 * 3)(0, 0, LANDLOCK_SCOPE_SIGNAL)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
    if ruleset < 0:
        return False
    failed = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    if failed:  # only root may, unless setuid programs lose their effect
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        failed = libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return not failed


def _confine(*, landlock: bool) -> None:
    """Let the kernel kill this process first if memory runs out, drop capabilities, and limit signals with `landlock`."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as score:
        score.write(str(OOM_SCORE))
    for capability in range(64):
        if capability not in CAPABILITIES:
            prctl(PR_CAPBSET_DROP, capability)
    if landlock:
        scope_signals()


SWEEP_EVERY_S = (0.02, 5.0)
"""Time between two sweeps: doubles from the first to the second."""
STUCK_S = 25.0
"""Processes that SIGKILL has not ended after this time, with no new ones, are left: another user's, or one that waits for a device."""
PAGE, RESIDENT = os.sysconf("SC_PAGE_SIZE"), 1


class ProcessTree:
    """A child of this process and everything that the child has started.

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
        """Return process id -> process group of every descendant of this process."""
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
        """Kill all processes and return when none is left, or after `STUCK_S` without progress.

        With `grace_s`, first sends SIGTERM to the child, waits so many seconds, and sends SIGTERM to the others.
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
        """Signal the child's group, then all groups, whose members then cannot fork, then each process.

        Returns the ids of the processes that this one may signal.
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
        """Collect ended processes for `limit_s`, or until none is left."""
        end = time.monotonic() + limit_s
        self.reap()
        while not self.empty and time.monotonic() < end:
            time.sleep(0.001)
            self.reap()


def memory_gb(pids: Iterable[int], most_gb: float) -> float:
    """Return the memory of these processes in GB; if it exceeds `most_gb`, counted again with shared pages divided (slow)."""
    pids = list(pids)
    used_gb = sum(statm_bytes(pid, RESIDENT) for pid in pids) / 1e9
    return used_gb if used_gb <= most_gb else sum(map(_proportional, pids)) / 1e9


def _may_signal(pid: int, number: signal.Signals) -> bool:
    """Signal a process; return False if that is forbidden, True also if it has ended."""
    try:
        os.kill(pid, number)
    except OSError as error:
        return not isinstance(error, PermissionError)
    return True


def _stat(pid: str) -> list[bytes]:
    """Return state, parent, group and further fields of /proc/PID/stat; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(1024).rpartition(b")")[2].split()
    except OSError:
        return []


def statm_bytes(pid: int, field: int) -> int:
    """Return a field of /proc/PID/statm in bytes: 0 mapped, `RESIDENT`, 5 data and stack; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[field]) * PAGE
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    """Return the resident bytes of a process; a shared page is divided among its processes. Slow."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return statm_bytes(pid, RESIDENT)


PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 1.0
"""Time for the remaining processes at an orderly end."""
EVERY_S, SHARE = 0.25, 0.01
"""Shortest time between two checks of the limits, and the largest share of a core for them."""


def main() -> None:
    """Run the command under the limits, and exit with its status."""
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
    """Wait for the end of the command or its parent, or for a limit; return the seconds for which remaining processes may still run."""
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
    """Return the exceeded limit as an error text with its configuration key; empty if none is exceeded."""
    pids = tree.processes()
    if len(pids) > most_processes:
        return f"had {len(pids)} processes and was killed: {section}.max_processes is {most_processes}"
    if (used_gb := memory_gb(pids, most_gb)) > most_gb:
        return f"used {used_gb:.3g} GB of memory and was killed: {section}.memory_gb is {most_gb:.3g}"
    return ""


def _end_as(status: int | None) -> None:
    """Exit as the child did by its wait status: with its exit code, or by its signal; by SIGKILL if None."""
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
