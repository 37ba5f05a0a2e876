"""One worker of this machine: its current process, earlier exits, and their common log file.

Its last output excludes that of earlier processes.
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.pipeline.inspect.run_view_types import WorkerView
from penstock.pipeline.launch import restart_policy
from penstock.pipeline.launch.restart_policy import WorkerExit
from penstock.pipeline.runtime.leases import ENDED, TOKEN, new_token

LAST_WORDS = 12
"""Lines of the log that are shown after a crash."""


@dataclass(slots=True)
class Worker:
    """A worker of this machine, across restarts of its process."""

    role: str
    name: str
    command: list[str]
    environment: dict[str, str]
    log_file: Path
    process: "subprocess.Popen[bytes] | None" = None
    tokens: list[str] = field(default_factory=list)
    """Of its processes, oldest first: a lease whose owner has one of the earlier tokens is free."""
    starts: int = 0
    started_s: float = 0.0
    """Wall-clock start time [s since the epoch]; also in `workers.json`."""
    exits: list[WorkerExit] = field(default_factory=list)
    exited: bool = False
    """True while the newest exit waits for its restart."""
    left_s: float | None = None
    """Time at which it was first observed to have exited without an error although the run is not over."""
    abandoned: bool = False
    """True if it is not restarted and the run continues without it."""
    _ready_s: float | None = None
    _started: int = 0
    _moved: int = 0
    _share_since: tuple[float, float] | None = None

    @property
    def pid(self) -> int:
        """Process id of the newest process."""
        assert self.process is not None
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status of the newest process, None while it runs; negative for a signal."""
        return None if self.process is None else self.process.poll()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the exit of the newest process. Raises `subprocess.TimeoutExpired`."""
        assert self.process is not None
        self.process.wait(timeout_s)

    def start(self, *, moved: int) -> None:
        """Start a process, after a separating line in the log. `moved` counts the run's progress so far."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        ended = ",".join(self.tokens)
        self.tokens.append(new_token())
        after = f", {self.name} {restart_policy.how(self.exits[-1].status)} before" if self.exits else ""
        with self.log_file.open("ab") as log:
            log.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}: start {self.starts}{after}\n".encode())
            log.flush()
            self._started = log.tell()
            # A session of its own: Ctrl-C reaches the launcher only, and a kill reaches everything the worker has started.
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, TOKEN: self.tokens[-1], ENDED: ended},
                start_new_session=True,
            )
        self.started_s, self._ready_s, self.exited, self._moved = time.time(), None, False, moved

    def on_report(self, view: WorkerView | None, *, now_s: float) -> None:
        """Record from the worker's report when its process became ready."""
        if self._ready_s is None and self.process is not None and view is not None:
            ready = "startup_s" in view.values and view.labels.get("pid") == str(self.pid)
            self._ready_s = now_s if ready else None

    def on_exit(self, status: int, *, now_s: float, moved: int, excused: bool) -> None:
        """Append the exit of the process to `exits`."""
        progress = self.served_s(now_s) >= restart_policy.HEALTHY_S and moved > self._moved
        self.exits.append(WorkerExit(at_s=now_s, status=status, progress=progress, excused=excused))
        self.exited = True

    def served_s(self, now_s: float) -> float:
        """Seconds since the process became ready; 0.0 before."""
        return 0.0 if self._ready_s is None else now_s - self._ready_s

    def cpu_share(self, *, now_s: float, over_s: float) -> float | None:
        """CPU time of the process and its children, per second since the first call; None before `over_s`."""
        try:
            process = psutil.Process(self.pid)
            times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
        except psutil.Error:
            return None
        spent = sum(spent.user + spent.system for spent in times)
        if self._share_since is None:
            self._share_since = (now_s, spent)
        since_s, before = self._share_since
        return (spent - before) / (now_s - since_s) if now_s - since_s >= over_s else None

    def forget_share(self) -> None:
        """Restart the measurement of `cpu_share`."""
        self._share_since = None

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or with `group` to everything that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def last_words(self) -> str:
        """The last lines that the newest process wrote."""
        return "\n".join(f"  | {line}" for line in self._lines()[-LAST_WORDS:])

    def cause(self) -> str:
        """The line of the log with the cause of the failure, or the last line."""
        lines, prefix = self._lines(), f"penstock: {self.role}: "
        causes = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        return (causes or lines or [""])[-1]

    def _lines(self) -> list[str]:
        with self.log_file.open("rb") as log:
            log.seek(self._started)
            return log.read().decode("utf-8", errors="replace").splitlines()
