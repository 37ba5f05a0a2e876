"""The broker goes away for a minute in mid-run and comes back: who ended, who grew, and how soon the run went on.

    python benchmarks/outage.py examples/exact.toml --away 60 --how stop kill --compare --set run.steps=160

Each way a whole run: `stop` freezes the broker (SIGSTOP, then SIGCONT), `kill` ends it (SIGKILL) and starts it again after that time.
The broker is one of its own, so that nobody else starts it again. Limits: no worker ends, none grows by more than 200 MB, the first
new sample, group and step are there within 10 s of the broker's return; with --compare the weights equal those of an undisturbed run.
Ends with 1 when one is not kept.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from command import PENSTOCK, launched

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Start

GROWTH_LIMIT_MB, BACK_LIMIT_S, START_LIMIT_S = 200.0, 10.0, 300.0
HEARD_BEFORE_S = 2.0
FOLLOWED = {"rollouts": "sample", "groups": "group", "ledger": "step"}


@dataclass(slots=True)
class Follower:
    """Sees a run's records arrive."""

    log: KafkaLog
    run: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FOLLOWED, 0))
    arrived: dict[str, float] = field(default_factory=dict)
    """When the first record of each topic came since `mark`, on the monotonic clock."""
    closed: bool = False

    def __post_init__(self) -> None:
        self.log.wait_out(3600.0)
        deadline = time.monotonic() + START_LIMIT_S
        while not all(self.log.partitions(f"{self.run}.{topic}") for topic in FOLLOWED):
            if time.monotonic() > deadline:
                raise SystemExit(f"run {self.run} has not begun within {START_LIMIT_S:.0f} s")
            time.sleep(0.2)
        counts = {topic: self.log.partitions(f"{self.run}.{topic}") or 0 for topic in FOLLOWED}
        starts: dict[tuple[str, int], Start] = {
            (f"{self.run}.{topic}", partition): "earliest" for topic, count in counts.items() for partition in range(count)
        }
        self._tail = self.log.tail(starts)

    _tail: Any = None

    def look(self, wait_s: float) -> None:
        """Take note of what arrives within `wait_s`."""
        for record in self._tail.poll(wait_s):
            topic = record.topic.removeprefix(f"{self.run}.")
            kind = (record.key or b"").decode()
            self.closed = self.closed or (topic == "ledger" and kind == "run-closed")
            if topic != "ledger" or kind == "step":
                self.counts[topic] += 1
                self.arrived.setdefault(topic, time.monotonic())

    def mark(self) -> None:
        """From here on arrivals count as new."""
        self.arrived.clear()


@dataclass(slots=True)
class Workers:
    """The run's worker processes: who is gone, and how large they became."""

    pids: dict[str, int]
    before: dict[str, float]
    during: dict[str, float] = field(default_factory=dict)
    overall: dict[str, float] = field(default_factory=dict)
    exited: dict[str, float] = field(default_factory=dict)
    """When each was found to be gone."""

    @classmethod
    def of(cls, directory: Path) -> "Workers":
        """Those that run now."""
        pids = json.loads((directory / "workers.json").read_text())["workers"]
        return cls(pids, {name: size for name, pid in pids.items() if (size := rss_mb(pid)) is not None})

    def look(self, *, away: bool) -> None:
        """Note sizes and who ended."""
        for name, pid in self.pids.items():
            size = rss_mb(pid)
            if size is None:
                self.exited.setdefault(name, time.monotonic())
                continue
            grown = size - self.before.get(name, size)
            self.overall[name] = max(self.overall.get(name, 0.0), grown)
            if away:
                self.during[name] = max(self.during.get(name, 0.0), grown)

    def run_is_over(self) -> None:
        """Those that have just gone had heard of the run's end before us."""
        now = time.monotonic()
        self.exited = {name: when for name, when in self.exited.items() if now - when > HEARD_BEFORE_S}


def rss_mb(pid: int) -> float | None:
    """Resident megabytes of a process; None when it is gone."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.memory_info().rss / 1e6
    except psutil.NoSuchProcess:
        return None


def undisturbed(config: str, run: str, settings: Sequence[str], home: Path) -> dict[str, Any]:
    """The report of a run nothing happens to. Raises `SystemExit` with the run's own words when it fails."""
    with launched(config, run, settings, home / f"{run}.txt") as process:
        process.wait()
    return report_of(run, home, process.returncode)


def report_of(run: str, home: Path, status: int) -> dict[str, Any]:
    """A finished run's report."""
    if status:
        raise SystemExit(f"run {run} ended with {status}: {(home / f'{run}.txt').read_text()[-2000:]}")
    report: dict[str, Any] = json.loads((home / "runs" / run / "report.json").read_text())
    return report


def take_away(how: str, broker: Path, away_s: float, follower: Follower, workers: Workers) -> tuple[float, float]:
    """Keep the broker away for `away_s`; returns when it served again, and how long its start took."""
    pid = embedded.status(broker).pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    until = time.monotonic() + away_s
    while (left := until - time.monotonic()) > 0:
        follower.look(min(0.5, left))
        workers.look(away=True)
    follower.mark()
    if how == "stop":
        os.kill(pid, signal.SIGCONT)
        return time.monotonic(), 0.0
    started_s = embedded.start(home=broker).started_s or 0.0
    return time.monotonic(), started_s


def disturbed(how: str, config: str, run: str, settings: Sequence[str], home: Path, *, away_s: float, at: float) -> dict[str, Any]:
    """One run with an outage after the share `at` of its steps; returns what was measured."""
    broker = home / "broker-home"
    with launched(config, run, settings, home / f"{run}.txt") as process:
        follower = Follower(KafkaLog(embedded.status(broker).bootstrap, client_id="outage"), run)
        config_file = home / "runs" / run / "config.json"
        while not config_file.exists() and process.poll() is None:  # the topics are there before it
            time.sleep(0.1)
        steps = json.loads(config_file.read_text())["run"]["steps"]
        while follower.counts["ledger"] < at * steps and process.poll() is None:
            follower.look(0.5)
        if process.poll() is not None:
            raise SystemExit(f"run {run} ended before the outage: {(home / f'{run}.txt').read_text()[-2000:]}")
        workers, before = Workers.of(home / "runs" / run), dict(follower.counts)
        returned, started_s = take_away(how, broker, away_s, follower, workers)
        while not follower.closed and process.poll() is None:
            follower.look(0.2)
            if not follower.closed:
                workers.look(away=False)
        workers.run_is_over()
        process.wait()
    follower.log.close()
    report = report_of(run, home, process.returncode)
    audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", follower.log.bootstrap], capture_output=True, text=True, check=False)
    said = {name: (home / "runs" / run / "logs" / f"{name}.log").read_text().count("answers again, after") for name in workers.pids}
    return {
        "back_s": {FOLLOWED[topic]: max(0.0, when - returned) for topic, when in follower.arrived.items()},
        "started_s": started_s, "before": before, "workers": workers, "report": report, "audit": audit.returncode, "said": said,
    }  # fmt: skip


def show(how: str, found: dict[str, Any], *, away_s: float, plain: dict[str, Any] | None) -> bool:
    """Print what one run has shown; whether every limit was kept."""
    workers, report, back = found["workers"], found["report"], found["back_s"]
    print(f"\n{how}: the broker was away for {away_s:g} s after {found['before']['ledger']} of {report['steps']} steps")
    if how == "kill":
        print(f"  its start took {found['started_s']:.1f} s")
    print(f"  workers that ended: {len(workers.exited)} {' '.join(workers.exited)}")
    print(f"  said that it is back: {json.dumps(found['said'])}")
    for topic in FOLLOWED.values():
        print(f"  first new {topic} {back[topic]:.1f} s after its return" if topic in back else f"  no new {topic}")
    print(f"  {'MB grown':<14}{'outage':>8}{'until the end':>15}")
    for name in sorted(workers.pids):
        print(f"  {name:<14}{workers.during.get(name, 0.0):>8.1f}{workers.overall.get(name, 0.0):>15.1f}")
    print(f"  audit: exit {found['audit']}; groups {json.dumps(report['groups'])}")
    kept = [not workers.exited, len(back) == len(FOLLOWED), max(back.values(), default=0.0) <= BACK_LIMIT_S, found["audit"] == 0]
    kept.append(max(workers.overall.values(), default=0.0) <= GROWTH_LIMIT_MB)
    if plain is not None:
        kept.append(report["weights"]["digest"] == plain["weights"]["digest"] and report["groups"] == plain["groups"])
        print(f"  digest {report['weights']['digest'][:16]}…, undisturbed {plain['weights']['digest'][:16]}…")
    print(f"  {'every limit is kept' if all(kept) else 'A LIMIT IS NOT KEPT'}")
    return all(kept)


def main() -> int:
    """Run, take the broker away, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--how", nargs="+", choices=["stop", "kill"], default=["stop", "kill"])
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--at", type=float, default=0.3, help="after which share of the steps")
    parser.add_argument("--compare", action="store_true", help="with an undisturbed run")
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-outage-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the run and its broker are ended
    broker, tag = home / "broker-home", f"{int(time.time()):x}"
    bootstrap = embedded.start(home=broker).bootstrap
    settings = [word for setting in [*chosen.settings, f"kafka.bootstrap={bootstrap}"] for word in ("--set", setting)]
    try:
        plain = undisturbed(chosen.config, f"plain-{tag}", settings, home) if chosen.compare else None
        kept = []
        for how in chosen.how:
            found = disturbed(how, chosen.config, f"{how}-{tag}", settings, home, away_s=chosen.away, at=chosen.at)
            kept.append(show(how, found, away_s=chosen.away, plain=plain))
        return int(not all(kept))
    finally:
        embedded.stop(broker)


if __name__ == "__main__":
    sys.exit(main())
