"""Many toy rollout workers on one run: joining, a rolling restart of all, dead letters, memory and CPU of each.

    python -m benchmarks scaling many_workers --workers 64

All workers are real processes in a state directory of their own; the engine is the toy one, whose samples sleep. Status 1 if a record
became a dead letter, a worker exited with another status than 0, a worker has torch in memory, or the audit finds a violation.
"""

import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.scaling.joining import Watch, start, start_run, stop
from benchmarks.support.command import PENSTOCK, own_broker, parser_of, with_numbers
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower


def memory_mb(process: psutil.Process) -> tuple[float, float]:
    """(memory of its own, all it maps): memory shared by workers counts in the second only."""
    memory = process.memory_full_info()
    return memory.uss / 1e6, memory.rss / 1e6


def has_torch(process: psutil.Process) -> bool:
    """True if torch is loaded."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def measure(home: Path, bootstrap: str, *, workers: int, at_once: int, window_s: float) -> bool:
    """One run; True if no limit was missed."""
    log = KafkaLog(bootstrap, client_id="many")
    run, launcher = start_run(home, log, workers=1, partitions=workers)
    joined: dict[int, subprocess.Popen[bytes]] = {}

    def join(slot: int) -> None:
        joined[slot] = start(
            ["worker", "rollout", "--run", run, "--slot", str(slot), "--bootstrap", bootstrap], home / f"worker-{slot}.txt"
        )

    try:
        watch, follower = Watch(log, run), LedgerFollower(log, run)
        watch.until_ready(1)
        began = time.monotonic()
        for slot in range(1, workers):
            join(slot)
            if slot % at_once == 0:
                watch.until_ready(slot + 1)
        watch.until_ready(workers)
        print(f"{workers} workers ready after {time.monotonic() - began:.0f} s", flush=True)
        running = [psutil.Process(process.pid) for process in joined.values()]
        spent = [sum(process.cpu_times()[:2]) for process in running]
        watch.poll(window_s)
        cores = [(sum(process.cpu_times()[:2]) - before) / window_s for process, before in zip(running, spent, strict=True)]
        own, mapped = zip(*map(memory_mb, running), strict=True)
        torch = sum(map(has_torch, running))
        shared = f"with shared memory {statistics.median(mapped):.0f} MB"
        print(f"memory of its own {statistics.median(own):.0f} MB ({max(own):.0f} at most), {shared}")
        print(f"CPU {statistics.median(cores):.3f} cores a worker, {sum(cores):.2f} in all; {torch} have torch in memory", flush=True)
        follower.catch_up()
        steps, restarting, statuses = follower.state.steps, time.monotonic(), list[int]()
        slots = sorted(joined)
        for first in range(0, len(slots), at_once):
            part = slots[first : first + at_once]
            statuses += [stop(joined[slot]) for slot in part]
            watch.ready.clear()
            for slot in part:
                join(slot)
            watch.until_ready(len(part))
        follower.catch_up()
        took = time.monotonic() - restarting
        print(f"rolling restart {took:.0f} s, {follower.state.steps - steps} steps meanwhile, statuses {set(statuses)}", flush=True)
        statuses += [stop(process) for process in (*joined.values(), launcher)][:-1]
        dead_letters = log.end_offsets([(f"{run}.dead-letters", 0)])[f"{run}.dead-letters", 0]
        audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", bootstrap], capture_output=True, text=True, check=False)
        print(f"{dead_letters} dead letters; {(audit.stdout or audit.stderr).strip().splitlines()[-1]}")
        return not (dead_letters or torch or any(statuses) or audit.returncode)
    finally:
        for process in (*joined.values(), launcher):
            stop(process)
        log.close()


def main(arguments: Sequence[str]) -> int:
    """Run, measure, print."""
    parser = parser_of(__name__, __doc__)
    with_numbers(parser, workers=64)
    parser.add_argument("--at-once", type=int, default=8, help="workers that start, or restart, together")
    parser.add_argument("--window", type=float, default=20.0, help="seconds over which CPU is measured")
    chosen = parser.parse_args(arguments)
    with own_broker("many") as (home, broker):
        return int(not measure(home, broker.bootstrap, workers=chosen.workers, at_once=chosen.at_once, window_s=chosen.window))
