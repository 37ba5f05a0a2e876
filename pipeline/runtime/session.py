"""A worker's place in a run: its name, the run's configuration from the log, and how it reports.

The rule: a worker needs a broker address and a run id, nothing else; everything it says goes to the run's topics.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from penstock.infra.errors import BrokerError
from penstock.infra.log import Log, Producer
from penstock.infra.paths import run_directory
from penstock.infra.poison_records import Attempts
from penstock.pipeline.config.load import Config, from_json
from penstock.pipeline.envs.tokenization import digests
from penstock.pipeline.runtime.codec_timer import Clock, Costs
from penstock.pipeline.runtime.run_registry import find
from penstock.pipeline.runtime.throttled_log import Notices
from penstock.pipeline.scheduling.schedule import Schedule
from penstock.topics import dead_letters, metrics
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record

STATUS_EVERY_S = 1.0
"""How often a worker says what it does; the feeder and the live view rely on it."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One worker's connection to its run."""

    run: str
    role: str
    worker: str
    log: Log
    record: RunRecord
    config: Config
    info: Mapping[str, Any]
    stop: threading.Event
    """Set by SIGTERM and SIGINT: finish or hand back, then end."""
    incarnation: str = field(default_factory=lambda: f"{time.time_ns():x}")
    costs: Costs = field(default_factory=Costs)
    values: dict[str, float] = field(default_factory=dict)
    """The worker's own cumulative numbers, sent with every status."""
    labels: dict[str, str] = field(default_factory=dict)
    _rules: Schedule | None = None
    _producer: Producer | None = None
    _sequence: int = 0
    _last_status: float = 0.0
    _dead: set[tuple[str, int, int]] | None = None
    _attempts: Attempts | None = None
    _notices: Notices | None = None
    _started: float = field(default_factory=time.monotonic)

    @property
    def rules(self) -> Schedule:
        """The run's schedule."""
        if self._rules is None:
            self._rules = self.config.rules
        return self._rules

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.info["steps"])

    def topic(self, name: str) -> str:
        """The Kafka name of one of the run's topics."""
        return f"{self.run}.{name}"

    def check_model(self) -> None:
        """Refuse a model directory whose tokenizer, template or stop ids are not those the run was created with."""
        path = self.config.model.path
        if dict(digests(path, chat_template=self.config.data.chat_template)) != self.info["digests"]:
            raise ValueError(
                f"the tokenizer, chat template or stop ids in {path} are not those the run was created with; use the same model directory"
            )

    def say(self, text: str) -> None:
        """One line for the worker's own output."""
        print(f"{time.strftime('%H:%M:%S')} {self.worker}: {text}", flush=True)

    @property
    def notices(self) -> Notices:
        """For what may happen once or ten thousand times."""
        if self._notices is None:
            self._notices = Notices(self.say)
        return self._notices

    @property
    def attempts(self) -> Attempts:
        """What earlier processes of this name had in hand when they died; kept on this machine."""
        if self._attempts is None:
            try:
                path = run_directory(self.run) / "attempts" / self.worker
            except BrokerError:  # a machine without a place to write: what kills its reader has to be found by hand
                path = None
            self._attempts = Attempts(path)
        return self._attempts

    def decoding(self, record: Record) -> "Decoding":
        """A block that decodes a record: it is counted, and noted where the death of this process cannot reach.

        Raises `Unusable` for a record that has killed this worker too often, once it is among the dead letters, whoever owns its topic.
        """
        try:
            return Decoding(self.costs.decoding(), self.attempts.reading(record))
        except Unusable as error:
            self.dead_letter(record, error)
            raise

    @property
    def producer(self) -> Producer:
        """The plain producer: samples, measurements and dead letters."""
        if self._producer is None:
            self._producer = self.log.producer(linger_ms=5.0)
        return self._producer

    def add(self, name: str, amount: float = 1.0) -> None:
        """Raise one of the worker's cumulative numbers."""
        self.values[name] = self.values.get(name, 0.0) + amount

    def doing(self, text: str, *, now: bool = False) -> None:
        """Note what the worker does; sent with the next status, or at once."""
        changed = self.labels.get("doing") != text
        self.labels["doing"] = text
        if now and changed:
            self.status(force=True)

    def ready(self) -> None:
        """Note that everything is loaded: `startup_s` counts from the process's creation."""
        self.values["startup_s"] = time.time() - psutil.Process().create_time()
        self.status(force=True)

    def status(self, *, force: bool = False) -> None:
        """Report the worker's state once in each second of the clock: reports that come together are read together."""
        second = time.time() // STATUS_EVERY_S
        if not force and second == self._last_status:
            return
        self._last_status = second
        self.notices.sum_up()
        self.producer.check()  # nobody waits for measurements and dead letters: one that was lost ends the worker here
        self.report(kind="status", values={**self.values, **self._process_values()}, labels=self.labels)

    def report(
        self,
        *,
        kind: metrics.MeasurementKind,
        values: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
        version: int | None = None,
        step: int | None = None,
    ) -> None:
        """Send one measurement; measurements of a worker are numbered, so that a repeated one is known."""
        measurement = metrics.Measurement(
            worker=self.worker,
            role=self.role,
            incarnation=self.incarnation,
            seq=self._sequence,
            kind=kind,
            time_ns=time.time_ns(),
            version=version,
            step=step,
            values=dict(values),
            labels=dict(labels or {}),
        )
        self._sequence += 1
        value = metrics.encode(measurement)
        headers = metrics.headers(measurement, run=self.run).encode(value)
        self._send(Outgoing(topic=self.topic("metrics"), partition=0, key=self.worker.encode(), headers=headers, value=value))

    def dead_letter(self, record: Record, error: Unusable) -> None:
        """Put a record nobody can use aside, once, with the reason; its reader goes on."""
        place = record.topic, record.partition, record.offset
        if self._dead is None:
            self._dead = self._known_dead_letters()
        if place in self._dead:
            return
        self._dead.add(place)
        self.add("dead_letters")
        key = f"{record.topic}/{record.partition}/{record.offset}"
        self.notices.note(f"dead letters ({error.kind}) from {record.topic}", f"dead letter ({error.kind}) from {key}: {error}")
        letter = dead_letters.from_record(record, kind=error.kind, reason=str(error), worker=self.worker, time_ns=time.time_ns())
        value = dead_letters.encode(letter)
        headers = dead_letters.headers(letter, run=self.run).encode(value)
        self._send(Outgoing(topic=self.topic("dead-letters"), partition=0, key=key.encode(), headers=headers, value=value))

    def duplicate(self, what: str) -> None:
        """Count a record that repeats what is known already."""
        self.add("duplicates")
        self.notices.note("ignored duplicates", f"ignored a duplicate: {what}")

    def close(self, *, status: str) -> None:
        """Send the last measurement and let the producer finish."""
        self.notices.sum_up(now=True)
        self.labels["status"] = status
        self.report(kind="final", values={**self.values, **self._process_values()}, labels=self.labels)
        self.producer.flush(10.0)
        self.producer.close()
        if self._attempts is not None:
            self._attempts.close()

    def _send(self, outgoing: Outgoing) -> None:
        self.producer.send(outgoing)

    def _known_dead_letters(self) -> set[tuple[str, int, int]]:
        """The places of records that were set aside by whomever; only a readable letter counts, as any client may write a key."""
        at = self.topic("dead-letters"), 0
        end = self.log.end_offsets([at])[at]
        tail = self.log.tail({at: "earliest"})
        found: set[tuple[str, int, int]] = set()
        try:
            while tail.position(at) < end:  # a few at a time: each holds a record of up to 16 MiB
                for record in tail.poll(1.0, max_records=100):
                    with contextlib.suppress(Unusable):
                        letter = dead_letters.read(record, run=self.run)[1]
                        found.add((letter.topic, letter.partition, letter.offset))
        finally:
            tail.close()
        return found

    def _process_values(self) -> dict[str, float]:
        spent = self.log.costs()
        process = psutil.Process()
        times = process.cpu_times()
        return {
            "cost_encode_s": self.costs.encode_s,
            "cost_decode_s": self.costs.decode_s,
            "cost_send_s": spent["send_s"],
            "cost_poll_s": spent["poll_s"],
            "cost_io_s": spent["io_s"],
            "uptime_s": time.monotonic() - self._started,
            "cpu_s": times.user + times.system,
            "rss_mib": process.memory_info().rss / 2**20,
        }


class Decoding:
    """The time spent in a block and the record it has in hand, in one."""

    __slots__ = ("_attempts", "_clock")

    def __init__(self, clock: Clock, attempts: Attempts) -> None:
        self._clock, self._attempts = clock, attempts

    def __enter__(self) -> None:
        self._clock.__enter__()
        self._attempts.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._attempts.__exit__(*raised)
        self._clock.__exit__()


def join(*, run: str, role: str, log: Log, worker: str | None, model: str | None, stop: threading.Event) -> Session | None:
    """Wait for the run to be registered and take a place in it; None when the worker was stopped while it waited."""
    said = False
    while (record := find(log, run)) is None:
        if not said:
            print(f"{role}: waiting for run {run!r} to be created (penstock create CONFIG --run-id {run})", flush=True)
            said = True
        if stop.wait(1.0):
            return None
    config = from_json(record.config)
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    session = Session(
        run=run,
        role=role,
        worker=worker or f"{role}-{socket.gethostname().split('.')[0].lower()}-{os.getpid()}",
        log=log,
        record=record,
        config=config,
        info=json.loads(record.info),
        stop=stop,
    )
    log.wait_out(config.kafka.give_up_s, say=session.say)
    session.labels.update(host=socket.gethostname(), pid=str(os.getpid()), doing="starting")
    session.status(force=True)
    return session


def stop_on_signals(stop: threading.Event, *, also: Callable[[], None] | None = None) -> None:
    """SIGTERM and SIGINT set the event; a second one ends the process at once."""

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            sys.stderr.write("stopped at once on a second signal\n")
            os._exit(128 + number)
        stop.set()
        if also is not None:
            also()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
