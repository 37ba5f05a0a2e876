"""Isolation of child processes from other processes of the same user: `isolate` of a section."""

import functools
import logging
import os
import shutil
import subprocess
from typing import Literal

from penstock.infra.errors import ConfigError
from penstock.infra.sandbox.rules import Isolation

BWRAP = ("bwrap", "--unshare-user", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc", "--die-with-parent", "--")
"""A command in its own user and process id namespaces; files, devices and network stay."""
PROBE_S = 30.0


@functools.cache
def chosen_isolation(isolate: Isolation | None, section: str) -> Literal["none", "landlock", "bwrap"]:
    """The isolation that `isolate` stands for on this machine. Raises `ConfigError` if it is "bwrap" and bwrap does not work."""
    if isolate is None:
        return "landlock" if os.geteuid() else "none"
    if isolate in ("none", "landlock"):
        return isolate
    fault = bwrap_fault()
    if fault is None:
        return "bwrap"
    if isolate == "bwrap":
        raise ConfigError(f'{section}.isolate = "bwrap": {fault}; or set {section}.isolate = "landlock"')
    logging.getLogger("penstock").warning('%s.isolate = "auto": %s; "landlock" is used', section, fault)
    return "landlock"


def bwrap_fault() -> str | None:
    """Why bubblewrap does not work on this machine; None if it does."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed: apt-get install bubblewrap"
    try:
        done = subprocess.run([*BWRAP, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not start: {error}"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else f"bwrap does not work here ({lines[-1]})"
