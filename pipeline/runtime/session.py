"""A worker's connection to its run: its name, the configuration from the log, its producer and reporter."""

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.infra.errors import PenstockError
from penstock.infra.log import Log, Member, Pools, Producer, Transactions
from penstock.infra.sandbox.signals import set_in_handler
from penstock.pipeline.config.load import Config, ConfigError, from_json, with_values
from penstock.pipeline.data.tokenization import digests
from penstock.pipeline.runtime.dead_letters import DeadLetters
from penstock.pipeline.runtime.leases import WriterLease, new_token, process_token
from penstock.pipeline.runtime.registration.run_registry import Registration, registration
from penstock.pipeline.runtime.registration.trust import NO_TRUST, Trust, require_own_server, require_trusted
from penstock.pipeline.runtime.reporting.log_lines import print_line
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.pipeline.scheduling.rules import Schedule
from penstock.topics.catalogue import topic_name
from penstock.topics.metrics import Activity
from penstock.topics.runs import RunRecord


@dataclass(slots=True, kw_only=True)
class Session:
    """A worker's connection to its run: name, configuration, log, producer and reporter."""

    run: str
    role: str
    worker: str
    log: Log
    record: RunRecord
    config: Config
    info: Mapping[str, Any]
    stop: threading.Event
    """Set by SIGTERM and SIGINT: finish or release, then exit."""
    token: str = field(default_factory=new_token)
    """Random identifier of this process."""
    trust: Trust = NO_TRUST
    """The operator's decision about the run's code."""
    pool: str | None = None
    """The one of rollout.pools that this worker is in; None without pools, and in other roles."""
    watch_s: float = 0.0
    """How long a silent owner of this worker's lease is watched; 0 in a process that other workers share."""
    schedule: Schedule = field(init=False)
    producer: Producer = field(init=False)
    """The plain producer: samples, chunks, measurements and dead letters."""
    reporter: Reporter = field(init=False)
    dead_letters: DeadLetters = field(init=False)
    _lease: WriterLease | None = None
    _finishing: Callable[[], str] | None = None

    def __post_init__(self) -> None:
        self.schedule = self.config.rules
        self.producer = self.log.producer(linger_ms=5.0)
        self.reporter = Reporter(
            run=self.run, role=self.role, worker=self.worker, log=self.log, producer=self.producer, incarnation=self.token
        )
        self.dead_letters = DeadLetters(self.log, self.reporter)

    @property
    def steps(self) -> int:
        return int(self.info["steps"])

    def topic(self, name: str) -> str:
        """The Kafka name of one of the run's topics."""
        return f"{self.run}.{name}"

    def member(self, *topics: str, max_records: int, max_bytes: int = 64 << 20, gathers: bool = True) -> Member:
        """Join the consumer group of this role on these topics of the run; the limits are those of one fetch, as in `Log.member`."""
        pools = None if self.pool is None else Pools(own=self.pool, by_partition=self.config.pools_by_partition)
        return self.log.member(
            f"{self.run}.{self.role}", [self.topic(name) for name in topics], max_records=max_records, max_bytes=max_bytes, gathers=gathers,
            session_s=self.config.kafka.session_s, pools=pools,
        )  # fmt: skip

    def transactions(self) -> Transactions:
        """Acquire this worker's writer lease; return the producer of its transactions. Raises `Fenced` if another process holds it."""
        reporter = self.reporter
        self._lease = WriterLease(
            log=self.log, run=self.run, writer=self.worker, token=self.token, watch_s=self.watch_s, notify=reporter.notify, stop=self.stop
        )
        return self._lease.acquire()

    def require_lease(self) -> None:
        """Raise `Fenced` if another process has acquired this worker's lease; its records would otherwise look foreign."""
        if self._lease is not None:
            self._lease.require_held()

    def check_model(self) -> None:
        """Raise `ConfigError` if tokenizer, template or stop ids in the model directory differ from those of the run."""
        path = self.config.model.path
        if dict(digests(path, chat_template=self.config.data.chat_template)) != self.info["digests"]:
            raise ConfigError(
                f"the tokenizer, chat template or stop ids in {path} differ from those of the run; use the run's original model directory"
            )

    def ready(self, *, finishing: Callable[[], str], outage: Callable[[], float] = lambda: 0.0) -> None:
        """Report that everything is loaded.

        `finishing` describes the remaining work after a stop request and its duration, and is called by any thread; `outage` returns the
        seconds for which the broker has been unreachable.
        """
        self._finishing = finishing
        self.reporter.ready(outage)

    def announce_stop(self) -> None:
        """Wait until a stop is requested, then report the remaining work; for a thread of its own."""
        self.stop.wait()
        text = self._finishing() if self._finishing else f"finishes the current work: {self.reporter.labels['doing']}"
        self.reporter.notify(f"stop requested: {text}")
        with contextlib.suppress(PenstockError):  # the worker's own calls raise errors of the log
            self.reporter.doing(Activity.STOP, f"stopping: {text}", now=True)

    def close(self, *, status: str) -> None:
        """Send the last measurement and let the producer finish."""
        if self._lease is not None:
            self._lease.release()
        self.reporter.close(status=status)
        self.producer.flush(10.0)
        self.producer.close()
        self.dead_letters.close()


def join(
    *, run: str, role: str, log: Log, worker: str | None, model: str | None, stop: threading.Event, watch_s: float = 0.0,
    pool: str | None = None, trust: Trust = NO_TRUST,
) -> Session | None:  # fmt: skip
    """Wait for the run to be registered and join it; None if a stop was requested first.

    `worker` is the name, made of host and process if None; `model` is the model's directory here, if not the configuration's. Raises
    `ConfigError`, also for code that neither the run's key nor `trust` covers.
    """
    announced = False
    while not _is_made(log, registered := registration(log, run, key_file=trust.run_key)):
        if not announced:
            print_line(run, worker or role, f"waiting for the run to be created (penstock create CONFIG --run-id {run})")
            announced = True
        if stop.wait(1.0):
            return None
    record = require_trusted(registered, trust=trust, notify=partial(print_line, run, worker or role))
    config = from_json(record.config)
    if role == "tracker":
        require_own_server(registered, config, trust=trust)
    if model is not None:
        config = with_values(config, "model", path=model)
    token = process_token()
    name = worker or f"{role}-{socket.gethostname().split('.')[0].lower()}-{token[:6]}"  # a pid may be the same on two machines
    pool = pool_of_worker(config, role=role, worker=name, requested=pool)
    log.wait_out(config.kafka.give_up_s, notify=partial(print_line, run, name))  # before any client is made: it holds for those that follow
    session = Session(
        run=run, role=role, worker=name, log=log, record=record, config=config, info=json.loads(record.info), stop=stop, token=token,
        trust=trust, pool=pool, watch_s=watch_s,
    )  # fmt: skip
    if pool is not None:
        session.reporter.labels["pool"] = pool
    session.reporter.labels.update(host=socket.gethostname(), pid=str(os.getpid()))
    session.reporter.doing(Activity.START, "starting")
    session.reporter.status(force=True)
    return session


def _is_made(log: Log, registered: Registration) -> bool:
    """True if the run is registered or comes from an earlier release: any client may write a status for a run that does not exist."""
    if registered.record is None:
        return False
    return registered.own or log.partitions(topic_name(registered.run, "ledger")) is not None


def pool_of_worker(config: Config, *, role: str, worker: str, requested: str | None) -> str | None:
    """The pool of a rollout worker: the requested one, else the pool of the worker with this number under `penstock run`.

    None for other roles, and for a run without `rollout.pools`. Raises `ConfigError` for an unknown pool.
    """
    names = ", ".join(config.rollout.pools)
    if role != "rollout" or not names:
        if requested is not None:
            raise ConfigError(f"--pool {requested}: only rollout workers of a run with rollout.pools belong to a pool; omit --pool")
        return None
    number = worker.removeprefix(f"{role}-")
    if requested is None and number.isdigit() and int(number) < len(config.pools):
        return config.pools[int(number)]
    if requested not in config.rollout.pools:
        raise ConfigError(f"--pool: name the pool of rollout workers that this worker joins: {names}")
    return requested


def stop_on_signals(stop: threading.Event) -> None:
    """Let SIGTERM and SIGINT set the event; a second signal ends the process at once."""

    requested: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if requested:
            with contextlib.suppress(OSError):  # no stream of Python's: the interrupted code may be writing to it
                os.write(2, b"stopped at once on a second signal\n")
            os._exit(128 + number)
        requested.append(number)
        set_in_handler(stop)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
