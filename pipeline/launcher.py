"""Everything of a run on this machine: the broker, the topics, one process a worker, the live view and the report.

The rule: it only starts the commands that a person could start by hand, watches them, and fails loudly when one dies. Workers are
stopped in the order feeder, rollout, scorer, trainer, evaluator, tracker, so that what was begun can still be written down.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from infra.broker.state import state_directory
from infra.errors import PenstockError
from infra.kafka.log import KafkaLog
from pipeline.config import Config, from_json
from pipeline.runs import create, find, mark
from pipeline.sections import KafkaSection
from topics.runs import RunRecord

ROOT = Path(__file__).resolve().parents[1]
STOP_ORDER = ("feeder", "rollout", "scorer", "trainer", "evaluator", "tracker")
STOP_LIMIT_S = 30.0
"""A worker that has not ended this long after SIGTERM is killed."""
LEFT_LIMIT_S = 10.0
"""A worker may end this long before its launcher hears that the run is over."""
LAST_WORDS = 12
"""Lines of a dead worker's log that are shown."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Worker:
    """One worker process of this launcher."""

    role: str
    name: str
    process: "subprocess.Popen[bytes]"
    log_file: Path
    log: IO[bytes]

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-LAST_WORDS:])


@dataclass(slots=True)
class Crew:
    """The worker processes of a run, started in their own sessions so that Ctrl-C reaches the launcher alone."""

    run: str
    bootstrap: str
    config: Config
    directory: Path
    workers: list[Worker] = field(default_factory=list)

    def start(self) -> None:
        """Start every worker of the configuration."""
        config = self.config
        counts = {"trainer": 1, "rollout": config.rollout.workers, "scorer": config.scorer.workers, "feeder": 1, "tracker": 1}
        if config.eval.source is not None:
            counts["evaluator"] = 1
        for role, count in counts.items():
            for slot in range(count):
                self.workers.append(self._spawn(role, slot))
        self._write_pids()

    def failed(self) -> Worker | None:
        """A worker that ended with an error, if there is one."""
        return next((worker for worker in self.workers if worker.process.poll() not in (None, 0)), None)

    def left(self) -> Worker | None:
        """A worker that ended without an error, if there is one."""
        return next((worker for worker in self.workers if worker.process.poll() == 0), None)

    @property
    def ended(self) -> bool:
        """Whether every worker has ended."""
        return all(worker.process.poll() is not None for worker in self.workers)

    def stop(self, *, say: Say) -> None:
        """End what still runs, role by role; what does not end in time is killed."""
        for role in STOP_ORDER:
            running = [worker for worker in self.workers if worker.role == role and worker.process.poll() is None]
            for worker in running:
                worker.process.terminate()
            for worker in running:
                try:
                    worker.process.wait(STOP_LIMIT_S)
                except subprocess.TimeoutExpired:
                    say(f"{worker.name} did not end within {STOP_LIMIT_S:g} s and was killed")
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(worker.process.pid, signal.SIGKILL)
                    worker.process.wait()
        for worker in self.workers:
            worker.log.close()
        (self.directory / "workers.json").unlink(missing_ok=True)

    def _spawn(self, role: str, slot: int) -> Worker:
        config, single = self.config, role in ("trainer", "feeder", "tracker", "evaluator")
        name = role if single else f"{role}-{slot}"
        log_file = self.directory / "logs" / f"{name}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        threads = {"trainer": config.trainer.threads, "rollout": config.rollout.threads}.get(role, 1)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            "PYTHONUNBUFFERED": "1",
        }
        # Without cached bytecode a worker compiles torch and transformers for half a minute.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        # -P and our root first: a user's own workers/ or pipeline/ in the working directory must not shadow ours.
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-P", "-m", "workers", role, "--run", self.run, "--bootstrap", self.bootstrap, "--slot", str(slot)]
        if config.kafka.security:
            environment["PENSTOCK_SECURITY"] = json.dumps(config.kafka.security)
        log = log_file.open("ab")
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        return Worker(role, name, process, log_file, log)

    def _write_pids(self) -> None:
        pids = {worker.name: worker.process.pid for worker in self.workers}
        (self.directory / "workers.json").write_text(json.dumps({"launcher": os.getpid(), "workers": pids}), encoding="utf-8")


def connect(kafka: KafkaSection, *, say: Say) -> KafkaLog:
    """The configured broker; the embedded one is started if it does not run. Raises `PenstockError`."""
    bootstrap = kafka.bootstrap
    if bootstrap == "embedded":
        from infra.broker.embedded import start

        bootstrap = start(progress=say).bootstrap
    return KafkaLog(bootstrap, security=kafka.security, client_id="penstock")


def launch(config: Config, *, say: Say, live: bool, json_out: bool, run_id: str | None = None) -> int:
    """Create a run and see it through; returns the exit status."""
    log = connect(config.kafka, say=say)
    record = create(config, log=log, run_id=run_id, say=say)
    return attend(log, record, config, say=say, live=live, json_out=json_out)


def resume(run: str, *, log: KafkaLog, say: Say, live: bool, json_out: bool) -> int:
    """Start the workers of a run that is not finished; they go on from what the log holds."""
    record = find(log, run)
    if record is None:
        raise PenstockError(f"no run {run!r} on this broker; see `penstock runs`")
    if record.status in ("finished", "failed"):
        raise PenstockError(f"run {run} is {record.status}; there is nothing to resume")
    return attend(log, record, from_json(record.config), say=say, live=live, json_out=json_out)


def attend(log: KafkaLog, record: RunRecord, config: Config, *, say: Say, live: bool, json_out: bool) -> int:
    """Start a registered run's workers, stay until they have ended, and print the report; returns the exit status."""
    status = watch(log, record, config, say=say, live=live, quiet=json_out)
    return status or show_report(run_directory(record.run), json_out=json_out)


def watch(log: KafkaLog, record: RunRecord, config: Config, *, say: Say, live: bool, quiet: bool) -> int:
    """Start a registered run's workers and stay until they have ended: 0, or 130 when it was stopped; `quiet` leaves stdout alone.

    Raises:
        PenstockError: a worker died.
    """
    from pipeline.live import LiveView

    directory = run_directory(record.run)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(json.loads(record.config), indent=2), encoding="utf-8")
    crew = Crew(record.run, log.bootstrap, config, directory)
    say(f"run {record.run}: starting its workers; logs in {directory / 'logs'}")
    with _signals() as stop:
        view = LiveView(log, record.run, console=_console(quiet), plain=not live)
        try:
            crew.start()
            dead, over = None, time.monotonic()
            while not crew.ended and not stop.is_set() and dead is None:
                view.poll(0.25)
                dead = crew.failed()
                if view.view.ended or crew.left() is None:
                    over = time.monotonic()
                elif time.monotonic() - over > LEFT_LIMIT_S:  # somebody ended it: without it the run may wait for ever
                    dead = dead or crew.left()
        finally:
            if stop.is_set():
                say(f"stopping; go on with `penstock run --resume {record.run}`")
            crew.stop(say=say)
            view.close()
    dead = dead or crew.failed()
    if dead is not None:
        say(f"{dead.name} ended with status {dead.process.returncode}; its last words:\n{dead.last_words()}")
        if find_status(log, record.run) in ("created", "running"):
            mark(log, record, status="stopped")
        raise PenstockError(f"run {record.run} failed: {dead.name} died; its log is {dead.log_file}")
    if stop.is_set():
        mark(log, record, status="stopped")
        return 130
    return 0


def run_directory(run: str) -> Path:
    """Where a run's logs, measurements, report and final model are on this machine."""
    return state_directory() / "runs" / run


def find_status(log: KafkaLog, run: str) -> str | None:
    """The status in the register."""
    record = find(log, run)
    return None if record is None else record.status


def show_report(directory: Path, *, json_out: bool) -> int:
    """Print the report that the tracker wrote."""
    name = "report.json" if json_out else "report.txt"
    try:
        text = (directory / name).read_text(encoding="utf-8")
    except OSError as error:
        raise PenstockError(f"the run ended without a report in {directory}: see logs/tracker.log there") from error
    print(text)
    return 0


def _console(quiet: bool) -> Any:
    from rich.console import Console

    return Console(stderr=quiet)


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """SIGINT, SIGTERM and SIGHUP ask for the orderly stop; a second one of them ends at once what the first began."""
    stop = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set() and time.monotonic() - first[0] > 1.0:
            raise KeyboardInterrupt
        if not stop.is_set():
            first[0] = time.monotonic()
        stop.set()

    first = [0.0]
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
