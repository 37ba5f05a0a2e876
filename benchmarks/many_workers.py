"""Many toy rollout workers on one log: they join, and all are restarted one after the other; dead letters, memory and CPU of each.

    python benchmarks/many_workers.py --workers 64

Real processes in a state directory of their own; the engine is the toy one, whose samples sleep. Ends with 1 when a record became a dead
letter, a worker ended with another status than 0, a worker has torch in memory, or the audit finds a violation.
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

import psutil
from command import PENSTOCK
from scaling import CONFIG, START_LIMIT_S, Watch, start, stop

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower

TOPICS = ("rollouts", "metrics", "ledger", "weights", "dead-letters")


def begun(log: KafkaLog, run: str, launcher: "subprocess.Popen[bytes]", said: Path) -> None:
    """Wait until a run's topics are there. Raises `SystemExit` when it does not begin."""
    end = time.monotonic() + START_LIMIT_S
    while None in [log.partitions(f"{run}.{topic}") for topic in TOPICS]:
        if launcher.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the run did not start:\n{said.read_text()[-2000:]}")
        time.sleep(0.2)


def memory_mb(process: psutil.Process) -> tuple[float, float]:
    """(memory of its own, all it maps): what many workers share counts in the second only."""
    held = process.memory_full_info()
    return held.uss / 1e6, held.rss / 1e6


def has_torch(process: psutil.Process) -> bool:
    """Whether torch is loaded."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def measure(home: Path, *, workers: int, at_once: int, window_s: float) -> bool:
    """One run; whether all that is promised held."""
    model, config, run = home / "model", home / "many.toml", f"many-{int(time.time()):x}"
    subprocess.run([*PENSTOCK, "model", "tiny", str(model)], check=True, stdout=subprocess.DEVNULL)
    config.write_text(
        CONFIG.format(model=model).replace("workers = 2", "workers = 1").replace("partitions = 16", f"partitions = {workers}")
    )
    bootstrap = embedded.start(home=home).bootstrap
    launcher, log = start(["run", str(config), "--run-id", run, "--plain"], home / "run.txt"), KafkaLog(bootstrap, client_id="many")

    def worker(slot: int) -> "subprocess.Popen[bytes]":
        return start(["worker", "rollout", "--run", run, "--slot", str(slot), "--bootstrap", bootstrap], home / f"worker-{slot}.txt")

    joined: dict[int, subprocess.Popen[bytes]] = {}
    try:
        begun(log, run, launcher, home / "run.txt")
        watch, control = Watch(log, run), LedgerFollower(log, run)
        watch.until_ready(1)
        began = time.monotonic()
        for slot in range(1, workers):
            joined[slot] = worker(slot)
            if slot % at_once == 0:
                watch.until_ready(slot + 1)
        watch.until_ready(workers)
        print(f"{workers} workers ready after {time.monotonic() - began:.0f} s", flush=True)
        processes = [psutil.Process(process.pid) for process in joined.values()]
        spent = [sum(process.cpu_times()[:2]) for process in processes]
        watch.poll(window_s)
        cores = [(sum(process.cpu_times()[:2]) - before) / window_s for process, before in zip(processes, spent, strict=True)]
        own, mapped = zip(*(memory_mb(process) for process in processes), strict=True)
        torch = sum(map(has_torch, processes))
        shared = f"with what is shared {statistics.median(mapped):.0f} MB"
        print(f"memory of its own {statistics.median(own):.0f} MB ({max(own):.0f} at most), {shared}")
        print(f"CPU {statistics.median(cores):.3f} cores a worker, {sum(cores):.2f} in all; {torch} have torch in memory", flush=True)
        control.catch_up()
        steps, restarting, statuses = control.state.steps, time.monotonic(), list[int]()
        slots = sorted(joined)
        for first in range(0, len(slots), at_once):
            part = slots[first : first + at_once]
            statuses += [stop(joined[slot], signal.SIGTERM) for slot in part]
            watch.ready.clear()
            joined |= {slot: worker(slot) for slot in part}
            watch.until_ready(len(part))
        control.catch_up()
        took, made = time.monotonic() - restarting, control.state.steps - steps
        print(f"rolling restart {took:.0f} s, {made} steps meanwhile, statuses {set(statuses)}", flush=True)
        statuses += [stop(process, signal.SIGTERM) for process in (*joined.values(), launcher)][:-1]
        letters = log.end_offsets([(f"{run}.dead-letters", 0)])[f"{run}.dead-letters", 0]
        audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", bootstrap], capture_output=True, text=True, check=False)
        print(f"{letters} dead letters; {(audit.stdout or audit.stderr).strip().splitlines()[-1]}")
        return not (letters or torch or any(statuses) or audit.returncode)
    finally:
        for process in (*joined.values(), launcher):
            stop(process, signal.SIGTERM)
        log.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=8, help="workers that are started, or restarted, side by side")
    parser.add_argument("--window", type=float, default=20.0, help="seconds over which CPU is taken")
    chosen = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="penstock-many-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        return int(not measure(home, workers=chosen.workers, at_once=chosen.at_once, window_s=chosen.window))
    finally:
        embedded.stop(home)


if __name__ == "__main__":
    sys.exit(main())
