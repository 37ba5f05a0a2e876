"""Isolation of child processes from other processes of the same user: `isolate` and `isolate_network` of a section."""

import functools
import logging
import os
import shutil
import subprocess
from typing import Literal

from penstock.infra.errors import ConfigError
from penstock.infra.paths import state_path
from penstock.infra.sandbox.rules import ChildRules

_BWRAP = (
    *("bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"),
    *("--dev-bind", "/", "/", "--proc", "/proc"),
)
PROBE_S = 30.0


@functools.cache
def chosen_isolation(rules: ChildRules) -> Literal["none", "landlock", "bwrap"]:
    """The isolation that these rules stand for on this machine. Raises `ConfigError` if they need bwrap and it does not work."""
    if rules.isolate is None:
        return "landlock" if os.geteuid() else "none"
    if rules.isolate in ("none", "landlock"):
        return rules.isolate
    fault, section = bwrap_fault(rules), rules.section
    if fault is None:
        return "bwrap"
    if rules.isolate_network:
        raise ConfigError(f"{section}.isolate_network = true: {fault}; or set it to false")
    if rules.isolate == "bwrap":
        raise ConfigError(f'{section}.isolate = "bwrap": {fault}; or set {section}.isolate = "landlock"')
    logging.getLogger("penstock").warning('%s.isolate = "auto": %s; "landlock" is used', section, fault)
    return "landlock"


def bwrap_command(rules: ChildRules) -> tuple[str, ...]:
    """What precedes a command in its own user, process id and IPC namespaces: devices and files stay, without the embedded broker's."""
    broker = os.path.realpath(state_path() / "broker")  # bwrap mounts nothing behind a link
    hidden = ("--tmpfs", broker) if os.path.isdir(broker) else ()
    return (*_BWRAP, *hidden, *(["--unshare-net"] if rules.isolate_network else []), "--")


def bwrap_fault(rules: ChildRules) -> str | None:
    """Why bubblewrap does not work on this machine; None if it does."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed: apt-get install bubblewrap"
    command = [*bwrap_command(rules), "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not start: {error}"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else f"bwrap does not work here ({lines[-1]})"
