"""Starts child processes that never outlive their parent, isolated as configured: programs, and servers of JSON lines (`child`)."""

import contextlib
import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from penstock.infra.backends.hardware import this_memory
from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.paths import IMPORT_ROOT, state_path

Isolation = Literal["none", "landlock", "bwrap", "auto"]

REWARD_TOKEN = "PENSTOCK_REWARD_TOKEN"
"""Environment variable with the token sent to a reward service as `Authorization: Bearer …`."""
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASS", "PWD", "CREDENTIAL", "AUTH", "SECURITY")
_LISTED = """
PATH HOME USER LOGNAME SHELL PWD LANG LANGUAGE LC_* TZ TERM COLUMNS TMPDIR TEMP TMP XDG_* LD_LIBRARY_PATH LD_PRELOAD
PYTHON* VIRTUAL_ENV CONDA_* COVERAGE_* JAVA_* PENSTOCK_HOME PENSTOCK_DEBUG
OMP_* GOMP_* KMP_* MKL_* OPENBLAS_* NUMEXPR_* NUMBA_* MALLOC_* CUDA_* CUBLAS_* CUDNN_* NVIDIA_* NCCL_* GLOO_* HIP_* ROCR_*
TORCH_* PYTORCH_* TORCHINDUCTOR_* TRITON_* VLLM_* DS_* HF_* HUGGINGFACE_* TRANSFORMERS_* TOKENIZERS_PARALLELISM
HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY http_proxy https_proxy no_proxy all_proxy
SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
NAMES = frozenset(name for name in _LISTED.split() if not name.endswith("*"))
"""Names of variables that children get."""
STARTS = tuple(name.removesuffix("*") for name in _LISTED.split() if name.endswith("*"))
"""Prefixes of further variables that children get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRules:
    """Rules for the children of one section of the configuration."""

    section: str
    """Table of the configuration with these keys, for messages."""
    pass_env: tuple[str, ...] = ()
    """Names of further environment variables that children get."""
    memory_gb: float | None = None
    """Memory limit of one child with everything it started; half of the machine's memory if None."""
    max_processes: int = 512
    """Limit on the number of processes of one child with everything it started."""
    file_gb: float = 64.0
    """Size limit of one file that a child writes."""
    isolate: Isolation | None = None
    """None: "landlock" for an ordinary user, "none" for root."""
    isolate_network: bool = False
    """Children have no network; needs bwrap."""


REWARD, ENVIRONMENT = ChildRules(section="reward"), ChildRules(section="environment")
"""Rules of a configuration without such keys."""


def child_environment(environ: Mapping[str, str], pass_env: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that a child gets: listed ones, those whose value is a path, and those in `pass_env`.

    A name that contains one of `SECRET_WORDS` is only passed if it is on the list or in `pass_env`.

    Example:
        child_environment({"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "x", "DB": "postgres://me:x@db"})  # -> PATH and HF_HOME
    """
    return {name: value for name, value in environ.items() if name in pass_env or _is_public(name, value)}


def _is_public(name: str, value: str) -> bool:
    """Return True if children get this variable: it is listed, or has a path as its value, and contains no secret."""
    if "://" in value and "@" in value:  # a password in an address, as of a proxy
        return False
    if name in NAMES:
        return True
    if any(word in name.upper() for word in SECRET_WORDS):
        return False
    return name.startswith(STARTS) or _is_path(value)


def _is_path(value: str) -> bool:
    """Return True for an absolute path that exists or whose folder does: a secret may start with a slash too."""
    if not value.startswith("/") or len(value) > 4096:
        return False
    path = Path(value)
    try:
        return path.exists() or (path.parent != Path("/") and path.parent.is_dir())
    except (OSError, ValueError):
        return False


# -P and this first line: our packages come first, in any working directory and with any PYTHONPATH of the user.
_START = f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r}); from penstock.infra.sandbox.{{}} import main; main()"
KEEPER = (sys.executable, "-I", "-S", "-c", _START.format("keeper"))
SERVER = (sys.executable, "-P", "-c", _START.format("child"))
START_ATTEMPTS = 3
STRAY = "wrote to the pipe that carries results and was killed"
KILLED_S = 30.0
"""Longest wait for the end of killed processes: longer than a keeper waits for one that SIGKILL does not end."""
CONTINUED_S = 1.0
"""Time between two SIGCONT for a keeper that its child may have stopped."""
ORDERLY_S = 5.0
"""Longest wait for an orderly end, before everything is killed."""
_BWRAP = (
    *("bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--cap-drop", "ALL"),
    *("--dev-bind", "/", "/", "--proc", "/proc"),
)
PROBE_S = 30.0


class ChildError(PenstockError):
    """No child process can be started, usually because its target does not load."""


class Lifeline:
    """The connection to a child's keeper: when it closes, the keeper ends everything that the child has started."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()

    def end_orderly(self) -> None:
        """Request an end by SIGTERM, with a second for other processes that the child has started."""
        with contextlib.suppress(OSError):
            self._ours.send(b"e")

    def end(self) -> None:
        """Kill the child and everything it has started."""
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> str:
        """Close the connection; returns the keeper's reason for killing the child, empty if it has not."""
        with contextlib.suppress(OSError), self._ours:
            self._ours.setblocking(False)
            return self._ours.recv(4096).decode()
        return ""


def keeper_of(command: Sequence[str], rules: ChildRules, lifeline: Lifeline) -> list[str]:
    """Return the command line of the keeper that runs `command` by these rules. Raises `ConfigError` without the isolation they need."""
    isolation = chosen_isolation(rules)
    memory_gb = this_memory().total / 2e9 if rules.memory_gb is None else rules.memory_gb
    settings = (lifeline.theirs.fileno(), rules.section, memory_gb, rules.max_processes, rules.file_gb, isolation)
    return [*KEEPER, *map(str, settings), *(bwrap_command(rules) if isolation == "bwrap" else ()), *command]


def spawn(target: str, rules: ChildRules) -> "tuple[subprocess.Popen[bytes], Lifeline]":
    """Start a sandboxed child that executes calls of `target`, a `module:function`, over stdin and stdout; it ends if the lifeline closes.

    Raises `ConfigError` if this machine lacks the isolation that the rules require.
    """
    lifeline = Lifeline()
    with lifeline.theirs as theirs:
        process = subprocess.Popen(
            keeper_of([*SERVER, target], rules, lifeline),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            # Its own session: Ctrl-C goes to the parent only.
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **child_environment(os.environ, rules.pass_env)},
            bufsize=0,
        )
    return process, lifeline


def end_child(process: "subprocess.Popen[bytes]", lifeline: Lifeline, *, orderly: bool = False) -> str:
    """End a child and everything it has started; return how it ended, as the end of a sentence."""
    if orderly:
        lifeline.end_orderly()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ORDERLY_S)
    lifeline.end()
    limit_s = time.monotonic() + KILLED_S
    while process.poll() is None and time.monotonic() < limit_s:
        process.send_signal(signal.SIGCONT)  # the child may have stopped its keeper
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CONTINUED_S)
    if process.returncode is None:
        kill_stopped(process.pid)
    try:
        status = process.wait(CONTINUED_S)
    except subprocess.TimeoutExpired:
        return f"does not end: a process that it started still runs {KILLED_S:g} s after SIGKILL"
    if reason := lifeline.close():
        return reason
    return f"ended with signal {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def kill_stopped(pid: int) -> None:
    """Kill a keeper that its child has stopped; a running one ends everything that the child has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper = psutil.Process(pid)
        if keeper.status() == psutil.STATUS_STOPPED:
            keeper.kill()


@functools.cache
def chosen_isolation(rules: ChildRules) -> Literal["none", "landlock", "bwrap"]:
    """Return the isolation for these rules on this machine. Raises `ConfigError` if they require bwrap and it does not work."""
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
    """Command prefix for its own user, process id and IPC namespaces: devices and files are visible, except the embedded broker's."""
    broker = os.path.realpath(state_path() / "broker")  # bwrap mounts nothing behind a link
    hidden = ("--tmpfs", broker) if os.path.isdir(broker) else ()
    return (*_BWRAP, *hidden, *(["--unshare-net"] if rules.isolate_network else []), "--")


def bwrap_fault(rules: ChildRules) -> str | None:
    """Return why bubblewrap does not work on this machine, with the fix; None if it works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed: apt-get install bubblewrap"
    command = [*bwrap_command(rules), "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not start: {error}"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return None if done.returncode == 0 else f"bwrap does not work here ({lines[-1]})"
