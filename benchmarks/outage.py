"""Stops the broker for a minute in mid-run: exits and memory growth of workers, and the time until the run continues.

    python -m benchmarks outage examples/exact.toml --away 60 --how stop kill --compare --set run.steps=160

One run for each way: `stop` freezes the broker (SIGSTOP, then SIGCONT), `kill` kills it (SIGKILL) and starts it again after that time.
The launcher does not own the broker and does not restart it. Limits: no worker exits, none grows by more than 200 MB, the first new
sample, group and step are written within 10 s of the broker's return; with --compare the weights equal those of an undisturbed run.
Status 1 if a limit is missed.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.command import PENSTOCK, failed, launched, read_report, report_of, run_parser
from penstock.infra.broker import access, embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Start
from penstock.pipeline.config.security import VARIABLE

GROWTH_LIMIT_MB, BACK_LIMIT_S, START_LIMIT_S = 200.0, 10.0, 300.0
HEARD_BEFORE_S = 2.0
FOLLOWED = {"rollouts": "sample", "groups": "group", "ledger": "step"}


@dataclass(slots=True)
class Follower:
    """Records the arrival of a run's records."""

    log: KafkaLog
    run: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FOLLOWED, 0))
    arrived: dict[str, float] = field(default_factory=dict)
    """Monotonic time of the first record of each topic since `reset`."""
    closed: bool = False

    def __post_init__(self) -> None:
        self.log.wait_out(3600.0)
        deadline = time.monotonic() + START_LIMIT_S
        while not all(self.log.partitions(f"{self.run}.{topic}") for topic in FOLLOWED):
            if time.monotonic() > deadline:
                raise SystemExit(f"run {self.run} did not start within {START_LIMIT_S:.0f} s")
            time.sleep(0.2)
        counts = {topic: self.log.partitions(f"{self.run}.{topic}") or 0 for topic in FOLLOWED}
        starts: dict[tuple[str, int], Start] = {
            (f"{self.run}.{topic}", partition): "earliest" for topic, count in counts.items() for partition in range(count)
        }
        self._tail = self.log.tail(starts)

    _tail: Any = None

    def look(self, wait_s: float) -> None:
        """Count the records that arrive within `wait_s`."""
        for record in self._tail.poll(wait_s):
            topic = record.topic.removeprefix(f"{self.run}.")
            kind = (record.key or b"").decode()
            self.closed = self.closed or (topic == "ledger" and kind == "run-closed")
            if topic != "ledger" or kind == "step":
                self.counts[topic] += 1
                self.arrived.setdefault(topic, time.monotonic())

    def reset(self) -> None:
        """Count later arrivals as new."""
        self.arrived.clear()


@dataclass(slots=True)
class Workers:
    """The run's worker processes: exits and growth."""

    pids: dict[str, int]
    before: dict[str, float]
    during: dict[str, float] = field(default_factory=dict)
    overall: dict[str, float] = field(default_factory=dict)
    exited: dict[str, float] = field(default_factory=dict)
    """Monotonic time at which each was seen to have exited."""

    @classmethod
    def of(cls, directory: Path) -> "Workers":
        """Workers that are running."""
        pids = json.loads((directory / "workers.json").read_text())["workers"]
        return cls(pids, {name: size for name, pid in pids.items() if (size := rss_mb(pid)) is not None})

    def look(self, *, outage: bool) -> None:
        """Record sizes and exits."""
        for name, pid in self.pids.items():
            size = rss_mb(pid)
            if size is None:
                self.exited.setdefault(name, time.monotonic())
                continue
            grown = size - self.before.get(name, size)
            self.overall[name] = max(self.overall.get(name, 0.0), grown)
            if outage:
                self.during[name] = max(self.during.get(name, 0.0), grown)

    def run_is_over(self) -> None:
        """Drop the exits of the last two seconds: those workers read the end of the run first."""
        now = time.monotonic()
        self.exited = {name: when for name, when in self.exited.items() if now - when > HEARD_BEFORE_S}


def rss_mb(pid: int) -> float | None:
    """Resident megabytes of a process; None if it has exited."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.memory_info().rss / 1e6
    except psutil.NoSuchProcess:
        return None


def stop_broker(how: str, broker: Path, outage_s: float, follower: Follower, workers: Workers) -> tuple[float, float]:
    """Stop the broker for `outage_s`; returns when it served again, and how long its start took."""
    pid = embedded.status(broker).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    until = time.monotonic() + outage_s
    while (left := until - time.monotonic()) > 0:
        follower.look(min(0.5, left))
        workers.look(outage=True)
    follower.reset()
    if how == "stop":
        os.kill(pid, signal.SIGCONT)
        return time.monotonic(), 0.0
    started_s = embedded.start(home=broker).started_s or 0.0
    return time.monotonic(), started_s


def disturbed(how: str, config: str, run: str, settings: Sequence[str], home: Path, *, outage_s: float, at: float) -> dict[str, Any]:
    """Figures of one run with an outage after the share `at` of its steps."""
    broker, output = home / "broker-home", home / f"{run}.txt"
    with launched(config, run, settings, output) as process:
        follower = Follower(KafkaLog(embedded.status(broker).bootstrap, client_id="outage"), run)
        config_file = home / "runs" / run / "config.json"
        while not config_file.exists() and process.poll() is None:  # it is written after the topics
            time.sleep(0.1)
        steps = json.loads(config_file.read_text())["run"]["steps"]
        while follower.counts["ledger"] < at * steps and process.poll() is None:
            follower.look(0.5)
        if process.poll() is not None:
            raise failed(f"run {run} ended before the outage", output)
        workers, before = Workers.of(home / "runs" / run), dict(follower.counts)
        returned, started_s = stop_broker(how, broker, outage_s, follower, workers)
        while not follower.closed and process.poll() is None:
            follower.look(0.2)
            if not follower.closed:
                workers.look(outage=False)
        workers.run_is_over()
        process.wait()
    follower.log.close()
    report = read_report(run, output, process.returncode)
    audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", follower.log.bootstrap], capture_output=True, text=True, check=False)
    messages = {name: (home / "runs" / run / "logs" / f"{name}.log").read_text().count("responds again, after") for name in workers.pids}
    return {
        "back_s": {FOLLOWED[topic]: max(0.0, when - returned) for topic, when in follower.arrived.items()},
        "started_s": started_s, "before": before, "workers": workers, "report": report, "audit": audit.returncode, "messages": messages,
    }  # fmt: skip


def show(how: str, figures: dict[str, Any], *, outage_s: float, plain: dict[str, Any] | None) -> bool:
    """Print the figures of one run; True if no limit was missed."""
    workers, report, back = figures["workers"], figures["report"], figures["back_s"]
    print(f"\n{how}: the broker was unreachable for {outage_s:g} s after {figures['before']['ledger']} of {report['steps']} steps")
    if how == "kill":
        print(f"  its start took {figures['started_s']:.1f} s")
    print(f"  workers that exited: {len(workers.exited)} {' '.join(workers.exited)}")
    print(f"  logged its return: {json.dumps(figures['messages'])}")
    for topic in FOLLOWED.values():
        print(f"  first new {topic} {back[topic]:.1f} s after its return" if topic in back else f"  no new {topic}")
    print(f"  {'MB grown':<14}{'outage':>8}{'until the end':>15}")
    for name in sorted(workers.pids):
        print(f"  {name:<14}{workers.during.get(name, 0.0):>8.1f}{workers.overall.get(name, 0.0):>15.1f}")
    print(f"  audit: exit {figures['audit']}; groups {json.dumps(report['groups'])}")
    passed = [not workers.exited, len(back) == len(FOLLOWED), max(back.values(), default=0.0) <= BACK_LIMIT_S, figures["audit"] == 0]
    passed.append(max(workers.overall.values(), default=0.0) <= GROWTH_LIMIT_MB)
    if plain is not None:
        passed.append(report["weights"]["digest"] == plain["weights"]["digest"] and report["groups"] == plain["groups"])
        print(f"  digest {report['weights']['digest'][:16]}…, undisturbed {plain['weights']['digest'][:16]}…")
    print(f"  {'no limit missed' if all(passed) else 'A LIMIT IS MISSED'}")
    return all(passed)


def main(arguments: Sequence[str]) -> int:
    """Run, stop the broker, print."""
    parser = run_parser(__name__, __doc__)
    parser.add_argument("--how", nargs="+", choices=["stop", "kill"], default=["stop", "kill"])
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--at", type=float, default=0.3, help="after which share of the steps")
    parser.add_argument("--compare", action="store_true", help="with an undisturbed run")
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    chosen = parser.parse_args(arguments)
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-outage-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    broker, tag = home / "broker-home", f"{int(time.time()):x}"
    bootstrap = embedded.start(home=broker).bootstrap
    if (own := access.read_login(broker / "broker")) is not None:  # the run looks for a login in its own state directory
        os.environ[VARIABLE] = json.dumps(own.security())
    settings = [*chosen.settings, f"kafka.bootstrap={bootstrap}"]
    try:
        plain = report_of(chosen.config, f"plain-{tag}", settings) if chosen.compare else None
        passed = []
        for how in chosen.how:
            figures = disturbed(how, chosen.config, f"{how}-{tag}", settings, home, outage_s=chosen.away, at=chosen.at)
            passed.append(show(how, figures, outage_s=chosen.away, plain=plain))
        return int(not all(passed))
    finally:
        embedded.stop(broker)
