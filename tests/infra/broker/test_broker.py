"""The embedded broker as a whole: a real Kafka is started, found, killed and stopped."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition

from penstock.infra.broker import embedded, process
from penstock.infra.errors import BrokerError
from penstock.infra.kafka.log import KafkaLog
from tests.support.bare_clients import python_client
from tests.support.log_helpers import WAIT_S, make_topics, outgoing, values_in
from tests.support.paths import ROOT
from tests.support.refusals import one_line
from tests.support.waiting import until

PARTITIONS = 100
_START = "import sys, pathlib; from penstock.infra.broker.embedded import start; print(start(home=pathlib.Path(sys.argv[1])).pid)"


@pytest.fixture(scope="module")
def started_twice(new_home: Callable[[], Path]) -> Iterator[tuple[Path, set[int]]]:
    """A home in which two processes started the broker at the same time, and the pids they were told."""
    home = new_home()
    starts = [subprocess.Popen([sys.executable, "-c", _START, str(home)], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {int(start.communicate(timeout=200)[0]) for start in starts}
    yield home, answers
    embedded.stop(home)


@pytest.fixture
def home(started_twice: tuple[Path, set[int]]) -> Path:
    embedded.start(home=started_twice[0])
    return started_twice[0]


def running(home: Path) -> tuple[int, str]:
    found = embedded.status(home)
    assert found.pid is not None
    return found.pid, found.bootstrap


def write(bootstrap: str, topic: str, value: bytes) -> None:
    admin = KafkaAdminClient(**python_client(bootstrap))
    admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 1, "configs": {}}})
    admin.close()
    producer = KafkaProducer(**python_client(bootstrap), max_request_size=32 << 20)
    producer.send(topic, value, partition=0).get(100)
    producer.close(5)


def read(bootstrap: str, topic: str) -> bytes:
    consumer = KafkaConsumer(
        **python_client(bootstrap), auto_offset_reset="earliest", enable_auto_commit=False,
        max_partition_fetch_bytes=32 << 20,
    )  # fmt: skip
    partition = TopicPartition(topic, 0)
    consumer.assign([partition])
    polled = consumer.poll(timeout_ms=100_000)
    consumer.close(timeout_ms=1000)
    return bytes(polled[partition][0].value)


def listening(pid: int) -> set[str]:
    return {connection.laddr.ip for connection in psutil.Process(pid).net_connections() if connection.status == psutil.CONN_LISTEN}


def test_two_starts_at_the_same_time_give_one_broker(started_twice: tuple[Path, set[int]]) -> None:
    home, answers = started_twice
    assert answers == {embedded.status(home).pid}


def test_a_second_start_finds_the_running_broker(home: Path) -> None:
    before = embedded.status(home)
    again = embedded.start(home=home)
    assert before.running
    assert (again.pid, again.bootstrap, again.started_s) == (before.pid, before.bootstrap, 0.0)


def test_the_broker_listens_on_the_loopback_alone(home: Path) -> None:
    pid, _ = running(home)
    assert listening(pid) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_ctrl_c_in_the_terminal_of_its_starter_does_not_reach_the_broker(home: Path) -> None:
    pid, _ = running(home)
    assert os.getsid(pid) == os.getpgid(pid) == pid


def test_another_port_for_a_running_broker_is_refused(home: Path) -> None:
    with pytest.raises(BrokerError, match="broker stop"):
        embedded.start(home=home, port=29999)


def test_stop_leaves_no_process_and_a_warm_start_finds_the_data(home: Path) -> None:
    pid, bootstrap = running(home)
    value = os.urandom(100)
    write(bootstrap, "kept", value)
    assert embedded.stop(home)
    assert process.start_mark(pid) is None
    after = embedded.status(home)
    assert (after.running, after.pid, after.bootstrap) == (False, None, bootstrap)
    assert not list((home / "broker").glob("tmp/*"))
    again = embedded.start(home=home)
    assert again.pid is not None
    assert again.bootstrap == bootstrap
    assert read(again.bootstrap, "kept") == value


@pytest.mark.slow
def test_a_transaction_whose_commit_the_killed_broker_acknowledged_is_visible_in_every_partition_when_it_is_back(home: Path) -> None:
    pid, bootstrap = running(home)
    log = KafkaLog(bootstrap)
    (topic,) = make_topics(log, "killed", "many", partitions=PARTITIONS)
    everywhere = [(topic, partition) for partition in range(PARTITIONS)]
    writer = log.transactions("killed.writer")
    writer.commit([outgoing(topic, b"1", partition=partition) for _, partition in everywhere])
    os.kill(pid, signal.SIGKILL)  # the commit is acknowledged before its markers stand in the partitions
    assert embedded.start(home=home).pid != pid

    def settled() -> bool:
        ends = log.end_offsets(everywhere)
        return ends == log.end_offsets(everywhere, committed=False) and 1 not in ends.values()

    until(settled, "every partition has the end of the transaction", limit_s=WAIT_S, every_s=0.1)
    assert values_in(log, topic) == [b"1"]
    writer.close()
    log.close()


def test_a_broker_that_cannot_start_says_why_in_one_line_and_leaves_no_process(home: Path) -> None:
    embedded.stop(home)
    identity = home / "broker" / "data" / "meta.properties"
    good = identity.read_text()
    identity.write_text(good.replace("node.id=1", "node.id=7"))
    try:
        with one_line(BrokerError, "node id 7", "broker.log"):
            embedded.start(home=home)
    finally:
        identity.write_text(good)
    assert not embedded.status(home).running


def test_a_remembered_port_that_was_taken_gives_one_line_with_a_way_out(started_twice: tuple[Path, set[int]]) -> None:
    home, _ = started_twice
    embedded.stop(home)
    port = int(embedded.status(home).bootstrap.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), one_line(BrokerError, f"port {port} ", "--port"):
        embedded.start(home=home)


def test_records_of_16_mib_pass_through_the_session_broker(broker: str, run_id: str) -> None:
    value = uuid.uuid4().bytes * (1 << 20)
    write(broker, f"{run_id}.large", value)
    assert read(broker, f"{run_id}.large") == value
