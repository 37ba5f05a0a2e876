"""Starts a child process that serves JSON lines and never outlives its parent; see `penstock.infra.sandbox.child`."""

import contextlib
import os
import signal
import subprocess
import sys

from penstock.infra.errors import PenstockError
from penstock.infra.paths import IMPORT_ROOT
from penstock.infra.sandbox.rules import ChildRules, child_environment

# -P and this first line: our packages come first, whatever the working directory or the user's PYTHONPATH holds.
BOOTSTRAP = f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.infra.sandbox.child import main; main()"
START_ATTEMPTS = 3
KILLED_S = 30.0
"""Longest wait for the end of a killed process: one that waits for a device ends only with that."""


class ChildError(PenstockError):
    """No child can be started: its target does not load."""


def spawn(target: str, rules: ChildRules) -> "tuple[subprocess.Popen[bytes], int]":
    """A child that serves `target`, a `module:function`, and the descriptor that has to stay open for as long as it may live."""
    lifeline, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOTSTRAP, target, str(lifeline)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(lifeline,),
            # Its own session: Ctrl-C goes to the parent only, and a kill reaches everything the child has started.
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **child_environment(os.environ, rules.pass_env)},
            bufsize=0,
        )
    finally:
        os.close(lifeline)
    return process, ours


def last_words(process: "subprocess.Popen[bytes]") -> str:
    """Kill what is left of a child and everything it has started; says how it ended."""
    # End the group before waiting for its leader: until then its number cannot be reused.
    kill_group(process.pid)
    try:
        status = process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        return f"does not end: process {process.pid} is still there {KILLED_S:g} s after SIGKILL"
    return f"died with signal {signal.Signals(-status).name}" if status < 0 else f"died with exit status {status}"


def kill_group(process: int) -> None:
    """Kill a child and everything it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
