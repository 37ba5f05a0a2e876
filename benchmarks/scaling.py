"""Toy rollout workers that join a run, restart in turn and leave: samples per second, delays, memory and CPU, duplicates, dead letters.

    python -m benchmarks scaling
    python -m benchmarks scaling --workers 64 --least-ratio 0

The run starts with two workers. All workers are real processes in a state directory of their own; the engine is the toy one, whose samples
sleep, so that two cores serve several workers and the pipeline around them is measured. Status 1 if the throughput grows by less than
`--least-ratio`, or later than 10 s after the last joiner was ready, if a visible sample was generated again, a record became a dead
letter, a worker exited with another status than 0 or has torch in memory, or the audit finds a violation.
"""

import argparse
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.support import duplicate_samples
from benchmarks.support.command import PENSTOCK, failed, own_broker, parser_of, set_words, with_numbers, with_settings
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Start
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable

FIRST = 2
"""Workers that the launcher starts."""
DELAY_LIMIT_S = 10.0
START_LIMIT_S = 180.0
UP_WINDOW_S = 4.0
"""Throughput at a moment is the mean over this much time after it: a worker's group takes about a second."""
TOPICS = ("rollouts", "metrics", "ledger", "weights", "dead-letters")
CONFIG = """
run = {{ steps = 20000 }}
model = {{ path = "{model}" }}
data = {{ source = "tiny:successor", size = 512 }}
schedule = {{ mode = "one_step_off", prompts_per_step = 32, samples_per_prompt = 4 }}
sampling = {{ max_new_tokens = 16 }}
algorithm = {{ filter_zero_variance = false }}
rollout = {{ engine = "toy", toy_delay_s = 0.06, workers = {workers} }}
trainer = {{ lr = 1e-9, export = false }}
kafka = {{ partitions = {partitions} }}
mlflow = {{ enabled = false }}
"""


class Watch:
    """When each sample was written and when each worker was ready."""

    def __init__(self, log: KafkaLog, run: str) -> None:
        self.run = run
        self.written: list[float] = []
        self.ready: dict[str, float] = {}
        self._since_ns = 0
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
                if status.role == "rollout" and "startup_s" in status.values and status.time_ns >= self._since_ns:
                    self.ready.setdefault(status.worker, status.time_ns / 1e9)

    def expect_restart(self) -> None:
        """Count only workers that are ready after now."""
        self._since_ns = time.time_ns()
        self.ready.clear()

    def until_ready(self, workers: int) -> None:
        """Read until `workers` rollout workers have been ready. Raises `SystemExit` after a limit."""
        end = time.monotonic() + START_LIMIT_S
        while len(self.ready) < workers:
            if time.monotonic() > end:
                raise SystemExit(f"{len(self.ready)} of {workers} rollout workers are ready after {START_LIMIT_S:g} s")
            self.poll(0.5)

    def measured(self, window_s: float) -> float:
        """Samples per second of the next `window_s`."""
        started = time.time()
        self.poll(window_s)
        return self.rate(started, time.time())

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


def start_run(home: Path, log: KafkaLog, chosen: argparse.Namespace) -> "tuple[str, subprocess.Popen[bytes]]":
    """The id and the launcher of a run on the tiny model, once its topics exist. Raises `SystemExit` if it does not start."""
    model, config, run, output = home / "model", home / "scaling.toml", f"scaling-{int(time.time()):x}", home / "run.txt"
    subprocess.run([*PENSTOCK, "model", "tiny", str(model)], check=True, stdout=subprocess.DEVNULL)
    config.write_text(CONFIG.format(model=model, workers=FIRST, partitions=max(16, chosen.workers)), encoding="utf-8")
    launcher = start(["run", str(config), "--run-id", run, "--plain", *set_words(chosen.settings)], output)
    end = time.monotonic() + START_LIMIT_S
    while None in [log.partitions(f"{run}.{topic}") for topic in TOPICS]:
        if launcher.poll() is not None or time.monotonic() > end:
            stop(launcher)
            raise failed("the run did not start", output)
        time.sleep(0.2)
    return run, launcher


def show_processes(running: Sequence[psutil.Process], watch: Watch, window_s: float) -> int:
    """Print memory and CPU of the joiners over a window; returns how many have torch in memory."""
    spent = [sum(process.cpu_times()[:2]) for process in running]
    watch.poll(window_s)
    cores = [(sum(process.cpu_times()[:2]) - before) / window_s for process, before in zip(running, spent, strict=True)]
    memory = [process.memory_full_info() for process in running]
    own, mapped = [each.uss / 1e6 for each in memory], [each.rss / 1e6 for each in memory]
    torch = sum("libtorch" in Path(f"/proc/{process.pid}/maps").read_text() for process in running)
    print(f"memory of its own {statistics.median(own):.0f} MB ({max(own):.0f} at most), with shared {statistics.median(mapped):.0f} MB")
    print(f"CPU {statistics.median(cores):.3f} cores a worker, {sum(cores):.2f} in all; {torch} have torch in memory", flush=True)
    return torch


def measure(home: Path, bootstrap: str, chosen: argparse.Namespace) -> bool:
    """One run; True if no limit was missed."""
    log = KafkaLog(bootstrap, client_id="scaling")
    run, launcher = start_run(home, log, chosen)
    joined: dict[int, subprocess.Popen[bytes]] = {}
    statuses: list[int] = []

    def join(slots: Sequence[int]) -> None:
        for slot in slots:
            words = ["worker", "rollout", "--run", run, "--slot", str(slot), "--bootstrap", bootstrap]
            joined[slot] = start(words, home / f"worker-{slot}.txt")

    try:
        watch, follower = Watch(log, run), LedgerFollower(log, run)
        watch.until_ready(FIRST)
        while follower.state.steps < 2 and launcher.poll() is None:  # the first round is not typical
            watch.poll(1.0)
            follower.poll(0.0)
        before, started = watch.measured(chosen.window), time.monotonic()
        slots = range(FIRST, chosen.workers)
        batches = [slots[first : first + chosen.at_once] for first in range(0, len(slots), chosen.at_once)]
        for batch in batches:
            join(batch)
            watch.until_ready(batch[-1] + 1)
        print(f"{chosen.workers} workers ready after {time.monotonic() - started:.0f} s", flush=True)
        ready = max(watch.ready.values())
        watch.poll(DELAY_LIMIT_S)
        after = watch.measured(chosen.window)
        up_s = watch.up_after(ready, after)
        print(f"{before:.1f} -> {after:.1f} samples/s, {after / before:.2f} times, {up_s:.1f} s after the last joiner", flush=True)
        torch = show_processes([psutil.Process(process.pid) for process in joined.values()], watch, chosen.window)
        follower.catch_up()
        steps, started = follower.state.steps, time.monotonic()
        for batch in batches:
            statuses += [stop(joined[slot]) for slot in batch]
            watch.expect_restart()
            join(batch)
            watch.until_ready(chosen.workers)
        follower.catch_up()
        print(f"rolling restart {time.monotonic() - started:.0f} s, {follower.state.steps - steps} steps meanwhile", flush=True)
        statuses += [stop(process) for process in joined.values()]
        watch.poll(DELAY_LIMIT_S)
        print(f"{FIRST} workers again: {watch.measured(chosen.window):.1f} samples/s; joiners exited with {set(statuses)}", flush=True)
        stop(launcher)
        copies = duplicate_samples.count(duplicate_samples.read_samples(log, run))
        dead_letters = log.end_offsets([(f"{run}.dead-letters", 0)])[f"{run}.dead-letters", 0]
        audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", bootstrap], capture_output=True, text=True, check=False)
        print(f"{copies}; {dead_letters} dead letters; {(audit.stdout or audit.stderr).strip().splitlines()[-1]}")
        in_time = after >= chosen.least_ratio * before and up_s <= DELAY_LIMIT_S
        return in_time and not (copies.needless or dead_letters or torch or any(statuses) or audit.returncode)
    finally:
        for process in (*joined.values(), launcher):
            stop(process)
        log.close()


def main(arguments: Sequence[str]) -> int:
    """Measure; 1 if a limit is missed."""
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--at-once", type=int, default=8, help="workers that start, or restart, together")
    parser.add_argument("--window", type=float, default=20.0, help="seconds over which throughput and CPU are measured")
    with_numbers(parser, workers=4, least_ratio=1.8)
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    with_settings(parser)
    chosen = parser.parse_args(arguments)
    with own_broker("scaling", chosen.home) as (home, broker):
        return int(not measure(home, broker.bootstrap, chosen))
