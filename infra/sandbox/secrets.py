"""Hides the secrets of this process from other processes of the same user.

`/proc/PID/environ` shows the variables of a process's start, including those that it has removed since.
"""

import ctypes
import os
import sys
from pathlib import Path

from penstock.infra.sandbox.keeper import CAPABILITIES, PR_SET_DUMPABLE, prctl
from penstock.infra.sandbox.spawn import child_environment

_CAPABILITY_VERSION = 0x20080522
ENV_START, ENV_END = 47, 48
"""Fields of /proc/PID/stat after the name: the addresses between which the kernel reads `environ`."""


def hide_secrets(*, memory: bool = True) -> None:
    """Blank the values in `/proc/self/environ` that children do not get; `os.environ` is unchanged.

    With `memory`, other processes of the user cannot read this one's memory and descriptors, nor attach a debugger, unless
    `PENSTOCK_DEBUG` is set. A process of root drops capabilities instead: those that its children do not have either.
    """
    if sys.platform != "linux":
        return
    secret = {name: value for name, value in os.environ.items() if name not in child_environment(os.environ)}
    if secret:
        os.environ.update(secret)  # setenv copies: the C library's variables point to the copies, not to the blanked memory
        _blank({os.fsencode(name) for name in secret})
    closed, root = memory and not os.environ.get("PENSTOCK_DEBUG"), os.geteuid() == 0
    if closed and root:
        _limit_capabilities()
    prctl(PR_SET_DUMPABLE, int(root or not closed))


def _limit_capabilities() -> None:
    """Drop all capabilities but those of a container; a command that this process starts as root has all of them again."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: capabilities 0 to 31, then 32 to 63
    if libc.capget(header, words) == 0:
        allowed = sum(1 << capability for capability in CAPABILITIES)
        libc.capset(header, (ctypes.c_uint32 * 6)(*(word & allowed for word in words[:3]), 0, 0, 0))


def _blank(names: set[bytes]) -> None:
    """Overwrite the values of these variables in the memory that the kernel shows as `environ`."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[ENV_START]), int(fields[ENV_END])
    if not 0 < start < end:  # hidden from this process too
        return
    for variable in ctypes.string_at(start, end - start).split(b"\0"):
        name, equals, value = variable.partition(b"=")
        if equals and name in names:
            ctypes.memset(start + len(name) + 1, ord("-"), len(value))
        start += len(variable) + 1
