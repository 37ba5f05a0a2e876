"""What a worker says of itself: its status once a second and its results in `metrics`, and lines on its own output.

The rule: nobody waits for a measurement; one that was lost ends the worker at its next status.
"""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

from penstock.infra.log import Log, Producer
from penstock.pipeline.runtime.leases import new_token
from penstock.pipeline.runtime.reporting.log_lines import print_line
from penstock.pipeline.runtime.reporting.peak_memory import peak_rss
from penstock.pipeline.runtime.reporting.time_uses import TRAINER_WAITS, split, use_of
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Activity
from penstock.topics.wire.record import Outgoing

STATUS_EVERY_S = 1.0
"""How often a worker reports its status; the feeder and the live view rely on it."""
SAY_EVERY_S = 30.0
"""How often, at most, a worker prints what it does."""
SAID_AT_FIRST = 5
"""Lines of one sort that are printed one by one."""
COLLECTING = gc.get_threshold()
"""When garbage is collected from a worker's start on."""
SUM_EVERY_S = 10.0
"""How often the lines that were only counted are summed up."""


class CodecTimer:
    """Adds up the CPU seconds of the calling thread in the blocks it is used for; not to be nested. Waiting never counts."""

    __slots__ = ("_started", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._started


@dataclass(slots=True)
class ThrottledLog:
    """Prints the first few lines of each sort, counts the others and prints their number now and then."""

    write: Callable[[str], None]
    _seen: Counter[str] = field(default_factory=Counter)
    _counted: Counter[str] = field(default_factory=Counter)
    _summed: float = field(default_factory=time.monotonic)

    def notify(self, sort: str, text: str) -> None:
        """Print a line, or only count it among those of its sort."""
        self._seen[sort] += 1
        if self._seen[sort] <= SAID_AT_FIRST:
            self.write(text)
        else:
            self._counted[sort] += 1

    def sum_up(self, *, now: bool = False) -> None:
        """Print how many lines of each sort were only counted, at most every `SUM_EVERY_S` seconds."""
        if not self._counted or (not now and time.monotonic() - self._summed < SUM_EVERY_S):
            return
        self._summed = time.monotonic()
        for sort, count in sorted(self._counted.items()):
            self.write(f"{count} more: {sort}")
        self._counted.clear()


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Sends one worker's measurements; the worker keeps its current numbers in `values` and its texts in `labels`."""

    run: str
    role: str
    worker: str
    log: Log
    producer: Producer
    incarnation: str = field(default_factory=new_token)
    """The process's token, of which other processes know it."""
    encoding: CodecTimer = field(default_factory=CodecTimer)
    decoding: CodecTimer = field(default_factory=CodecTimer)
    values: dict[str, float] = field(default_factory=dict)
    """Cumulative numbers, sent with every status."""
    labels: dict[str, str] = field(default_factory=dict)
    turned_s: float = field(default_factory=time.monotonic)
    """When the worker's loop last turned, on the monotonic clock."""
    throttled: ThrottledLog = field(init=False)
    """For lines that may be needed once or ten thousand times."""
    outage: Callable[[], float] = lambda: 0.0
    """For how many seconds the broker has not answered the worker; set by workers that follow topics."""
    _activity: Activity = Activity.START
    _sequence: int = 0
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """Held while a measurement takes its number: the wish to stop is reported from a thread of its own."""
    _last_status: float = 0.0
    _said: str = ""
    _said_s: float = field(default_factory=time.monotonic)
    _started: float = field(default_factory=time.monotonic)
    _counted: float = field(init=False)
    """Up to when the time is counted."""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._counted = self._started
        self.throttled = ThrottledLog(self.notify)

    def notify(self, text: str, *, level: str = "info") -> None:
        """Print one line of the worker's log."""
        print_line(self.run, self.worker, text, level=level)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Raise one of the cumulative numbers."""
        self.values[name] = self.values.get(name, 0.0) + amount

    def doing(self, activity: Activity, text: str, *, now: bool = False) -> None:
        """Set the worker's activity and its text for users; sent with the next status, or with `now` at once."""
        changed = self.labels.get("doing") != text or self._activity != activity
        if changed:
            self._count_time()
        self._activity = activity
        self.labels.update(doing=text, activity=activity.value)
        if now and changed:
            self.status(force=True)

    def _count_time(self) -> None:
        """Add the time since the last call to the use of the current activity."""
        with self._counting:
            now = time.monotonic()
            use = "broker" if self.outage() > 0 else use_of(self._activity)
            for part, seconds in split(use, now - self._counted).items():
                self.add(f"time_{part}_s", seconds)
            self._counted = now

    def waited_s(self) -> float:
        """Seconds that a trainer has waited so far."""
        self._count_time()
        return sum(self.values.get(f"time_{use}_s", 0.0) for use in TRAINER_WAITS)

    def ready(self) -> None:
        """Report that everything is loaded: `startup_s` counts from the process's creation."""
        gc.set_threshold(*COLLECTING)  # a process may have collected garbage more seldom while it imported
        self.values["startup_s"] = time.time() - psutil.Process().create_time()
        self.status(force=True)

    def duplicate(self, what: str) -> None:
        """Count a record that repeats what is known already."""
        self.add("duplicates")
        self.throttled.notify("ignored duplicates", f"ignored a duplicate: {what}")

    def numbers(self) -> dict[str, float]:
        """The worker's numbers, its process's included."""
        return {**self.values, **self._process_values()}

    def status(self, *, force: bool = False) -> None:
        """Report the worker's state once in each second of the clock: reports that are sent together are read together."""
        self.turned_s = time.monotonic()
        second = time.time() // STATUS_EVERY_S
        if not force and second == self._last_status:
            return
        self._last_status = second
        self.throttled.sum_up()
        self.producer.check()
        self._count_time()
        self._say_activity()
        self.send(kind="status", values=self.numbers(), labels=self.labels)

    def _say_activity(self) -> None:
        """Print what the worker does, if it is something else than was printed last: a shell of its own is not silent for hours."""
        now, doing = time.monotonic(), self.labels.get("doing", "")
        if doing != self._said and now - self._said_s >= SAY_EVERY_S:
            self._said, self._said_s = doing, now
            self.notify(doing)

    def send(
        self,
        *,
        kind: metrics.MeasurementKind,
        values: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
        version: int | None = None,
        step: int | None = None,
        control: bool = False,
    ) -> None:
        """Send one measurement; a worker numbers its measurements, so that readers recognise a repeated one.

        With `control` it is first sent to the control topic of the worker's role: the trainer does not read `metrics`.
        """
        with self._sending:
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
            if control:
                topic, key = control_topic(self.run, self.role), f"{self.worker}/{kind}/{version}".encode()
                self.producer.send(Outgoing(topic=topic, partition=0, key=key, headers=headers, value=value))
            self.producer.send(Outgoing(topic=f"{self.run}.metrics", partition=0, key=self.worker.encode(), headers=headers, value=value))

    def close(self, *, status: str) -> None:
        """Send the last measurement."""
        self.throttled.sum_up(now=True)
        self.labels["status"] = status
        self._count_time()
        self.send(kind="final", values=self.numbers(), labels=self.labels)

    def _process_values(self) -> dict[str, float]:
        spent, process = self.log.costs(), psutil.Process()
        times = process.cpu_times()
        return {
            "cost_encode_s": self.encoding.seconds,
            "cost_decode_s": self.decoding.seconds,
            "cost_send_s": spent["send_s"],
            "cost_poll_s": spent["poll_s"],
            "cost_io_s": spent["io_s"],
            "uptime_s": self._counted - self._started,
            "cpu_s": times.user + times.system,
            "rss_mib": process.memory_info().rss / 2**20,
            "peak_rss_mib": peak_rss() / 2**20,
        }
