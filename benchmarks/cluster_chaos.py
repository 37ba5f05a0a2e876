"""Disturb a cluster of three brokers 20 times in one run, then lose acknowledged records in a second one.

    python benchmarks/cluster_chaos.py examples/exact.toml --set run.steps=120

First run: nodes are killed, frozen and restarted one after the other, and one partition, the ledger, is led by a replica that was not in
sync, at a moment when nothing had been acknowledged without it: the run has to end, and its audit has to be clean. Second run: the
ledger takes entries that one copy alone has (min.insync.replicas = 1), and loses them to such an election: the run has to stop, with
the offset of the lost record. Ends with 1 when one of this does not hold. Nodes are processes of this machine.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from command import PENSTOCK, launched
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.three_brokers import NODES, ThreeBrokers

SOON_S = 2.0
PROGRESS_LIMIT_S = 180.0
LOST = re.compile(r"\S+ has lost records: offset \d+ was acknowledged|\S+: offset \d+ is missing, it has \d+ to \d+: .*lost with a broker")
"""What the writer says, or a reader, whoever notices first."""


@dataclass(slots=True)
class Disturber:
    """Disturbs the cluster and measures how long the run needs for its next step."""

    cluster: ThreeBrokers
    run: str
    process: "subprocess.Popen[bytes]"
    draw: random.Random
    follower: LedgerFollower
    done: list[tuple[str, float | None]] = field(default_factory=list)
    """What was done, and the seconds until the next step after it; None where the next disturbance came first."""

    @property
    def steps(self) -> int:
        """Committed steps as far as is known now."""
        self.follower.poll(0.0)
        return self.follower.state.steps

    def kill(self) -> str:
        """SIGKILL for one node, which is started again some seconds later."""
        node, away_s = self.draw.choice(NODES), self.draw.uniform(0.5, 6.0)
        self.cluster.kill(node)
        self._pass(away_s)
        self.cluster.start()
        return f"node {node} killed, away for {away_s:.1f} s"

    def freeze(self) -> str:
        """SIGSTOP for one node, SIGCONT some seconds later."""
        node, frozen_s = self.draw.choice(NODES), self.draw.uniform(1.0, 9.0)
        self.cluster.freeze(node)
        self._pass(frozen_s)
        self.cluster.thaw(node)
        return f"node {node} frozen for {frozen_s:.1f} s"

    def roll(self) -> str:
        """An orderly restart of each node, as an upgrade does it: the next one when all replicas are in sync again."""
        for node in NODES:
            self.cluster.stop(node)
            self.cluster.start()
            self.cluster.await_in_sync(f"{self.run}.ledger", 0, set(NODES))
        return "rolling restart of all nodes"

    def elect(self, *, lone: bool = False) -> str:
        """Have the ledger led by a replica that is not in sync; with `lone`, entries were acknowledged without it."""
        topic = f"{self.run}.ledger"
        leader, late = self.draw.sample(NODES, 2)
        self._replicas(topic, [leader, late])
        if lone:
            self._acknowledged_by_one(topic)
        self.cluster.kill(late)
        self.cluster.await_in_sync(topic, 0, {leader})
        begun = self.steps
        if lone:
            self._until(lambda: self.steps >= begun + 3)
        self.cluster.kill(leader)
        self.cluster.launch(late)
        self.cluster.elect_unclean(topic, 0, late)
        self.cluster.start()
        if not lone:
            self._replicas(topic, [late, *(node for node in NODES if node != late)])
        return f"node {late} leads the ledger, although not in sync"

    def measured(self, disturb: Callable[[], str], *, due: int, soon: bool) -> None:
        """Wait until it is due, disturb, and wait for a step, unless the next disturbance comes into the recovery."""
        self._until(lambda: self.steps >= due)
        if self.process.poll() is not None:
            raise SystemExit(f"the run ended before its disturbances: status {self.process.returncode}")
        what = disturb()
        began, steps = time.monotonic(), self.steps
        if soon:
            self._pass(self.draw.uniform(0.0, SOON_S))
        else:
            self._until(lambda: self.steps > steps)
        self.done.append((what, None if soon else time.monotonic() - began))
        print(f"{time.strftime('%H:%M:%S')} {len(self.done):>3}. {what}; step {self.steps}", flush=True)

    def _replicas(self, topic: str, nodes: Sequence[int]) -> None:
        """Have exactly these nodes keep the partition, the first of them as its leader."""
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

    def _pass(self, seconds: float) -> None:
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
    """One for a run that is being launched, as soon as its ledger is there."""
    log, end = KafkaLog(cluster.bootstrap, client_id="chaos"), time.monotonic() + PROGRESS_LIMIT_S
    log.wait_out(PROGRESS_LIMIT_S)
    while log.partitions(f"{run}.ledger") is None:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"run {run} did not begin")
        time.sleep(0.2)
    return Disturber(cluster, run, process, random.Random(seed), LedgerFollower(log, run))


def sound(config: str, settings: Sequence[str], cluster: ThreeBrokers, home: Path, *, steps: int, count: int, seed: int) -> bool:
    """The run whose acknowledged records survive; whether it ended with a clean audit."""
    run, draw = f"sound-{int(time.time()):x}", random.Random(seed)
    with launched(config, run, settings, home / f"{run}.txt") as process:
        chaos = disturber(cluster, run, process, seed=seed)
        plan = [chaos.kill] * ((count - 2) // 2) + [chaos.freeze] * (count - 2 - (count - 2) // 2) + [chaos.roll, chaos.elect]
        draw.shuffle(plan)
        for number, disturb in enumerate(plan, start=1):
            chaos.measured(disturb, due=number * steps // (count + 2), soon=draw.random() < 0.2 and number < count)
        process.wait()
    said = (home / f"{run}.txt").read_text()
    if process.returncode:
        print(f"the disturbed run ended with {process.returncode}:\n{said[-3000:]}")
        return False
    audit = subprocess.run([*PENSTOCK, "audit", run, "--bootstrap", cluster.bootstrap], capture_output=True, text=True, check=False)
    recoveries = sorted(seconds for _, seconds in chaos.done if seconds is not None)
    print(
        f"{len(chaos.done)} disturbances; next step after {recoveries[len(recoveries) // 2]:.1f} s (median), {recoveries[-1]:.1f} s at most"
    )
    print(f"audit: exit {audit.returncode}; {(audit.stdout or audit.stderr).strip().splitlines()[-1]}")
    return audit.returncode == 0 and len(chaos.done) == count


def lossy(config: str, settings: Sequence[str], cluster: ThreeBrokers, home: Path, *, seed: int) -> bool:
    """The run whose ledger loses acknowledged entries; whether it stopped and named one."""
    run = f"lossy-{int(time.time()):x}"
    with launched(config, run, settings, home / f"{run}.txt") as process:
        chaos = disturber(cluster, run, process, seed=seed)
        chaos._until(lambda: chaos.steps >= 3)
        print(chaos.elect(lone=True), flush=True)
        process.wait(PROGRESS_LIMIT_S)
    named = LOST.search((home / f"{run}.txt").read_text())
    print(f"the run ended with {process.returncode}: {named[0] if named else 'IT NAMES NO LOST RECORD'}")
    return process.returncode == 1 and named is not None


def main() -> int:
    """Both runs on one cluster."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--disturbances", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["sound", "lossy"])
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the run and its brokers are ended
    cluster = ThreeBrokers(home / "cluster")
    steps = next((int(setting.split("=")[1]) for setting in chosen.settings if setting.startswith("run.steps=")), 100)
    try:
        settings = [word for setting in [*chosen.settings, f"kafka.bootstrap={cluster.start()}"] for word in ("--set", setting)]
        kept = chosen.only == "lossy" or sound(
            chosen.config, settings, cluster, home, steps=steps, count=chosen.disturbances, seed=chosen.seed
        )
        return int(not (kept and (chosen.only == "sound" or lossy(chosen.config, settings, cluster, home, seed=chosen.seed))))
    finally:
        cluster.close()


if __name__ == "__main__":
    sys.exit(main())
