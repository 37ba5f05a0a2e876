"""Two rollout workers, then four, then two again: samples per second before, after, and how soon a joiner shows.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --window 30 --set rollout.toy_delay_s=0.1

Everything is a real process in a state directory of its own. The engine is the toy one, whose samples sleep, so that two cores serve
four workers and what is measured is the pipeline around them. Ends with 1 when four workers bring less than 1.8 times the throughput of
two, or later than 10 s after the second joiner was ready, or when a sample was drawn although it was there.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duplicate_samples
from command import PENSTOCK

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Start
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable

LEAST_RATIO = 1.8
LONGEST_S = 10.0
START_LIMIT_S = 180.0
UP_WINDOW_S = 4.0
"""Throughput at a moment is the mean over this much time after it: a worker's group takes about a second."""

CONFIG = """
[run]
steps = 20000
[model]
path = "{model}"
[data]
source = "tiny:successor"
size = 512
[schedule]
mode = "one_step_off"
prompts_per_step = 32
samples_per_prompt = 4
[sampling]
max_new_tokens = 16
[algorithm]
filter_zero_variance = false
[rollout]
engine = "toy"
toy_delay_s = 0.06
workers = 2
[trainer]
lr = 1e-9
export = false
[kafka]
partitions = 16
[mlflow]
enabled = false
"""


class Watch:
    """When each sample was written and when each worker was ready."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self.run = run
        self.written: list[float] = []
        self.ready: dict[str, float] = {}
        starts: dict[tuple[str, int], Start] = {(f"{run}.rollouts", p): "earliest" for p in range(log.partitions(f"{run}.rollouts") or 0)}
        self._tail = log.tail({**starts, (f"{run}.metrics", 0): "earliest"})

    def poll(self, seconds: float) -> None:
        """Read for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for record in self._tail.poll(min(left, 0.5), max_records=5000):
                if record.topic.endswith(".rollouts"):
                    self.written.append(record.timestamp_ms / 1000)
                    continue
                try:
                    found = metrics.read(record, run=self.run)[1]
                except Unusable:
                    continue
                if found.role == "rollout" and "startup_s" in found.values:
                    self.ready.setdefault(found.worker, found.time_ns / 1e9)

    def until_ready(self, workers: int) -> None:
        """Read until so many rollout workers have been ready. Raises `SystemExit` when they are not in time."""
        end = time.monotonic() + START_LIMIT_S
        while len(self.ready) < workers:
            if time.monotonic() > end:
                raise SystemExit(f"{len(self.ready)} of {workers} rollout workers are ready after {START_LIMIT_S:g} s")
            self.poll(0.5)

    def rate(self, since: float, until: float) -> float:
        """Samples per second written from one moment to another."""
        return sum(since <= at < until for at in self.written) / (until - since)

    def up_after(self, ready: float, rate: float) -> float:
        """Seconds from `ready` until the throughput reached 90 % of `rate`."""
        last = max(self.written, default=ready)
        moment = ready
        while self.rate(moment, moment + UP_WINDOW_S) < 0.9 * rate and moment < last:
            moment += 0.25
        return moment - ready


def start(arguments: Sequence[str], output: Path) -> "subprocess.Popen[bytes]":
    """A `penstock` process with its output in a file."""
    with output.open("wb") as file:
        return subprocess.Popen([*PENSTOCK, *arguments], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: "subprocess.Popen[bytes]", number: signal.Signals, limit_s: float = 120.0) -> int:
    """End a process in an orderly way and return its exit status."""
    if process.poll() is None:
        process.send_signal(number)
    return process.wait(limit_s)


def measure(home: Path, settings: Sequence[str], *, window_s: float) -> dict[str, Any]:
    """The figures of one run with joiners and leavers."""
    model, config, run = home / "model", home / "scaling.toml", f"scaling-{int(time.time()):x}"
    subprocess.run([*PENSTOCK, "model", "tiny", str(model)], check=True, stdout=subprocess.DEVNULL)
    config.write_text(CONFIG.format(model=model), encoding="utf-8")
    bootstrap = embedded.start(home=home).bootstrap
    processes = [start(["run", str(config), "--run-id", run, "--plain", *settings], home / "run.txt")]
    log = KafkaLog(bootstrap, client_id="scaling")
    try:
        end = time.monotonic() + START_LIMIT_S
        while None in [log.partitions(f"{run}.{topic}") for topic in ("rollouts", "metrics", "ledger", "weights")]:
            if processes[0].poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the run did not start:\n{(home / 'run.txt').read_text()[-2000:]}")
            time.sleep(0.2)
        watch, control = Watch(log, run), LedgerFollower(log, run)
        watch.until_ready(2)
        while control.state.steps < 2 and processes[0].poll() is None:  # the first round is not typical
            watch.poll(1.0)
            control.poll(0.0)
        began = time.time()
        watch.poll(window_s)
        before = watch.rate(began, time.time())
        joiners = [start(["worker", "rollout", "--run", run, "--bootstrap", bootstrap], home / f"joiner-{n}.txt") for n in range(2)]
        processes += joiners
        watch.until_ready(4)
        ready = max(watch.ready.values())
        watch.poll(LONGEST_S)
        began = time.time()
        watch.poll(window_s)
        after = watch.rate(began, time.time())
        left = time.time()
        statuses = [stop(joiner, signal.SIGTERM) for joiner in joiners]
        watch.poll(LONGEST_S)
        began = time.time()
        watch.poll(window_s)
        again = watch.rate(began, time.time())
        control.catch_up()
        drawn = duplicate_samples.count(duplicate_samples.read_drawn(log, run))
        return {
            "before": before,
            "after": after,
            "again": again,
            "up_s": watch.up_after(ready, after),
            "left_s": watch.up_after(left, again),
            "statuses": statuses,
            "steps": control.state.steps,
            "copies": drawn,
        }
    finally:
        for process in reversed(processes):
            stop(process, signal.SIGTERM)
        log.close()


def main() -> int:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--window", type=float, default=20.0, help="seconds over which a throughput is taken")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-scaling-"))
    home.mkdir(parents=True, exist_ok=True)
    os.environ["PENSTOCK_HOME"] = str(home)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    settings = [word for setting in chosen.settings for word in ("--set", setting)]
    try:
        found = [measure(home, settings, window_s=chosen.window) for _ in range(chosen.repeats)]
    finally:
        embedded.stop(home)
    print(f"{'2 workers':>10}{'4 workers':>10}{'ratio':>7}{'up after s':>12}{'2 again':>9}{'steps':>7}{'needless copies':>17}")
    for one in found:
        numbers = f"{one['before']:>10.1f}{one['after']:>10.1f}{one['after'] / one['before']:>7.2f}{one['up_s']:>12.1f}{one['again']:>9.1f}"
        print(f"{numbers}{one['steps']:>7}{one['copies'].needless:>17}")
        print(f"joiners left with status {one['statuses']}; {one['copies']}")
    ratio = statistics.median(one["after"] / one["before"] for one in found)
    up_s = statistics.median(one["up_s"] for one in found)
    print(f"{ratio:.2f} times the samples per second (at least {LEAST_RATIO:g} is asked),", end=" ")
    print(f"{up_s:.1f} s after the second joiner was ready (at most {LONGEST_S:g})")
    needless = sum(one["copies"].needless for one in found)
    return int(ratio < LEAST_RATIO or up_s > LONGEST_S or needless > 0 or any(any(one["statuses"]) for one in found))


if __name__ == "__main__":
    sys.exit(main())
