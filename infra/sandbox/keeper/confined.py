"""Replaces this process by a command with few rights: limits, capabilities, Landlock."""

import contextlib
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
"""Those that root retains, as in containers: without SYS_PTRACE, SYS_ADMIN, PERFMON and DAC_READ_SEARCH it cannot read other processes."""
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF, LANDLOCK_SCOPE_SIGNAL = 444, 446, 2
OOM_SCORE = 500
"""Added to the kernel's score: if memory runs out, it kills children before workers."""
DEFAULTS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def become(command: list[str], *, parent: int, file_gb: float, landlock: bool) -> None:
    """Replace this process, in a session of its own that ends with `parent`, by the command."""
    os.setsid()
    for number in DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, int(min(file_gb, 1e6) * 1e9))
    if sys.platform == "linux":
        _confine(landlock=landlock)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def limit(kind: int, most: int, *, for_good: bool = True) -> None:
    """Limit this process, and those it starts, to `most`, or to the hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (allowed, allowed if for_good else hard))


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl on this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def scope_signals() -> bool:
    """Landlock: let this process and those it starts signal, trace and read in /proc only each other. False before Linux 6.12."""
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
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as score:
        score.write(str(OOM_SCORE))
    for capability in range(64):
        if capability not in CAPABILITIES:
            prctl(PR_CAPBSET_DROP, capability)
    if landlock:
        scope_signals()
