"""Disturbs a cluster of three brokers 20 times in one run, then loses acknowledged records in a second run.

    python -m benchmarks cluster_chaos examples/exact.toml --set run.steps=120

First run: nodes are killed, frozen and restarted one after the other, and one partition, the ledger, is led by a replica that was not in
sync, while no record had been acknowledged without it: the run must finish with a clean audit. Second run: the ledger acknowledges
entries that a single replica has (min.insync.replicas = 1), and such an election loses them: the run must stop and name the offset of
the lost record. Status 1 if a run does not. Nodes are processes on this machine.
"""

import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from benchmarks.support.command import PENSTOCK, launched, run_parser, with_numbers
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower
from tests.support.three_brokers import NODES, ThreeBrokers

SOON_S = 2.0
PROGRESS_LIMIT_S = 180.0
LOST = re.compile(r"\S+ has lost records: offset \d+ was acknowledged|\S+: offset \d+ is missing, it holds \d+ to \d+: .*lost by a broker")
"""Message of the writer or of the reader that detects the loss first."""


@dataclass(slots=True)
class Disturber:
    """Disturbs the cluster and measures the time until the run commits its next step."""

    cluster: ThreeBrokers
    run: str
    process: "subprocess.Popen[bytes]"
    rng: random.Random
    follower: LedgerFollower
    done: list[tuple[str, float | None]] = field(default_factory=list)
    """Disturbances, each with the seconds until the next step; None if the next disturbance came first."""

    @property
    def steps(self) -> int:
        """Committed steps read so far."""
        self.follower.poll(0.0)
        return self.follower.state.steps

    def kill(self) -> str:
        """Send SIGKILL to one node and start it again some seconds later."""
        node, down_s = self.rng.choice(NODES), self.rng.uniform(0.5, 6.0)
        self.cluster.kill(node)
        self._follow(down_s)
        self.cluster.start()
        return f"node {node} killed, down for {down_s:.1f} s"

    def freeze(self) -> str:
        """Send SIGSTOP to one node, and SIGCONT some seconds later."""
        node, frozen_s = self.rng.choice(NODES), self.rng.uniform(1.0, 9.0)
        self.cluster.freeze(node)
        self._follow(frozen_s)
        self.cluster.thaw(node)
        return f"node {node} frozen for {frozen_s:.1f} s"

    def roll(self) -> str:
        """Restart each node in turn, as an upgrade does; the next one when all replicas are in sync again."""
        for node in NODES:
            self.cluster.stop(node)
            self.cluster.start()
            self.cluster.await_in_sync(f"{self.run}.ledger", 0, set(NODES))
        return "rolling restart of all nodes"

    def elect(self, *, lone: bool = False) -> str:
        """Make a replica that is not in sync the leader of the ledger; with `lone`, entries were acknowledged without it."""
        topic = f"{self.run}.ledger"
        leader, late = self.rng.sample(NODES, 2)
        self._replicas(topic, [leader, late])
        if lone:
            self._acknowledged_by_one(topic)
        self.cluster.kill(late)
        self.cluster.await_in_sync(topic, 0, {leader})
        steps = self.steps
        if lone:
            self._until(lambda: self.steps >= steps + 3)
        self.cluster.kill(leader)
        self.cluster.launch(late)
        self.cluster.elect_unclean(topic, 0, late)
        self.cluster.start()
        if not lone:
            self._replicas(topic, [late, *(node for node in NODES if node != late)])
        return f"node {late} leads the ledger, although not in sync"

    def measured(self, disturb: Callable[[], str], *, due: int, soon: bool) -> None:
        """Disturb when `due` steps are committed, then wait for a step, or with `soon` at most two seconds."""
        self._until(lambda: self.steps >= due)
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended before its disturbances: status {self.process.returncode}")
        what = disturb()
        started, steps = time.monotonic(), self.steps
        if soon:
            self._follow(self.rng.uniform(0.0, SOON_S))
        else:
            self._until(lambda: self.steps > steps)
        self.done.append((what, None if soon else time.monotonic() - started))
        print(f"{time.strftime('%H:%M:%S')} {len(self.done):>3}. {what}; step {self.steps}", flush=True)

    def _replicas(self, topic: str, nodes: Sequence[int]) -> None:
        """Assign the partition to these nodes; the first one leads."""
        with self.cluster.admin() as admin:
            admin.alter_partition_reassignments({TopicPartition(topic, 0): list(nodes)})
        self.cluster.wait(lambda: list(self.cluster.partition(topic, 0)["replica_nodes"]) == list(nodes), f"{topic} lies on {nodes}")
        self.cluster.await_in_sync(topic, 0, set(nodes))
        with self.cluster.admin() as admin:
            admin.elect_leaders(0, {topic: [0]}, raise_errors=False)
        self.cluster.wait(lambda: self.cluster.partition(topic, 0)["leader_id"] == nodes[0], f"{topic} is led by {nodes[0]}")

    def _acknowledged_by_one(self, topic: str) -> None:
        with self.cluster.admin() as admin:
            admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"min.insync.replicas": "1"})])

    def _follow(self, seconds: float) -> None:
        """Follow the run for some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.follower.poll(0.1)

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PROGRESS_LIMIT_S
        while not condition() and self.process.poll() is None:
            if time.monotonic() > end:
                raise SystemExit(f"no progress within {PROGRESS_LIMIT_S:.0f} s of {self.done[-1:] or 'the start'}")
            time.sleep(0.1)


def disturber(cluster: ThreeBrokers, run: str, process: "subprocess.Popen[bytes]", *, seed: int) -> Disturber:
    """Disturber of a starting run, once its ledger exists."""
    log, end = KafkaLog(cluster.bootstrap, client_id="chaos"), time.monotonic() + PROGRESS_LIMIT_S
    log.wait_out(PROGRESS_LIMIT_S)
    while log.partitions(f"{run}.ledger") is None:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"run {run} did not start within {PROGRESS_LIMIT_S:.0f} s")
        time.sleep(0.2)
    return Disturber(cluster, run, process, random.Random(seed), LedgerFollower(log, run))


def sound(config: str, settings: Sequence[str], cluster: ThreeBrokers, home: Path, *, steps: int, count: int, seed: int) -> bool:
    """Run whose acknowledged records survive; True if it finished with a clean audit."""
    run, rng = f"sound-{int(time.time()):x}", random.Random(seed)
    with launched(config, run, settings, home / f"{run}.txt") as process:
        chaos = disturber(cluster, run, process, seed=seed)
        plan = [chaos.kill] * ((count - 2) // 2) + [chaos.freeze] * (count - 2 - (count - 2) // 2) + [chaos.roll, chaos.elect]
        rng.shuffle(plan)
        for number, disturb in enumerate(plan, start=1):
            chaos.measured(disturb, due=number * steps // (count + 2), soon=rng.random() < 0.2 and number < count)
        process.wait()
    if process.returncode:
        print(f"the disturbed run ended with {process.returncode}:\n{(home / f'{run}.txt').read_text()[-3000:]}")
        return False
    audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", cluster.bootstrap], capture_output=True, text=True, check=False)
    recoveries = sorted(seconds for _, seconds in chaos.done if seconds is not None)
    print(
        f"{len(chaos.done)} disturbances; next step after {recoveries[len(recoveries) // 2]:.1f} s (median), {recoveries[-1]:.1f} s at most"
    )
    print(f"audit: exit {audit.returncode}; {(audit.stdout or audit.stderr).strip().splitlines()[-1]}")
    return audit.returncode == 0 and len(chaos.done) == count


def lossy(config: str, settings: Sequence[str], cluster: ThreeBrokers, home: Path, *, seed: int) -> bool:
    """Run whose ledger loses acknowledged entries; True if it stopped and named one."""
    run = f"lossy-{int(time.time()):x}"
    with launched(config, run, settings, home / f"{run}.txt") as process:
        chaos = disturber(cluster, run, process, seed=seed)
        chaos._until(lambda: chaos.steps >= 3)
        print(chaos.elect(lone=True), flush=True)
        process.wait(PROGRESS_LIMIT_S)
    named = LOST.search((home / f"{run}.txt").read_text())
    print(f"the run ended with {process.returncode}: {named[0] if named else 'IT NAMES NO LOST RECORD'}")
    return process.returncode == 1 and named is not None


def main(arguments: Sequence[str]) -> int:
    """Both runs on one cluster."""
    parser = run_parser(__name__, __doc__)
    with_numbers(parser, disturbances=20, seed=1)
    parser.add_argument("--only", choices=["sound", "lossy"])
    chosen = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    cluster = ThreeBrokers(home / "cluster")
    steps = next((int(setting.split("=")[1]) for setting in chosen.settings if setting.startswith("run.steps=")), 100)
    try:
        settings = [*chosen.settings, f"kafka.bootstrap={cluster.start()}"]
        passed = chosen.only == "lossy" or sound(
            chosen.config, settings, cluster, home, steps=steps, count=chosen.disturbances, seed=chosen.seed
        )
        return int(not (passed and (chosen.only == "sound" or lossy(chosen.config, settings, cluster, home, seed=chosen.seed))))
    finally:
        cluster.close()
