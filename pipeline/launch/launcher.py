"""Runs everything on this machine: the broker, the topics, one process per worker, the live view and the report.

It only starts commands that a user could start by hand, and restarts workers that crash. If that does not help, or the user stops it, the
run can be continued by `penstock run --resume RUN`.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.infra.backends.hardware import visible_gpus
from penstock.infra.errors import LogError, PenstockError, RunNotFound
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.paths import run_directory, state_directory
from penstock.pipeline.config.load import Config, from_json, to_json
from penstock.pipeline.config.resume import changed
from penstock.pipeline.inspect.report.summary import REPORTS, collect, remove_reports
from penstock.pipeline.inspect.run_status import closing, status_of, steps_planned
from penstock.pipeline.launch.broker_keeper import BrokerKeeper, connect
from penstock.pipeline.launch.check.changes import with_changes
from penstock.pipeline.launch.check.preflight import check, important
from penstock.pipeline.launch.check.sizes import threads
from penstock.pipeline.launch.create import create
from penstock.pipeline.launch.placement import place
from penstock.pipeline.launch.run_lock import STOP_LIMIT_S, attending, end_leftovers, ui_address
from penstock.pipeline.launch.shutdown import lasting_output, stop_requested
from penstock.pipeline.launch.stall_watchdog import Watchdog, unblock
from penstock.pipeline.launch.supervisor import Failure, Supervisor
from penstock.pipeline.runtime.leases import SILENT_S, WriterLease
from penstock.pipeline.runtime.registration.run_registry import find, make_key, registration, set_status, write
from penstock.pipeline.runtime.registration.trust import Trust, require_trusted
from penstock.pipeline.runtime.reporting.log_lines import Progress, exact_output, print_json
from penstock.topics.catalogue import control_topics_of
from penstock.topics.runs import RunRecord, Status

if TYPE_CHECKING:
    from penstock.pipeline.inspect.live.view import LiveView, NotebookScreen

TURN_S = 0.25
"""Interval between two polls of workers, broker and watchdog."""
PATIENCE_S = 10.0
"""Outage timeout of the launcher's own calls: it also has to watch the workers."""
HURRY_S = 5.0
"""Time for workers to exit during an outage: they could not write anything more."""

Notify = Callable[[str], None]


def launch(config: Config, *, notify: Notify, live: bool, json_out: bool, run_id: str | None = None) -> int:
    """Create a run and supervise it to its end; returns the exit status."""
    state_directory()  # fails now if nothing can be written
    checked = check(config, tell=important(notify), samples=False, notify=notify)
    log = connect(config.kafka.bootstrap, config.kafka.security, notify=notify)
    record = create(config, log=log, run_id=run_id, checked=checked.info, notify=notify)
    return attend(log, record, config, notify=notify, live=live, json_out=json_out)


def resume(
    run: str, *, log: KafkaLog, notify: Notify, live: bool, json_out: bool, overrides: Sequence[str] = (), trust_code: bool = False
) -> int:
    """Start the workers of an unfinished run; they continue from the log, with these overrides of the configuration.

    Raises `ConfigError` for code that no key of this machine signed; with `trust_code` the run gets a key here.
    """
    state_directory()
    registered = registration(log, run)
    record = registered.record
    if record is None:
        raise RunNotFound(run)
    if record.status in ("finished", "failed"):
        raise PenstockError(f"run {run} is {record.status}; there is nothing to resume")
    require_trusted(registered, trust=Trust(code=trust_code), notify=notify)
    if trust_code and not registered.signed:
        make_key(run)  # the workers find it
        write(log, record)
    config = from_json(record.config)
    if overrides:
        config = changed(config, overrides, run=run)
        record = replace(record, config=to_json(config))
    made_of = with_changes(record, config, notify=notify)
    if overrides or made_of is not record:
        record = replace(made_of, updated_ns=time.time_ns())
        write(log, record)
    return attend(log, record, config, notify=notify, live=live, json_out=json_out)


def attend(log: KafkaLog, record: RunRecord, config: Config, *, notify: Notify, live: bool, json_out: bool) -> int:
    """Start a registered run's workers, wait until they have exited, and print the report; returns the exit status."""
    status = watch(log, record, config, notify=notify, live=live, quiet=json_out)
    if status == 0:
        show_report(log, record.run, json_out=json_out, notify=notify)
    return status


def watch(
    log: KafkaLog, record: RunRecord, config: Config, *, notify: Notify, live: bool, quiet: bool, screen: "NotebookScreen | None" = None
) -> int:
    """Start a run's workers and wait for their exit; returns 0, or 130 if the run was stopped. `quiet` keeps stdout free.

    `screen` shows the live view if there is no terminal. Raises `PenstockError`: a worker or the broker reached the restart limit, the run
    ended as failed, or another launcher attends it.
    """
    from penstock.pipeline.inspect.live.view import LiveView, Terminal

    run, directory, placement = record.run, run_directory(record.run), place(config, visible_gpus())
    with (
        attending(directory, run) as (token, ended),
        lasting_output(),
        stop_requested() as stop,
        _only_one(
            WriterLease(
                log=log, run=run, writer="launcher", token=token, ended=ended, watch_s=SILENT_S, first_wins=True, notify=notify, stop=stop
            )
        ),
    ):
        left = end_leftovers(directory, run, notify=notify)
        remove_reports(directory)  # the tracker may crash
        (directory / "config.json").write_text(json.dumps(json.loads(record.config), indent=2), encoding="utf-8")
        log.wait_out(PATIENCE_S)
        notify(f"run {run}: starting its workers; logs in {directory / 'logs'}")
        if (address := ui_address()) is not None:
            notify(f"watch the run in a browser: {address}r/{run}")
        notify(f"threads: {threads(config)}" if placement.gpus is None else str(placement))
        view = LiveView(log, run, console=Terminal(stderr=quiet), plain=not live, screen=screen)
        tell = view.tell if live else notify
        watching = Watching(
            view,
            Supervisor(run, log.connection, config, directory, tell, placement, left),
            BrokerKeeper(log.bootstrap, config.run, tell),
            Watchdog(log, config.run.stall_s, tell, unblock=lambda: unblock(log, run, tell)),
        )
        failure: Failure | None = None
        try:
            watching.supervisor.start()
            while not watching.supervisor.ended and not stop.is_set() and failure is None:
                failure = watching.turn()
        finally:
            if stop.is_set():
                tell("stopping: workers finish what is in flight; a second Ctrl-C kills them")
            watching.stop(status="stopped" if stop.is_set() or failure is not None else None)
        if failure is not None:
            _note(log, record, notify=notify)
            if failure.last_words:
                notify(f"its last output:\n{failure.last_words}")
            raise PenstockError(f"run {run} failed: {failure.line}. Fix the cause, then resume: penstock run --resume {run}")
        if stop.is_set():
            _note(log, record, notify=notify)
            done, planned = view.view.steps_done, steps_planned(view.view) or "?"
            tell(f"stopped after {done} of {planned} steps; continue: penstock run --resume {run}")
            return 130
    status = _ended(log, record, view)
    for name in watching.supervisor.missing:
        log_file = directory / "logs" / f"{name}.log"
        notify(f"warning: the run has finished without {name}, which reached its restart limit; its log is {log_file}")
    return status


@contextlib.contextmanager
def _only_one(lease: WriterLease) -> Iterator[None]:
    """In the block, hold the launcher's lease; raises `Fenced` while a launcher on another machine holds it."""
    lease.log.create_topics(control_topics_of(lease.run))
    lease.acquire().close()
    try:
        yield
    finally:
        lease.release()


@dataclass(slots=True)
class Watching:
    """The parts that the launcher polls: live view, workers, broker, watchdog."""

    view: "LiveView"
    supervisor: Supervisor
    broker: BrokerKeeper
    watchdog: Watchdog

    def turn(self) -> Failure | None:
        """Read new records and restart crashed workers. Returns a `Failure` if a restart cannot help."""
        self.view.poll(TURN_S)
        now_s, view = time.monotonic(), self.view.view
        self.view.status = "running" if status_of(view) == "stopped" else None  # the log has that of before a resumption
        abandoned = self.broker.check(now_s=now_s)
        if abandoned is not None:
            return Failure(abandoned)
        reachable = self.broker.up and not self.view.outage_s
        silent, stall_s = self.view.silent, self.watchdog.stall_s
        self.supervisor.kill_hung(silent, now_s=now_s, stall_s=stall_s, reachable=reachable)
        self.watchdog.check(view, silent=silent, outage_s=self.view.outage_s, notes=self.supervisor.notes(now_s=now_s))
        return self.supervisor.poll(view, now_s=now_s, reachable=reachable)

    def stop(self, *, status: str | None) -> None:
        """Stop the workers and leave the last view on the screen; `status` is shown if the log contains none yet."""
        away = not self.broker.up or self.view.outage_s > 0
        self.view.status = None if status is None else "stopping"
        try:
            self.supervisor.stop(limit_s=HURRY_S if away else STOP_LIMIT_S, labels=dict if away else self._labels)
            self.view.poll(0.0)  # their last words
        finally:
            self.view.close(status=status)

    def _labels(self) -> Mapping[str, Mapping[str, str]]:
        """Worker -> labels of its newest status."""
        self.view.poll(0.0)
        return {name: worker.labels for name, worker in self.view.view.workers.items()}


def show_report(log: Log, run: str, *, json_out: bool, notify: Notify) -> None:
    """Print the report that the tracker wrote, or one made from the log if the tracker exited before it wrote any."""
    from penstock.pipeline.inspect.live.view import print_report

    directory = run_directory(run)
    written = directory / REPORTS[1]
    if written.exists() and json_out:
        print(written.read_text(encoding="utf-8"), file=exact_output())
        return
    report = json.loads(written.read_text(encoding="utf-8")) if written.exists() else collect(log, run, alive=Progress(notify))
    if json_out:
        print_json(json.dumps(report, indent=2))
    else:
        print_report(report, directory=directory)


def _note(log: Log, record: RunRecord, *, notify: Notify) -> None:
    """Set the run's registered status to "stopped" if it is "created" or "running"; `notify` gets one line if that fails."""
    try:
        now = find(log, record.run)
        if now is not None and now.status in ("created", "running"):
            set_status(log, record, status="stopped")
    except LogError as error:
        notify(f"the status of the run could not be set to stopped ({error}); the run can be resumed nevertheless")


def _ended(log: Log, record: RunRecord, view: "LiveView") -> int:
    """Return exit status 0 if a run whose workers have exited is finished; sets the registered status if a crashed trainer did not.

    Raises `PenstockError` if the run has failed, or is unfinished.
    """
    now, closed = find(log, record.run), view.view.closed
    status: Status = record.status if now is None else now.status
    if closed is not None and status not in ("finished", "failed"):
        status = set_status(log, record, status="failed" if closing(view.view).get("status") == "failed" else "finished").status
    if status == "failed":
        raise PenstockError(f"run {record.run} failed: {closing(view.view).get('reason', 'the trainer ended it')}")
    if status != "finished":
        raise PenstockError(f"run {record.run} is unfinished, but its workers have exited. Continue: penstock run --resume {record.run}")
    return 0
