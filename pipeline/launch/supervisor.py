"""The worker processes of a run on this machine: started, looked after, started again, ended.

The rule: which process stands where is in `workers.json` before anything else happens, and a worker's log says where each
of its processes began.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.infra.paths import IMPORT_ROOT
from penstock.pipeline.config.load import Config
from penstock.pipeline.launch import restart_policy, run_lock
from penstock.pipeline.launch.gpu_placement import NOT_PLACED, Placement
from penstock.pipeline.launch.restart_policy import Rules
from penstock.pipeline.launch.run_lock import STOP_LIMIT_S
from penstock.pipeline.launch.worker_process import Worker
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.runtime.roles import ROLES

STOP_ORDER = ("feeder", "rollout", "scorer", "trainer", "evaluator", "tracker")
LEFT_LIMIT_S = 10.0
"""A worker may end this long before its launcher hears that the run is over."""
AFTER_THE_END = frozenset({"evaluator", "tracker"})
"""Roles that still have something to do when the run is closed: the last evaluation, the report."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the launcher gives up: one line, and what the culprit said last."""

    line: str
    last_words: str = ""


@dataclass(slots=True)
class Crew:
    """The workers of a run that its launcher answers for."""

    run: str
    bootstrap: str
    config: Config
    directory: Path
    say: Say
    placement: Placement = NOT_PLACED
    workers: list[Worker] = field(default_factory=list)

    def start(self) -> None:
        """Start every worker of the configuration."""
        config = self.config
        counts = {"trainer": 1, "rollout": config.rollout.workers, "scorer": config.scorer.workers, "feeder": 1, "tracker": 1}
        if config.eval.source is not None:
            counts["evaluator"] = 1
        for role, count in counts.items():
            for slot in range(count):
                worker = self._place(role, slot)
                self.workers.append(worker)
                self._start(worker, moved=0)

    @property
    def ended(self) -> bool:
        """Whether every worker has ended and none is to be started again."""
        return all(worker.status is not None and not worker.dead for worker in self.workers)

    def tend(self, view: RunView, *, now_s: float, reachable: bool) -> Failure | None:
        """Start again who died; a `Failure` when one is given up or has left too early."""
        over, moved = view.closed is not None, view.progress
        for worker in self.workers:
            worker.heard(view.workers.get(worker.name), now_s=now_s)
            status = worker.status
            if status is None:
                continue
            if over and worker.role not in AFTER_THE_END:
                worker.dead = False  # what it would still do is done
            elif status == restart_policy.ENDED:
                if failure := self._left(worker, now_s=now_s, over=over):
                    return failure
            elif failure := self._died(worker, status, now_s=now_s, moved=moved, reachable=reachable):
                return failure
        return None

    def kill_hung(self, silent: Mapping[str, float], *, now_s: float, stall_s: float, reachable: bool) -> None:
        """Kill whose process neither reports nor computes although it could: it is started again as after any other death."""
        if self._rules.restart == "never":
            return
        for worker in self.workers:
            silent_s = silent.get(worker.name, 0.0)
            if not reachable or silent_s < stall_s or worker.status is not None or not worker.served_s(now_s):
                worker.forget_share()
            elif restart_policy.is_hung(silent_s=silent_s, cpu_share=worker.cpu_share(now_s=now_s, over_s=stall_s), stall_s=stall_s):
                self.say(f"{worker.name} has reported nothing for {silent_s:.0f} s and computes nothing: it is killed")
                worker.signal(signal.SIGKILL, group=True)

    def notes(self, *, now_s: float) -> dict[str, str]:
        """What this launcher knows better than the log: who is dead, and who has not come up yet; by name."""
        found = {}
        for worker in self.workers:
            if worker.dead:
                found[worker.name] = f"{restart_policy.how(worker.deaths[-1].status)}, to be started again"
            elif worker.deaths and not worker.served_s(now_s) and worker.status is None:
                found[worker.name] = f"was started again {time.time() - worker.started_s:.0f} s ago and is not ready yet"
        return found

    def stop(self, *, limit_s: float = STOP_LIMIT_S) -> None:
        """End what still runs, role by role; what does not end in time is killed, as is everything when this is interrupted."""
        try:
            for role in STOP_ORDER:
                running = [worker for worker in self.workers if worker.role == role and worker.status is None]
                for worker in running:
                    worker.signal(signal.SIGTERM)
                deadline = time.monotonic() + limit_s
                for worker in running:
                    self._await(worker, deadline=deadline, limit_s=limit_s)
        finally:
            for worker in self.workers:
                if worker.process is not None and worker.status is None:
                    worker.signal(signal.SIGKILL, group=True)
                    worker.process.wait()
            run_lock.forget(self.directory)

    def _await(self, worker: Worker, *, deadline: float, limit_s: float) -> None:
        assert worker.process is not None
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.say(f"{worker.name} did not end within {limit_s:g} s and was killed")
            worker.signal(signal.SIGKILL, group=True)
            worker.process.wait()

    @property
    def _rules(self) -> Rules:
        return Rules(restart=self.config.run.restart, max_restarts=self.config.run.max_restarts)

    def _died(self, worker: Worker, status: int, *, now_s: float, moved: int, reachable: bool) -> Failure | None:
        if not worker.dead:
            worker.died(status, now_s=now_s, moved=moved, excused=not reachable)
        decision = restart_policy.decide(worker.deaths, now_s=now_s, rules=self._rules, reachable=reachable)
        how = restart_policy.how(status)
        if decision == "give-up":
            why = restart_policy.why_given_up(worker.deaths, rules=self._rules)
            return Failure(f"{worker.name} {how} ({why}); its log is {worker.log_file}", worker.last_words())
        if decision == "start":
            self._start(worker, moved=moved)
            self.say(f"{worker.name} {how} and is started again (start {worker.starts})")
        return None

    def _left(self, worker: Worker, *, now_s: float, over: bool) -> Failure | None:
        """A worker that somebody ended: without it the run may wait for ever."""
        if over:
            return None
        if worker.left_s is None:
            worker.left_s = now_s
        if now_s - worker.left_s <= LEFT_LIMIT_S:
            return None
        return Failure(f"{worker.name} has ended although the run is not over; its log is {worker.log_file}", worker.last_words())

    def _start(self, worker: Worker, *, moved: int) -> None:
        worker.start(moved=moved)
        self._write_pids()

    def _write_pids(self) -> None:
        rows = [worker for worker in self.workers if worker.process is not None]
        run_lock.note(
            self.directory,
            pids={worker.name: worker.process.pid for worker in rows if worker.process is not None},
            started={worker.name: worker.started_s for worker in rows},
            starts={worker.name: worker.starts for worker in rows},
        )

    def _place(self, role: str, slot: int) -> Worker:
        config = self.config
        name = role if ROLES[role].single else f"{role}-{slot}"
        threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads}.get(role, 1)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            "PYTHONUNBUFFERED": "1",
        }
        # Without cached bytecode a worker compiles torch and transformers for half a minute.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # -P and our root first: a user's own penstock.py in the working directory must not shadow ours.
        environment["PYTHONPATH"] = os.pathsep.join([str(IMPORT_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= self.placement.environment(name)
        if config.kafka.security:
            environment["PENSTOCK_SECURITY"] = json.dumps(config.kafka.security)
        command = [
            sys.executable,
            "-P",
            "-m",
            "penstock.workers",
            role,
            "--run",
            self.run,
            "--bootstrap",
            self.bootstrap,
            "--slot",
            str(slot),
        ]
        return Worker(role, name, command, environment, self.directory / "logs" / f"{name}.log")
