"""Two rollout workers, then four, then two again: samples per second of each phase, and the delay until a joiner takes effect.

    python -m benchmarks scaling joining
    python -m benchmarks scaling joining --window 30 --set rollout.toy_delay_s=0.1

All workers are real processes in a state directory of their own. The engine is the toy one, whose samples sleep, so that two cores serve
four workers and the pipeline around them is measured. Status 1 if four workers have less than 1.8 times the throughput of two, or reach it
later than 10 s after the second joiner was ready, or if a visible sample was generated again.
"""

import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import duplicate_samples
from benchmarks.support.command import PENSTOCK, failed, own_broker, parser_of, set_words, with_numbers, with_settings
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Start
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable

RATIO_LIMIT = 1.8
DELAY_LIMIT_S = 10.0
START_LIMIT_S = 180.0
UP_WINDOW_S = 4.0
"""Throughput at a moment is the mean over this much time after it: a worker's group takes about a second."""
TOPICS = ("rollouts", "metrics", "ledger", "weights", "dead-letters")
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
workers = {workers}
[trainer]
lr = 1e-9
export = false
[kafka]
partitions = {partitions}
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
        """Read for some seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for record in self._tail.poll(min(left, 0.5), max_records=5000):
                if record.topic.endswith(".rollouts"):
                    self.written.append(record.timestamp_ms / 1000)
                    continue
                try:
                    status = metrics.read(record, run=self.run)[1]
                except Unusable:
                    continue
                if status.role == "rollout" and "startup_s" in status.values:
                    self.ready.setdefault(status.worker, status.time_ns / 1e9)

    def until_ready(self, workers: int) -> None:
        """Read until `workers` rollout workers have been ready. Raises `SystemExit` after a limit."""
        end = time.monotonic() + START_LIMIT_S
        while len(self.ready) < workers:
            if time.monotonic() > end:
                raise SystemExit(f"{len(self.ready)} of {workers} rollout workers are ready after {START_LIMIT_S:g} s")
            self.poll(0.5)

    def measured(self, window_s: float, *, settle_s: float = 0.0) -> float:
        """Samples per second of the next `window_s`, after `settle_s`."""
        self.poll(settle_s)
        began = time.time()
        self.poll(window_s)
        return self.rate(began, time.time())

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


def stop(process: "subprocess.Popen[bytes]", limit_s: float = 120.0) -> int:
    """Send SIGTERM and return the exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    return process.wait(limit_s)


def start_run(
    home: Path, log: KafkaLog, settings: Sequence[str] = (), *, workers: int, partitions: int
) -> "tuple[str, subprocess.Popen[bytes]]":
    """The id and the launcher of a run on the tiny model, once its topics exist. Raises `SystemExit` if it does not start."""
    model, config, run, output = home / "model", home / "scaling.toml", f"scaling-{int(time.time()):x}", home / "run.txt"
    subprocess.run([*PENSTOCK, "model", "tiny", str(model)], check=True, stdout=subprocess.DEVNULL)
    config.write_text(CONFIG.format(model=model, workers=workers, partitions=partitions), encoding="utf-8")
    launcher = start(["run", str(config), "--run-id", run, "--plain", *set_words(settings)], output)
    end = time.monotonic() + START_LIMIT_S
    while None in [log.partitions(f"{run}.{topic}") for topic in TOPICS]:
        if launcher.poll() is not None or time.monotonic() > end:
            stop(launcher)
            raise failed("the run did not start", output)
        time.sleep(0.2)
    return run, launcher


def measure(home: Path, bootstrap: str, settings: Sequence[str], *, window_s: float) -> dict[str, Any]:
    """The figures of one run."""
    log = KafkaLog(bootstrap, client_id="scaling")
    run, launcher = start_run(home, log, settings, workers=2, partitions=16)
    processes = [launcher]
    try:
        watch, follower = Watch(log, run), LedgerFollower(log, run)
        watch.until_ready(2)
        while follower.state.steps < 2 and launcher.poll() is None:  # the first round is not typical
            watch.poll(1.0)
            follower.poll(0.0)
        before = watch.measured(window_s)
        joiners = [start(["worker", "rollout", "--run", run, "--bootstrap", bootstrap], home / f"joiner-{n}.txt") for n in range(2)]
        processes += joiners
        watch.until_ready(4)
        ready = max(watch.ready.values())
        after = watch.measured(window_s, settle_s=DELAY_LIMIT_S)
        statuses = list(map(stop, joiners))
        again = watch.measured(window_s, settle_s=DELAY_LIMIT_S)
        follower.catch_up()
        copies = duplicate_samples.count(duplicate_samples.read_samples(log, run))
        up_s, steps = watch.up_after(ready, after), follower.state.steps
        return {"before": before, "after": after, "again": again, "up_s": up_s, "statuses": statuses, "steps": steps, "copies": copies}
    finally:
        for process in reversed(processes):
            stop(process)
        log.close()


def main(arguments: Sequence[str]) -> int:
    """Run, measure, print."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--window", type=float, default=20.0, help="seconds over which a throughput is measured")
    with_numbers(parser, repeats=1)
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    with own_broker("scaling", chosen.home) as (home, broker):
        rows = [measure(home, broker.bootstrap, chosen.settings, window_s=chosen.window) for _ in range(chosen.repeats)]
    print(f"{'2 workers':>10}{'4 workers':>10}{'ratio':>7}{'up after s':>12}{'2 again':>9}{'steps':>7}{'needless copies':>17}")
    for row in rows:
        numbers = f"{row['before']:>10.1f}{row['after']:>10.1f}{row['after'] / row['before']:>7.2f}{row['up_s']:>12.1f}{row['again']:>9.1f}"
        print(f"{numbers}{row['steps']:>7}{row['copies'].needless:>17}")
        print(f"joiners exited with {row['statuses']}; {row['copies']}")
    ratio, up_s = statistics.median(row["after"] / row["before"] for row in rows), statistics.median(row["up_s"] for row in rows)
    print(
        f"{ratio:.2f} times the samples per second (limit {RATIO_LIMIT:g}), {up_s:.1f} s after the second joiner (limit {DELAY_LIMIT_S:g})"
    )
    needless = sum(row["copies"].needless for row in rows)
    return int(ratio < RATIO_LIMIT or up_s > DELAY_LIMIT_S or needless > 0 or any(any(row["statuses"]) for row in rows))
