"""Sends a worker's status once a second and its results to `metrics`, prints its log lines, and counts the uses of its time."""

import gc
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from penstock.infra.log import Log, Producer
from penstock.pipeline.runtime.leases import new_token
from penstock.pipeline.runtime.reporting.log_lines import print_line
from penstock.topics import metrics
from penstock.topics.catalogue import control_topic
from penstock.topics.metrics import Activity


def peak_rss() -> float:
    """Peak resident bytes of this process. Linux's `ru_maxrss` starts with the parent's peak, so it is only the fallback."""
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return 1024.0 * (float(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


_COUNTED_AS: Mapping[Activity, Activity] = {
    Activity.COMPUTE: Activity.BUSY,
    Activity.STOP: Activity.BUSY,
    Activity.NO_CALLS: Activity.NO_PROMPTS,
    Activity.LOAD: Activity.NO_WEIGHTS,
}
"""Activities whose seconds are counted under another one."""
NO_ACTIVITY = ("broker", "suspended")
"""Uses that no worker reports: an unreachable broker, and a suspended process."""
USES = (*(activity.value for activity in Activity if activity not in _COUNTED_AS), *NO_ACTIVITY)
OUTSIDE = ("start", "done", "suspended")
"""Uses outside the time in which a worker could work."""
TRAINER_WAITS = ("no_group", "no_device")
"""Uses of the trainer's time that count as waiting, in every report."""
_COUNTED_EACH_SECOND = frozenset({"no_prompts", "no_samples", "no_group", "full_window", "no_room"})
"""Uses in a loop that counts its time every second; the others may count it after minutes."""
SUSPENDED_S = 60.0
"""A loop without an iteration for this long was suspended with its process."""
TURN_S = 1.0
"""Seconds of a suspension that may have been waiting."""


def use_of(activity: Activity) -> str:
    """The use under which the seconds of an activity are counted."""
    return _COUNTED_AS.get(activity, activity).value


def kind_of(use: str) -> str:
    """The kind of a use: `work`, `wait` or `load`."""
    return "wait" if use in NO_ACTIVITY else Activity(use).kind


def split(use: str, seconds: float) -> dict[str, float]:
    """Use -> seconds of the time since the last count. A loop that counts every second, but has not for a minute, was suspended meanwhile.

    Example:
        split("no_group", 75.0)  # -> {"no_group": 1.0, "suspended": 74.0}
    """
    if use not in _COUNTED_EACH_SECOND or seconds <= SUSPENDED_S:
        return {use: seconds}
    return {use: TURN_S, "suspended": seconds - TURN_S}


STATUS_EVERY_S = 1.0
"""How often a worker reports its status; the feeder and the live view rely on it."""
PRINT_EVERY_S = 30.0
"""Shortest time between two printed activities."""
PRINTED_AT_FIRST = 5
"""Lines of one kind that are printed; the others are counted."""
GC_THRESHOLD = gc.get_threshold()
"""Thresholds of the garbage collector once a worker is ready."""
SUM_EVERY_S = 10.0
"""Shortest time between two lines with the number of counted lines."""


class CodecTimer:
    """Context manager that adds up the CPU seconds of the calling thread; not nestable."""

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
    """Prints the first few lines of each kind, then only how many more there were, periodically."""

    write: Callable[[str], None]
    _seen: Counter[str] = field(default_factory=Counter)
    _counted: Counter[str] = field(default_factory=Counter)
    _summed: float = field(default_factory=time.monotonic)

    def notify(self, kind: str, text: str) -> None:
        """Print a line, or only count it if `PRINTED_AT_FIRST` lines of this kind were printed."""
        self._seen[kind] += 1
        if self._seen[kind] <= PRINTED_AT_FIRST:
            self.write(text)
        else:
            self._counted[kind] += 1

    def sum_up(self, *, now: bool = False) -> None:
        """Print how many lines of each kind were counted, at most every `SUM_EVERY_S` seconds."""
        if not self._counted or (not now and time.monotonic() - self._summed < SUM_EVERY_S):
            return
        self._summed = time.monotonic()
        for kind, count in sorted(self._counted.items()):
            self.write(f"{count} more: {kind}")
        self._counted.clear()


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Sends one worker's measurements; the worker updates its numbers in `values` and its texts in `labels`."""

    run: str
    role: str
    worker: str
    log: Log
    producer: Producer
    incarnation: str = field(default_factory=new_token)
    """Random identifier of this process."""
    encoding: CodecTimer = field(default_factory=CodecTimer)
    decoding: CodecTimer = field(default_factory=CodecTimer)
    values: dict[str, float] = field(default_factory=dict)
    """Cumulative numbers, sent with every status."""
    labels: dict[str, str] = field(default_factory=dict)
    points: dict[str, float] = field(default_factory=dict)
    """Further metrics by full name, for `/metrics` alone."""
    turned_s: float = field(default_factory=time.monotonic)
    """Time of the main loop's last iteration, on the monotonic clock."""
    throttled: ThrottledLog = field(init=False)
    """Log for lines that may repeat many times."""
    outage: Callable[[], float] = lambda: 0.0
    """Seconds for which the broker has been unreachable."""
    _activity: Activity = Activity.START
    _sequence: int = 0
    _sending: threading.Lock = field(default_factory=threading.Lock)
    """Guards the sequence number: a request to stop is reported from another thread."""
    _last_status: float = 0.0
    _printed: str = ""
    _printed_s: float = field(default_factory=time.monotonic)
    _started: float = field(default_factory=time.monotonic)
    _counted: float = field(init=False)
    """End of the counted time, on the monotonic clock."""
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._counted = self._started
        self.throttled = ThrottledLog(self.notify)

    def notify(self, text: str, *, level: str = "info") -> None:
        print_line(self.run, self.worker, text, level=level)

    def add(self, name: str, amount: float = 1.0) -> None:
        self.values[name] = self.values.get(name, 0.0) + amount

    def doing(self, activity: Activity, text: str, *, now: bool = False) -> None:
        """Set the worker's activity and a text for users; sent with the next status, or with `now` at once."""
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
        """Seconds that this worker, a trainer, has waited so far, for groups or for its device."""
        self._count_time()
        return sum(self.values.get(f"time_{use}_s", 0.0) for use in TRAINER_WAITS)

    def ready(self, outage: Callable[[], float]) -> None:
        """Report that everything is loaded; `startup_s` counts from the start of the process."""
        self.outage = outage
        gc.set_threshold(*GC_THRESHOLD)  # raised during the imports
        self.values["startup_s"] = time.time() - psutil.Process().create_time()
        self.status(force=True)

    def duplicate(self, name: str) -> None:
        self.add("duplicates")
        self.throttled.notify("ignored duplicates", f"ignored a duplicate: {name}")

    def numbers(self) -> dict[str, float]:
        """The cumulative numbers of a status: `values`, and costs, CPU time and memory of the process."""
        spent, process = self.log.costs(), psutil.Process()
        times = process.cpu_times()
        return {
            **self.values,
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

    def status(self, *, force: bool = False) -> None:
        """Send the worker's state if it was not sent in this second of the wall clock, or with `force`; called by every main loop.

        All workers report at the start of a second, so that readers get the reports together. Raises `LogError` if sending has failed.
        """
        self.turned_s = time.monotonic()
        second = time.time() // STATUS_EVERY_S
        if not force and second == self._last_status:
            return
        self._last_status = second
        self.throttled.sum_up()
        self.producer.check()
        self._count_time()
        doing = self.labels.get("doing", "")
        if doing != self._printed and self.turned_s - self._printed_s >= PRINT_EVERY_S:
            self._printed, self._printed_s = doing, self.turned_s
            self.notify(doing)
        self.send(kind="status", values=self.numbers(), labels=self.labels)

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
        """Send one measurement; its sequence number lets readers recognise duplicates.

        `control` sends it to the control topic of the worker's role first: the trainer does not read `metrics`.
        """
        with self._sending:
            measurement = metrics.Measurement(
                worker=self.worker, role=self.role, incarnation=self.incarnation, seq=self._sequence, kind=kind, time_ns=time.time_ns(),
                version=version, step=step, values=dict(values), labels=dict(labels or {}),
            )  # fmt: skip
            self._sequence += 1
            outgoing = metrics.outgoing(measurement, run=self.run, topic=f"{self.run}.metrics", key=self.worker.encode())
            if control:
                topic, key = control_topic(self.run, self.role), f"{self.worker}/{kind}/{version}".encode()
                self.producer.send(replace(outgoing, topic=topic, key=key))
            self.producer.send(outgoing)

    def close(self, *, status: str) -> None:
        self.throttled.sum_up(now=True)
        self.labels["status"] = status
        self._count_time()
        self.send(kind="final", values=self.numbers(), labels=self.labels)
