"""What the log adds to a turn: many trajectories in flight in one environment worker, whose turns travel through `calls` and `replies`.

    python benchmarks/turn_overhead.py
    python benchmarks/turn_overhead.py --trajectories 200 --pause 1
    python benchmarks/turn_overhead.py --unflushed

Every worker is a real process; the engine is the toy one, which draws as many turns side by side as there are, and the environment only
waits. Overhead is the time from a call until its reply is taken, less the drawing. Where turns come faster than the cores can pass them
on, their queue is the overhead: choose the pause such that turns a second times the CPU of a turn, which is printed, stay well below.
With `--unflushed` turns are not on disk before they are acknowledged, as on a cluster, whose copies stand for that; the embedded broker
otherwise waits for the disk twice a turn, for the call and for the reply. Memory is what the environment worker and its children grow by
while all trajectories are in flight.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from penstock.infra.broker import embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.config.load import from_table
from penstock.pipeline.data.tiny.model import make_tiny_model
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create
from penstock.topics.turns import calls, replies
from penstock.topics.wire.record import Record
from tests.support.bare_clients import c_client

LIMIT_S = 600.0
WAITING = '''
import asyncio, random

class Waiting:
    """Takes its time, evenly from half to one and a half times the pause, and ends by the limit of turns."""

    def __init__(self, pause):
        self.pause = float(pause)

    async def reset(self, **row):
        await asyncio.sleep(random.uniform(0.0, 2.0) * self.pause)
        return "7"

    async def step(self, text):
        await asyncio.sleep(random.uniform(0.5, 1.5) * self.pause)
        return "7", float(len(text) % 2), False
'''


def settings_of(home: Path, bootstrap: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The run as a table of the configuration; one step of one round, so that nothing is trained while turns are taken."""
    (home / "waiting.py").write_text(WAITING)
    return {
        "run": {"steps": 1},
        "model": {"path": str(home / "model")},
        "data": {"source": "tiny:successor", "size": 256, "max_prompt_tokens": 32},
        "environment": {
            "source": f"{home / 'waiting.py'}:Waiting?pause={chosen.pause}", "carrier": "log", "in_flight": chosen.trajectories,
            "processes": 1, "max_turns": chosen.turns, "max_tokens": 64 + chosen.turns * (chosen.tokens + 4),
        },
        "reward": {"functions": ["environment"]},
        "schedule": {"mode": "synchronous", "prompts_per_step": -(-chosen.trajectories // 8), "samples_per_prompt": 8},
        "sampling": {"max_new_tokens": chosen.tokens},
        "algorithm": {"filter_zero_variance": False, "truncated": "train"},
        "rollout": {"engine": "toy", "concurrency": chosen.trajectories, "toy_delay_s": chosen.delay},
        "trainer": {"micro_batch_tokens": 1 << 15, "export": False, "checkpoint_every": 0},
        "kafka": {"bootstrap": bootstrap},
        "mlflow": {"enabled": False},
    }  # fmt: skip


def leave_to_system(bootstrap: str, run: str) -> None:
    """Let the operating system decide when calls and replies go to disk."""
    resources = [
        ConfigResource(
            ConfigResource.Type.TOPIC,
            f"{run}.{topic}",
            incremental_configs=[ConfigEntry("flush.messages", "1000000", incremental_operation=AlterConfigOpType.SET)],
        )
        for topic in ("calls", "replies")
    ]
    admin = AdminClient(c_client(bootstrap))  # whose requests end with it
    for done in admin.incremental_alter_configs(resources).values():
        done.result(30.0)


def memory_of(pid: int) -> int:
    """Resident bytes of a process and its children; pages that they share are counted for each."""
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    process = psutil.Process(pid)
    return sum(one.cpu_times().user + one.cpu_times().system for one in [process, *process.children(recursive=True)])


def records(log: KafkaLog, topic: str) -> list[Record]:
    """All of a topic."""
    tail = log.tail({(topic, partition): "earliest" for partition in range(log.partitions(topic) or 0)})
    found = tail.read_to_end(300.0)
    tail.close()
    return found


def measure(home: Path, chosen: argparse.Namespace) -> dict[str, float]:
    """The figures of one run."""
    directory = make_tiny_model(home / "model", steps=0)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 1 << 16}))
    bootstrap = embedded.start(home=home).bootstrap
    log, run = KafkaLog(bootstrap, client_id="overhead"), f"turns-{int(time.time()):x}"
    create(from_table(settings_of(home, bootstrap, chosen)), log=log, run_id=run, notify=lambda _: None)
    if chosen.unflushed:
        leave_to_system(bootstrap, run)
    common = ["--run", run, "--bootstrap", bootstrap, "--slot", "0"]
    roles = ("environment", "rollout", "scorer", "trainer", "feeder")  # prompts come last, so that memory is that of idle workers before
    with ExitStack() as stack:
        outputs = {role: stack.enter_context((home / f"{role}.txt").open("wb")) for role in roles}
        processes: dict[str, subprocess.Popen[bytes]] = {}

        def start(role: str) -> None:
            free = [str(Path(__file__).with_name("topics_overhead.py")), "--as-trainer"]  # the toy engine's tokens are no model's
            command = [sys.executable, *(free if role == "trainer" else ("-m", "penstock.workers", role)), *common]
            processes[role] = subprocess.Popen(command, stdout=outputs[role], stderr=subprocess.STDOUT)

        try:
            for role in roles[:-1]:
                start(role)
            wait_until(lambda: "environment-0" in load(log, run).workers and load(log, run).versions != {}, processes, home)
            time.sleep(3.0)
            before = peak = memory_of(processes["environment"].pid)
            pids = {**{role: processes[role].pid for role in ("environment", "rollout")}, "broker": embedded.status(home).pid or 0}
            idle = {role: cpu_of(pid) for role, pid in pids.items()}
            spent = dict(idle)
            start("feeder")
            waited = time.monotonic()
            while processes["environment"].poll() is None and time.monotonic() - waited < LIMIT_S:
                view = load(log, run)
                asked = view.workers["environment-0"].values.get("engine_trajectories", 0.0)
                if asked == 0:  # all are in flight, or begin
                    peak = max(peak, memory_of(processes["environment"].pid))
                if view.closed is not None:
                    break
                spent = {role: cpu_of(pid) for role, pid in pids.items()}
                time.sleep(1.0)
            wait_until(lambda: all(process.poll() is not None for process in processes.values()), processes, home)
        finally:
            for process in processes.values():
                process.terminate()
                process.wait(60)
    values = load(log, run).workers["environment-0"].values
    asked_ns = {call.key: call.asked_ns for call in (calls.read(record, run=run)[1] for record in records(log, f"{run}.calls"))}
    drawn = [replies.read(record, run=run)[1] for record in records(log, f"{run}.replies")]
    there = np.array([(reply.started_ns - asked_ns[reply.key]) / 1e6 for reply in drawn])
    span_s = (max(reply.ended_ns for reply in drawn) - min(reply.started_ns for reply in drawn)) / 1e9
    log.close()
    return {
        "turns": len(drawn),
        "turns_per_s": len(drawn) / span_s,
        "overhead_p50_ms": values["engine_overhead_ms_p50"],
        "overhead_p99_ms": values["engine_overhead_ms_p99"],
        "until_drawn_p50_ms": float(np.percentile(there, 50)),
        "until_drawn_p99_ms": float(np.percentile(there, 99)),
        "drawing_p50_ms": float(np.percentile([(reply.ended_ns - reply.started_ns) / 1e6 for reply in drawn], 50)),
        "memory_per_trajectory_kib": (peak - before) / chosen.trajectories / 1024,
        "memory_before_mib": before / 2**20,
        **{f"cpu_ms_per_turn_{role}": 1e3 * (spent[role] - idle[role]) / len(drawn) for role in pids},
    }


def wait_until(holds: Any, processes: dict[str, "subprocess.Popen[bytes]"], home: Path) -> None:
    """Wait until it holds. Raises `SystemExit` when a worker has failed, or it takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        for role, process in processes.items():
            if process.poll():
                raise SystemExit(f"{role} ended with {process.poll()}:\n{(home / f'{role}.txt').read_text()[-3000:]}")
        if time.monotonic() > deadline:
            raise SystemExit("it takes too long")
        time.sleep(0.2)


def main() -> int:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1000, help="in flight at a time")
    parser.add_argument("--turns", type=int, default=8, help="of a trajectory")
    parser.add_argument("--tokens", type=int, default=64, help="of a turn at most; half of them in the mean")
    parser.add_argument("--pause", type=float, default=4.0, help="seconds that the environment takes for a turn, in the mean")
    parser.add_argument("--delay", type=float, default=0.002, help="seconds of the engine's decode step")
    parser.add_argument("--unflushed", action="store_true", help="calls and replies need not be on disk")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turn-overhead-") as name:
        os.environ["PENSTOCK_HOME"] = name
        try:
            figures = measure(Path(name), chosen)
        finally:
            embedded.stop(Path(name))
    print(f"{chosen.trajectories} trajectories in flight, load {os.getloadavg()[0]:.1f}")
    for key, value in figures.items():
        print(f"  {key:<28}{value:>12,.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
