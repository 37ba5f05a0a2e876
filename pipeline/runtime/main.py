"""Entry point of every worker process: arguments, signals, waiting for the run, and errors as one line.

A worker exits with 0 if its run is over or a stop was requested; otherwise one line tells the cause, and the status is 1 if a restart may
help, 2 if not: a user error, contradictory records, another process with its lease. One that lingers exits only if a stop was requested.
"""

import argparse
import contextlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from penstock.infra.errors import ConfigError, Fenced, LogUnreachable, PenstockError, Unrecoverable
from penstock.infra.log import Log
from penstock.infra.paths import make_files_private
from penstock.infra.sandbox.secrets import hide_secrets
from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.config.security import security_settings, take_credentials
from penstock.pipeline.runtime.exit_status import ENDED, MISTAKES, exit_status
from penstock.pipeline.runtime.leases import SILENT_S
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust
from penstock.pipeline.runtime.reporting.health_and_metrics import Health, serve
from penstock.pipeline.runtime.reporting.log_lines import LOG_JSON, log_line, pass_on_warnings, print_line
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.runtime.session import Session, join, stop_on_signals
from penstock.topics.catalogue import check_run_id
from penstock.topics.wire.visible import visible

EMBEDDED = "embedded"
"""Address that means this machine's embedded broker."""
_SHARE_MEMORY = ("trainer", "rollout", "evaluator")
"""Roles whose memory other processes of the run open under /proc."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def main(arguments: Sequence[str]) -> int:
    """Run one role until its run is over; returns the exit status."""
    try:
        options = parsed(arguments, prog="python -m penstock.workers")
    except ConfigError as error:
        print(f"penstock: {visible(str(error))}", file=sys.stderr)
        return exit_status(error)
    hide_secrets(memory=options.role not in _SHARE_MEMORY)
    return start(options)


def parsed(arguments: Sequence[str], *, prog: str) -> argparse.Namespace:
    """Parse a worker's command line; the only definition of its options. Raises `ConfigError`."""
    parser = _Parser(prog=prog, description="Run one worker of a run, anywhere that reaches the broker, until the run is over.")
    add = parser.add_argument
    add("role", metavar="ROLE", help=", ".join(ROLES))
    add("--run", required=True, help="id of the run; a worker that starts early waits for it")
    add(
        "--bootstrap", metavar="HOST:PORT", default=os.environ.get("PENSTOCK_BOOTSTRAP", EMBEDDED),
        help="a Kafka broker; `embedded` is this machine's own (default: PENSTOCK_BOOTSTRAP or embedded)",
    )  # fmt: skip
    add(
        "--slot", type=int, metavar="N", default=os.environ.get("PENSTOCK_SLOT") or None,
        help="number of this worker among those of its role; part of its name (default: PENSTOCK_SLOT)",
    )  # fmt: skip
    add("--pool", help="pool of rollout.pools that a rollout worker joins; that of its slot if absent")
    add("--model", metavar="PATH", help="directory of the model on this machine, if it is not the configuration's")
    add("--run-key", metavar="FILE", type=Path, help="the run's key, copied from runs/RUN/run.key; mode 0400, 0440 or 0600")
    add("--trust-code", action="store_true", help="run the code that the run names although no key on this machine has signed it")
    add(
        "--security", metavar="KEY=VALUE", action="append",
        help="Kafka client setting such as sasl_mechanism=PLAIN; repeatable. Passwords in PENSTOCK_SECURITY only, a JSON object",
    )  # fmt: skip
    add("--health", metavar="[HOST:]PORT", help="serve /livez, /readyz and /metrics there; on loopback if there is no host")
    add("--wait-broker", type=float, metavar="SECONDS", default=0.0, help="wait so long for a broker that does not respond yet")
    add("--linger", action="store_true", help="stay, ready and idle, when the run is over; SIGTERM ends the worker with status 0")
    add("--log-json", action="store_true", help="print each line of the log as a JSON object")
    add("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    if options.role not in ROLES:
        raise ConfigError(f"unknown role {options.role!r}: choose one of {', '.join(ROLES)}{nearest(options.role, list(ROLES))}")
    if options.slot is not None and options.slot < 0:
        raise ConfigError(f"--slot {options.slot}: expected a number of at least 0")
    if not options.wait_broker >= 0:
        raise ConfigError(f"--wait-broker {options.wait_broker}: expected a number of seconds, 0 or more")
    try:
        check_run_id(options.run)  # a worker waits for a run that is not registered yet, but a malformed id can never be
    except ValueError as error:
        raise ConfigError(f"--run: {error}") from error
    options.security = security_settings(options.security)
    return options


def start(options: argparse.Namespace) -> int:
    """Run the worker of a parsed command line; `embedded` starts this machine's broker."""
    security = take_credentials(options.security)
    bootstrap = options.bootstrap
    if bootstrap == EMBEDDED:
        from penstock.infra.broker import embedded

        bootstrap, security = embedded.start(progress=lambda text: print(text, file=sys.stderr, flush=True)).bootstrap, {}
    return work(
        options.role, run=options.run, bootstrap=bootstrap, slot=options.slot, pool=options.pool, model=options.model,
        trust=Trust(run_key=options.run_key, code=options.trust_code), security=security, debug=options.debug,
        health=options.health, log_json=options.log_json, wait_broker_s=options.wait_broker, linger=options.linger,
    )  # fmt: skip


def work(
    role: str, *, run: str, bootstrap: str, slot: int | None, model: str | None, pool: str | None = None, trust: Trust = NO_TRUST,
    security: Mapping[str, Any] | None = None, debug: bool = False, health: str | None = None, log_json: bool = False,
    wait_broker_s: float = 0.0, linger: bool = False,
) -> int:  # fmt: skip
    """Join the run as `role`, do its work, and return the exit status; SIGTERM and SIGINT request an orderly stop.

    `wait_broker_s` limits the wait for a first response of the broker; with `linger` the process stays when the run is over.
    """
    make_files_private()
    if log_json:
        os.environ[LOG_JSON] = "1"
    stop = threading.Event()
    stop_on_signals(stop)
    worker = ROLES[role].worker(slot or 0) if ROLES[role].single or slot is not None else None
    session: Session | None = None
    stop_forwarding = pass_on_warnings(lambda text, level: print_line(run, worker or role, text, level=level))
    try:
        rank = int(os.environ.get("RANK", "0")) if ROLES[role].in_ranks else 0
        probed = Health(None, stop)
        if not rank:  # first: a worker whose port is taken must not join, and one that waits for broker and run is probed
            serve(probed, health, notify=partial(print_line, run, worker or role))
        name = f"{run}.{worker or role}" + (f"-rank-{rank}" if rank else "")
        log = _connect(bootstrap, security, name, wait_broker_s, partial(print_line, run, worker or role), stop)
        if rank:
            importlib.import_module(ROLES[role].module).follow(log, run, model=model, trust=trust)
            return ENDED
        session = join(run=run, role=role, log=log, worker=worker, model=model, stop=stop, watch_s=SILENT_S, pool=pool, trust=trust)
        if session is None:
            return ENDED
        session.reporter.notify(f"joined run {run}")
        probed.reporter = session.reporter
        threading.Thread(target=session.announce_stop, daemon=True, name="announce-stop").start()
        importlib.import_module(ROLES[role].module).main(session)
        session.close(status="stopped" if stop.is_set() else "finished")
        session.reporter.notify("done")
        if linger and not stop.is_set():
            session.reporter.notify("the run is finished; waiting for SIGTERM")
            probed.over = True
            log.close()
            stop.wait()
        return ENDED
    except (PenstockError, OSError, *MISTAKES) as error:
        if session is None and stop.is_set() and isinstance(error, LogUnreachable):
            return ENDED
        return _failed(role, session, error, run=run, debug=debug)
    except ModuleNotFoundError as error:
        missing = Unrecoverable(f"the package {error.name} is not installed on this machine. `penstock doctor` shows how to install it")
        return _failed(role, session, missing, run=run, debug=debug)
    except Exception as error:  # top level of the process: the launcher and the run learn the cause
        return _failed(role, session, error, run=run, debug=True)
    finally:
        stop_forwarding()
        sys.stdout.flush()


def _connect(
    bootstrap: str, security: Mapping[str, Any] | None, client_id: str, wait_s: float, notify: Callable[[str], None], stop: threading.Event
) -> Log:
    """Connect to the log, waiting up to `wait_s` for the broker. Raises `ConfigError` for an invalid address or setting."""
    from penstock.infra.kafka.log import KafkaLog, await_broker

    try:
        return await_broker(lambda: KafkaLog(bootstrap, security=security, client_id=client_id), wait_s, notify=notify, stop=stop)
    except ValueError as error:
        raise ConfigError(f"--bootstrap, --security: {error}") from error


def _failed(role: str, session: Session | None, error: BaseException, *, run: str, debug: bool) -> int:
    """Print the cause of a failure, report it to the run if that was joined, and return the exit status."""
    if debug or os.environ.get("PENSTOCK_DEBUG"):
        traceback.print_exception(error)
    text = f"{error}. Check that the run was not started twice" if isinstance(error, Fenced) else str(error)
    name = role if session is None else session.worker
    as_json = bool(os.environ.get(LOG_JSON))
    line = log_line(text, run=run, worker=name, level="error", as_json=True) if as_json else f"penstock: {role}: {visible(text)}"
    print(line, file=sys.stderr, flush=True)
    if session is not None:
        with contextlib.suppress(Exception):  # the broker may be unreachable: the cause is already printed
            session.reporter.labels["error"] = text
            session.close(status="failed")
    return exit_status(error)
