"""The entry of every worker process: arguments, signals, the wait for the run, and one place where errors become one line.

The rule: a worker exits 0 when its run is over or it was asked to stop; otherwise one line says the cause, and the status is 1
when starting again may help, 2 when it cannot: a person's mistake, a contradiction in what is recorded, another process in its place.
"""

import argparse
import contextlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.infra.errors import ConfigError, Fenced, PenstockError, Unrecoverable
from penstock.infra.log import Log
from penstock.infra.paths import make_files_private
from penstock.infra.sandbox.secrets import hide_secrets
from penstock.pipeline.config.security import VARIABLE, credentials
from penstock.pipeline.runtime.exit_status import ENDED, MISTAKES, exit_status
from penstock.pipeline.runtime.leases import SILENT_S
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust
from penstock.pipeline.runtime.reporting.client_log import pass_on_warnings
from penstock.pipeline.runtime.reporting.health import Health, serve
from penstock.pipeline.runtime.reporting.log_lines import LOG_JSON, log_line, print_line
from penstock.pipeline.runtime.roles import ROLES
from penstock.pipeline.runtime.session import Session, join, stop_on_signals
from penstock.topics.wire.visible import visible

_SHARE_MEMORY = ("trainer", "rollout", "evaluator")
"""Roles whose other processes open this one's memory under /proc."""


def main(arguments: Sequence[str]) -> int:
    """Run one role until its run is over; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock.workers", description="one worker of a Penstock run")
    parser.add_argument("role", choices=list(ROLES))
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--bootstrap", required=True, help="HOST:PORT of a Kafka broker")
    parser.add_argument("--slot", type=int, help="number of this worker among those of its role; names it and its transactional id")
    parser.add_argument("--pool", help="which of rollout.pools this rollout worker joins; that of its slot if absent")
    parser.add_argument("--model", help="where the model directory is on this machine, if not where the configuration says")
    parser.add_argument("--run-key", metavar="FILE", type=Path, help="the run's key, if it is not in the state directory")
    parser.add_argument("--trust-code", action="store_true", help="run the code that the run names although no key here has signed it")
    parser.add_argument("--health", metavar="[HOST:]PORT", help="answer /livez, /readyz and /metrics there")
    parser.add_argument("--log-json", action="store_true", help="print each line of the log as a JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    chosen = parser.parse_args(arguments)
    hide_secrets(memory=chosen.role not in _SHARE_MEMORY)
    security = credentials({})
    os.environ.pop(VARIABLE, None)
    return work(
        chosen.role,
        run=chosen.run,
        bootstrap=chosen.bootstrap,
        slot=chosen.slot,
        pool=chosen.pool,
        model=chosen.model,
        trust=Trust(run_key=chosen.run_key, code=chosen.trust_code),
        security=security,
        debug=chosen.debug,
        health=chosen.health,
        log_json=chosen.log_json,
    )


def work(
    role: str,
    *,
    run: str,
    bootstrap: str,
    slot: int | None,
    model: str | None,
    pool: str | None = None,
    trust: Trust = NO_TRUST,
    security: Mapping[str, Any] | None = None,
    debug: bool = False,
    health: str | None = None,
    log_json: bool = False,
) -> int:
    """Join the run as `role` and do its work; SIGTERM and SIGINT end it in an orderly way."""
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
        log = _log(bootstrap, security, client_id=f"{run}.{worker or role}" + (f"-rank-{rank}" if rank else ""))
        if rank:
            importlib.import_module(ROLES[role].module).follow(log, run, model=model, trust=trust)
            return ENDED
        session = join(run=run, role=role, log=log, worker=worker, model=model, stop=stop, watch_s=SILENT_S, pool=pool, trust=trust)
        if session is None:
            return ENDED
        session.reporter.notify(f"joined run {run}")
        serve(Health(session.reporter, stop), health)
        threading.Thread(target=session.announce_stop, daemon=True, name="announce-stop").start()
        importlib.import_module(ROLES[role].module).main(session)
        session.close(status="stopped" if stop.is_set() else "finished")
        session.reporter.notify("done")
        return ENDED
    except (PenstockError, OSError, *MISTAKES) as error:
        return _failed(role, session, error, run=run, debug=debug)
    except ModuleNotFoundError as error:
        missing = Unrecoverable(f"{error.name} is not installed on this machine; `penstock doctor` says which extra has it")
        return _failed(role, session, missing, run=run, debug=debug)
    except Exception as error:  # the process's edge: whatever it is, the launcher and the run get to know
        return _failed(role, session, error, run=run, debug=True)
    finally:
        stop_forwarding()
        sys.stdout.flush()


def _log(bootstrap: str, security: Mapping[str, Any] | None, *, client_id: str) -> Log:
    from penstock.infra.kafka.log import KafkaLog

    try:
        return KafkaLog(bootstrap, security=security, client_id=client_id)
    except ValueError as error:
        raise ConfigError(f"--bootstrap, --security: {error}") from error


def _failed(role: str, session: Session | None, error: BaseException, *, run: str, debug: bool) -> int:
    """Print the cause, tell the run, and end without waiting for client threads that may be stuck."""
    if debug or os.environ.get("PENSTOCK_DEBUG"):
        traceback.print_exception(error)
    text = f"{error}: is the run attended twice?" if isinstance(error, Fenced) else str(error)
    name = role if session is None else session.worker
    as_json = bool(os.environ.get(LOG_JSON))
    line = log_line(text, run=run, worker=name, level="error", as_json=True) if as_json else f"penstock: {role}: {visible(text)}"
    print(line, file=sys.stderr, flush=True)
    if session is not None:
        with contextlib.suppress(Exception):  # the run may be beyond reach: the cause is already printed
            session.reporter.labels["error"] = text
            session.close(status="failed")
    return exit_status(error)
