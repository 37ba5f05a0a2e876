"""Three Kafka nodes on the loopback, each broker and controller, to be frozen, killed and started again one by one.

The rule: what a test needs to know of the cluster (leader, replicas in sync) it asks the nodes and waits for; it never sleeps.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors

from penstock.infra.broker import access, process, settings
from penstock.infra.broker.process import find_java
from tests.support.waiting import until

LIMIT_S = 150.0
_UNCLEAN = 1  # Kafka's number of the kind of election
NODES = (1, 2, 3)

# What a cluster has three copies of, and how soon it notices that one is gone.
_CLUSTER = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "min.insync.replicas": "1",
    "log.flush.interval.messages": "9223372036854775807",
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "200",
    "replica.lag.time.max.ms": "1500",
    "replica.fetch.max.bytes": settings.server_properties(port=1, controller_port=1, data="", password="")
    .split("message.max.bytes=")[1]
    .split("\n")[0],
    "controller.quorum.fetch.timeout.ms": "1000",
    "controller.quorum.election.timeout.ms": "500",
    "controlled.shutdown.enable": "true",
    "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
}


class ThreeBrokers:
    """A cluster in a folder of its own; `close` stops all of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        free = iter(_free_ports(2 * len(NODES)))
        self.ports = {node: access.Ports(client=next(free), controller=next(free)) for node in NODES}
        java = find_java()
        memory = [option for option in settings.JVM if not option.startswith(("-Xmx", "-Xms"))]
        self._java = [str(java.program), *memory, "-Xmx256m", "-Xms96m", *(settings.JVM_FROM_22 if java.major >= 22 else ())]
        self._java += ["-cp", process.class_path(progress=lambda _: None)]
        self._make_storage()

    @property
    def bootstrap(self) -> str:
        """The addresses of all three."""
        return ",".join(f"{settings.HOST}:{chosen.client}" for chosen in self.ports.values())

    def start(self) -> str:
        """Start those that do not run, continue frozen ones, wait until each serves, and return their addresses."""
        for node in NODES:
            self.launch(node)
            self.thaw(node)
        for node in NODES:
            self.await_serving(node)
        self.wait(lambda: len(self.alive()) == len(NODES), "three brokers in service")
        return self.bootstrap

    def launch(self, node: int) -> None:
        """Start one node, unless it runs; returns at once."""
        if process.running(self._pid_file(node)) is None:
            directory = self._directory(node)
            command = [*self._java, "kafka.Kafka", "server.properties"]
            process.spawn(command, directory=directory, output=directory / "logs" / "console.log", pid_file=self._pid_file(node))

    def await_serving(self, node: int) -> None:
        """Wait until a node answers clients."""

        def serves() -> bool:
            assert process.running(self._pid_file(node)) is not None, f"node {node} ended: see {self._directory(node) / 'logs'}"
            return access.cluster_id(settings.HOST, self.ports[node].client, timeout_s=2.0) is not None

        self.wait(serves, f"node {node} serves")

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to a node's process."""
        pid = process.running(self._pid_file(node))
        assert pid is not None, f"node {node} does not run"
        os.kill(pid, number)

    def kill(self, node: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(node, signal.SIGKILL)
        self.wait(lambda: process.running(self._pid_file(node)) is None, f"node {node} is gone")

    def stop(self, node: int) -> None:
        """SIGTERM: the node hands its partitions over before it ends."""
        process.end(self._pid_file(node), timeout_s=30.0)

    def freeze(self, node: int) -> None:
        """SIGSTOP: it answers nothing, but its connections stand."""
        self.signal(node, signal.SIGSTOP)

    def thaw(self, node: int) -> None:
        """SIGCONT."""
        self.signal(node, signal.SIGCONT)

    def close(self) -> None:
        """End all nodes, at once: nobody needs their data."""
        for node in NODES:
            process.end(self._pid_file(node), timeout_s=0.0)

    def alive(self) -> set[int]:
        """Ids of the brokers that the cluster counts as being in service."""
        with self.admin() as admin:
            return {broker["broker_id"] for broker in admin.describe_cluster()["brokers"]}

    def partition(self, topic: str, partition: int) -> Mapping[str, Any]:
        """Kafka's description of one partition: `leader_id`, `isr_nodes`, `replica_nodes`."""
        with self.admin() as admin:
            (described,) = admin.describe_topics([topic])
            found: Mapping[str, Any] = next(one for one in described["partitions"] if one["partition_index"] == partition)
            return found

    def leader(self, topic: str, partition: int) -> int:
        """The node that leads a partition; waits for one."""
        leaders: list[int] = []

        def led() -> bool:
            leaders.append(int(self.partition(topic, partition)["leader_id"]))
            return leaders[-1] in NODES

        self.wait(led, f"{topic}/{partition} has a leader")
        return leaders[-1]

    def await_in_sync(self, topic: str, partition: int, nodes: set[int]) -> None:
        """Wait until exactly these replicas are in sync."""
        self.wait(lambda: set(self.partition(topic, partition)["isr_nodes"]) == nodes, f"{topic}/{partition} in sync on {sorted(nodes)}")

    def elect_unclean(self, topic: str, partition: int, node: int) -> None:
        """Let a replica that was not in sync lead a partition that has lost its leader, as an operator does to go on."""

        def elected() -> bool:
            if self.partition(topic, partition)["leader_id"] == node:
                return True
            with self.admin() as admin:
                admin.elect_leaders(_UNCLEAN, {topic: [partition]}, raise_errors=False)
            return False

        self.wait(elected, f"{topic}/{partition} is led by node {node}")

    def wait(self, holds: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> None:
        """Wait for a condition; a question that the cluster does not answer at the moment is asked again."""
        until(lambda: _answered(holds), what, limit_s=limit_s, every_s=0.05)

    @contextmanager
    def admin(self) -> Iterator[Any]:
        """An admin client of the whole cluster, with short limits."""
        client = KafkaAdminClient(bootstrap_servers=self.bootstrap.split(","), request_timeout_ms=4000, bootstrap_timeout_ms=8000)
        try:
            yield client
        finally:
            client.close()

    def _directory(self, node: int) -> Path:
        return self.home / f"node-{node}"

    def _pid_file(self, node: int) -> Path:
        return self._directory(node) / "process.json"

    def _make_storage(self) -> None:
        cluster = access.new_cluster_id()
        formats = []
        for node in NODES:
            directory = self._directory(node)
            for folder in ("logs", "tmp"):
                (directory / folder).mkdir(parents=True)
            (directory / "log4j2.properties").write_text(settings.LOG4J)
            (directory / "server.properties").write_text(self._properties(node))
            tool = ["kafka.tools.StorageTool", "format", "--config", "server.properties", "--cluster-id", cluster]
            pipe = subprocess.PIPE
            formats.append(subprocess.Popen([*self._java, *tool], cwd=directory, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        for made in formats:
            output, _ = made.communicate(timeout=LIMIT_S)
            assert made.returncode == 0, output

    def _properties(self, node: int) -> str:
        stock = settings.server_properties(
            port=self.ports[node].client, controller_port=self.ports[node].controller, data="data", password=""
        )
        lines = {**dict(line.split("=", 1) for line in stock.splitlines()), **_CLUSTER, "node.id": str(node)}
        del lines["controller.quorum.bootstrap.servers"]
        lines["controller.quorum.voters"] = ",".join(f"{one}@{settings.HOST}:{at.controller}" for one, at in self.ports.items())
        return "".join(f"{name}={value}\n" for name, value in lines.items())


def _answered(until: Callable[[], bool]) -> bool:
    try:
        return until()
    except (kafka_errors.KafkaError, StopIteration):
        return False


def _free_ports(count: int) -> list[int]:
    found = [port for port in range(20000 + os.getpid() % 9000, 30000) if access.is_free(port)]
    return found[:count]
