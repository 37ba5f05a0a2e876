"""Processes that are number 1 of their own PID namespace, as in containers."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from tests.support.paths import ROOT

_UNSHARE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")


def containers_work() -> bool:
    """Whether this system lets us make PID namespaces."""
    try:
        return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def contained(command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start a command as process 1; killing what is returned kills it. stderr goes to stdout."""
    return subprocess.Popen(
        [*_UNSHARE, *command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
