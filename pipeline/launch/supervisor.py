"""Starts, restarts and stops the worker processes of a run on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.infra.kafka.settings import Connection
from penstock.infra.paths import IMPORT_ROOT
from penstock.pipeline.config.load import Config
from penstock.pipeline.config.security import VARIABLE
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import WorkerView
from penstock.pipeline.launch import restart_policy, run_lock
from penstock.pipeline.launch.placement import NOT_PLACED, Placement, on_cores, pinning_of
from penstock.pipeline.launch.restart_policy import WorkerExit
from penstock.pipeline.launch.run_lock import STOP_LIMIT_S
from penstock.pipeline.runtime import leases
from penstock.pipeline.runtime.exit_status import BROKEN, ENDED, NO_RETRY
from penstock.pipeline.runtime.reporting.health_and_metrics import HEALTH
from penstock.pipeline.runtime.roles import HELPERS, ROLES
from penstock.topics.metrics import activity_of

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
    """Tokens of its processes, oldest first: a lease whose owner has one of the earlier tokens is free."""
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
    share_since: tuple[float, float] | None = None
    """Time and CPU seconds from which `cpu_share` is measured; None to start at its next call."""
    _ready_s: float | None = None
    _started: int = 0
    _moved: int = 0

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
        self.tokens.append(leases.new_token())
        after = f", {self.name} {restart_policy.how(self.exits[-1].status)} before" if self.exits else ""
        with self.log_file.open("ab") as log:
            log.write(f"---- {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}: start {self.starts}{after}\n".encode())
            log.flush()
            self._started = log.tell()
            # A session of its own: Ctrl-C reaches the launcher only, and a kill reaches everything the worker has started.
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**self.environment, leases.TOKEN: self.tokens[-1], leases.ENDED: ended},
            )  # fmt: skip
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
        if self.share_since is None:
            self.share_since = (now_s, spent)
        since_s, before = self.share_since
        return (spent - before) / (now_s - since_s) if now_s - since_s >= over_s else None

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the process, or with `group` to everything that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    def last_words(self) -> str:
        """The last lines that the newest process wrote."""
        return "\n".join(f"  | {line}" for line in self._lines()[-LAST_WORDS:])

    def cause(self) -> str:
        """The line of the newest process's log with the cause of its failure, or its last line."""
        lines, prefix = self._lines(), f"penstock: {self.role}: "
        causes = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        return (causes or lines or [""])[-1]

    def _lines(self) -> list[str]:
        with self.log_file.open("rb") as log:
            log.seek(self._started)
            return log.read().decode("utf-8", errors="replace").splitlines()


LEFT_LIMIT_S = 10.0
"""A worker may exit this long before the launcher reads that the run is closed."""
LOOK_EVERY_S = 0.25
LONGEST_STOP = 4
"""Multiple of the stop limit that the workers of a role may take while they report progress: a step, then its checkpoint."""

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a run cannot continue: one line, and the last output of the worker that failed."""

    line: str
    last_words: str = ""


@dataclass(slots=True)
class Supervisor:
    """The workers that a launcher has started for a run."""

    run: str
    connection: Connection
    config: Config
    directory: Path
    notify: Notify
    placement: Placement = NOT_PLACED
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Worker -> tokens of the processes that an earlier launcher had started; they have exited."""
    workers: list[Worker] = field(default_factory=list)

    def start(self) -> None:
        """Start every worker of the configuration."""
        for role in ROLES.values():
            for slot in range(role.workers(self.config)):
                worker = self._worker(role.name, slot)
                self.workers.append(worker)
                self._start(worker, moved=0)

    @property
    def ended(self) -> bool:
        """True if every worker has exited and none will be restarted."""
        return all(worker.status is not None and not worker.exited for worker in self.workers)

    @property
    def missing(self) -> list[str]:
        """Optional workers that reached their restart limit: the run continues without them."""
        return [worker.name for worker in self.workers if worker.abandoned]

    def poll(self, view: RunView, *, now_s: float, reachable: bool) -> Failure | None:
        """Restart crashed workers. Returns a `Failure` if a required one reached its restart limit or exited too early."""
        over, moved = view.closed is not None, view.progress
        for worker in self.workers:
            worker.on_report(view.workers.get(worker.name), now_s=now_s)
            status = worker.status
            if status is None or worker.abandoned:
                continue
            helps = worker.role in HELPERS or (over and worker.role == "rollout" and self.config.evaluates_on_rollout_engine)
            if over and not helps:
                worker.exited = False  # its remaining work is done
                continue
            if status == ENDED:
                failure = None if over else self._left(worker, now_s=now_s)
            else:
                failure = self._on_exit(worker, status, now_s=now_s, moved=moved, reachable=reachable)
            if failure is not None and (not helps or status == BROKEN):
                return failure
            if failure is not None:
                worker.abandoned, worker.exited = True, False
                self.notify(f"warning: {failure.line}; the run continues without it")
        return None

    def kill_hung(self, silent: Mapping[str, float], *, now_s: float, stall_s: float, reachable: bool) -> None:
        """Kill workers that neither report nor use CPU time although they could; they are restarted like crashed workers."""
        if self.config.run.restart == "never":
            return
        for worker in self.workers:
            silent_s = silent.get(worker.name, 0.0)
            if not reachable or silent_s < stall_s or worker.status is not None or not worker.served_s(now_s):
                worker.share_since = None
            elif restart_policy.is_hung(silent_s=silent_s, cpu_share=worker.cpu_share(now_s=now_s, over_s=stall_s), stall_s=stall_s):
                self.notify(f"{worker.name} has sent no report for {silent_s:.0f} s and uses no CPU time: killing and restarting it")
                worker.signal(signal.SIGKILL, group=True)

    def notes(self, *, now_s: float) -> dict[str, str]:
        """Worker -> state that the log does not contain: crashed and waiting for a restart, or restarted and not ready."""
        states = {}
        for worker in self.workers:
            if worker.exited:
                states[worker.name] = f"{restart_policy.how(worker.exits[-1].status)}, will be restarted"
            elif worker.exits and not worker.served_s(now_s) and worker.status is None:
                states[worker.name] = f"was restarted {time.time() - worker.started_s:.0f} s ago and is not ready yet"
        return states

    def stop(self, *, limit_s: float = STOP_LIMIT_S, labels: Callable[[], Mapping[str, Mapping[str, str]]] = dict) -> None:
        """Stop the running workers role by role, in the table's order; kill those that report nothing new for `limit_s`.

        `labels` returns worker name -> labels of its newest status; its text is printed unless the worker waits. No role takes longer
        than `LONGEST_STOP` times the limit. If this call is interrupted, every worker is killed.
        """
        try:
            for role in ROLES:
                running = [worker for worker in self.workers if worker.role == role and worker.status is None]
                for worker in running:
                    worker.signal(signal.SIGTERM)
                self._await(running, limit_s=limit_s, labels=labels)
        finally:
            for worker in self.workers:
                if worker.process is not None and worker.status is None:
                    worker.signal(signal.SIGKILL, group=True)
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device, and ends with that
                        worker.wait(LEFT_LIMIT_S)
            run_lock.forget(self.directory)

    def _await(self, running: list[Worker], *, limit_s: float, labels: Callable[[], Mapping[str, Mapping[str, str]]]) -> None:
        """Wait for the exit of these workers and print their progress; kill those that report nothing new for `limit_s`."""
        reported: dict[str, str] = {}
        started = news = time.monotonic()
        while left := [worker for worker in running if worker.status is None]:
            now = time.monotonic()
            if now - news >= limit_s or now - started >= LONGEST_STOP * limit_s:
                for worker in left:
                    self.notify(f"{worker.name} did not exit within {now - started:.0f} s: killed")
                    worker.signal(signal.SIGKILL, group=True)
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                left[0].wait(LOOK_EVERY_S)
            statuses = labels()
            for worker in left:
                status = statuses.get(worker.name, {})
                work = status.get("doing")
                if worker.status is None and work is not None and reported.get(worker.name) != work:
                    news = time.monotonic() if worker.name in reported else news
                    reported[worker.name] = work
                    if activity_of(status).kind != "wait":
                        self.notify(f"{worker.name}: {work}")

    def _on_exit(self, worker: Worker, status: int, *, now_s: float, moved: int, reachable: bool) -> Failure | None:
        """Record the exit of a worker with an error, and restart it now or later; a `Failure` if it is not restarted."""
        if not worker.exited:
            worker.on_exit(status, now_s=now_s, moved=moved, excused=not reachable)
        decision = restart_policy.decide(worker.exits, now_s=now_s, rules=self.config.run, reachable=reachable)
        how = restart_policy.how(status)
        if status == BROKEN:
            return Failure(worker.cause())
        if status == NO_RETRY and (cause := worker.cause()):  # the rest of its log has no more
            return Failure(f"{worker.name}: {cause}")
        if decision == "give-up":
            why = restart_policy.failure_cause(worker.exits, rules=self.config.run)
            return Failure(f"{worker.name} {how} ({why}); its log is {worker.log_file}", worker.last_words())
        if decision == "start":
            cause = worker.cause() if status > 0 else ""
            self._start(worker, moved=moved)
            self.notify(f"{worker.name} {how} and is restarted (start {worker.starts}){cause and f': {cause}'}")
        return None

    def _left(self, worker: Worker, *, now_s: float) -> Failure | None:
        """A `Failure` if a worker exited without an error `LEFT_LIMIT_S` ago, because the run might wait for it forever."""
        if worker.left_s is None:
            worker.left_s = now_s
        if now_s - worker.left_s <= LEFT_LIMIT_S:
            return None
        return Failure(f"{worker.name} exited although the run is not finished; its log is {worker.log_file}", worker.last_words())

    def _start(self, worker: Worker, *, moved: int) -> None:
        """Start a worker's process on its cores, and list it in `workers.json`; `moved` counts the run's progress so far."""
        pinning = pinning_of(self.config)
        with on_cores(pinning.get(worker.name, pinning.get("", ()))):
            worker.start(moved=moved)
        rows = [worker for worker in self.workers if worker.process is not None]
        columns = {"workers": "pid", "started": "started_s", "starts": "starts", "tokens": "tokens"}
        run_lock.note(self.directory, {key: {worker.name: getattr(worker, name) for worker in rows} for key, name in columns.items()})

    def _worker(self, role: str, slot: int) -> Worker:
        """A worker of this role with its command line, environment and log file; its process is not started."""
        config = self.config
        name = ROLES[role].worker(slot)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(ROLES[role].threads(config)),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            "PYTHONUNBUFFERED": "1",
        }
        # Without cached bytecode a worker compiles torch and transformers for half a minute.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # -P and our root first: a user's own penstock.py in the working directory must not shadow ours.
        environment["PYTHONPATH"] = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= self.placement.environment(name)
        if port := config.run.health_port:
            environment[HEALTH] = str(port + len(self.workers))
        environment[VARIABLE] = json.dumps(dict(self.connection.security))
        command = [sys.executable, "-P", "-m", "penstock.workers", role, "--run", self.run, "--bootstrap", self.connection.bootstrap]
        command += ["--slot", str(slot)]
        log_file = self.directory / "logs" / f"{name}.log"
        return Worker(role, name, command, environment, log_file, tokens=list(self.left.get(name, ())))
