"""The log on three brokers: what was acknowledged survives nodes that go, and where an election loses it all the same, that is said."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from penstock.infra.errors import LogError, Unrecoverable
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.hanging import hanging_transactions
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import FOLLOWING, Copies
from penstock.pipeline.launch import doctor
from penstock.pipeline.launch.stall_watchdog import unblock
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, TopicSpec, topics_of
from tests.support.log_helpers import WAIT_S, Heard, closed_at_end, listen, outgoing
from tests.support.three_brokers import NODES, ThreeBrokers

LOSSY = Copies(replicas=2, in_sync=1, loss_allowed=True)


@pytest.fixture(scope="module")
def cluster(new_home: Callable[[], Path]) -> Iterator[ThreeBrokers]:
    opened = ThreeBrokers(new_home())
    try:
        opened.start()
        yield opened
    finally:
        opened.close()


@pytest.fixture
def log(cluster: ThreeBrokers) -> Iterator[KafkaLog]:
    cluster.start()
    with closed_at_end(KafkaLog(cluster.bootstrap)) as opened:
        yield opened


def made(log: KafkaLog, name: str, copies: Copies = FOLLOWING) -> str:
    log.create_topics({name: TopicSpec(name=name, partitions=1, configs={})}, copies=copies)
    return name


def values(log: KafkaLog, topic: str) -> list[bytes]:
    tail = log.tail({(topic, 0): "earliest"})
    try:
        return [record.value for record in tail.read_to_end(WAIT_S, include_open=True)]
    finally:
        tail.close()


def coordinator(cluster: ThreeBrokers, transactional_id: str) -> int:
    """The node that coordinates a transactional id: the leader of the partition that Java's hash of it names."""
    code = 0
    for character in transactional_id:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    code = code - (1 << 32) if code >> 31 else code
    with cluster.admin() as admin:
        (described,) = admin.describe_topics(["__transaction_state"])
    return cluster.leader("__transaction_state", (code & 0x7FFFFFFF) % len(described["partitions"]))


@pytest.mark.slow
def test_a_member_whose_partition_changes_its_leader_before_it_is_begun_finds_the_new_one(
    cluster: ThreeBrokers, log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, fetch, moved = made(log, "moving"), private_api.fetch_committed, list[int]()
    writer = log.producer()
    writer.send(outgoing(topic, b"first")).offset(WAIT_S)
    writer.close()

    def fetch_and_move(*arguments: Any) -> Any:
        committed = fetch(*arguments)
        if not moved:  # from now on what the client knows of the leader is out of date
            moved.append(next(node for node in NODES if node != cluster.leader(topic, 0)))
            with cluster.admin() as admin:
                admin.alter_partition_reassignments({TopicPartition(topic, 0): moved})
            cluster.wait(lambda: list(cluster.partition(topic, 0)["replica_nodes"]) == moved, f"{topic} is led by {moved[0]}")
        return committed

    monkeypatch.setattr(private_api, "fetch_committed", fetch_and_move)
    heard = Heard(log.member("movers", [topic]))
    listen(heard, until=lambda: [record.value for record in heard.records] == [b"first"])
    assert moved


@pytest.mark.slow
def test_an_election_that_loses_acknowledged_records_stops_their_writer(cluster: ThreeBrokers, log: KafkaLog) -> None:
    topic, writer = made(log, "lossy", LOSSY), log.transactions("lossy.writer")
    assert writer.commit([outgoing(topic, b"kept")]) == [0]
    leader = cluster.leader(topic, 0)
    late = next(node for node in cluster.partition(topic, 0)["replica_nodes"] if node != leader)
    cluster.await_in_sync(topic, 0, {leader, late})
    cluster.kill(late)
    lost = [writer.commit([outgoing(topic, b"lost")])[0] for _ in range(4)][-1]
    cluster.kill(leader)
    cluster.launch(late)
    cluster.elect_unclean(topic, 0, late)
    with pytest.raises(Unrecoverable, match=rf"lossy/0 has lost records: offset {lost} was acknowledged, the next record was written at "):
        writer.commit([outgoing(topic, b"later")])


def found_by_the_doctor(cluster: ThreeBrokers) -> list[tuple[str, str]]:
    return [(finding.level, finding.found) for finding in doctor._durability(cluster.bootstrap)]


def set_unclean(cluster: ThreeBrokers, kind: ConfigResourceType, name: str, value: str) -> None:
    with cluster.admin() as admin:
        admin.alter_configs([ConfigResource(kind, name, {"unclean.leader.election.enable": value})])
        asked = [ConfigResource(kind, name, None)]

        def is_set() -> bool:
            settings = admin.describe_configs(asked, config_filter="all")[kind.name.lower()][name]
            return bool(settings["unclean.leader.election.enable"]["value"] == value)

        cluster.wait(is_set, f"{name} has unclean elections: {value}")


@pytest.mark.slow
def test_what_one_lost_broker_would_take_along_is_named_by_the_doctor_and_when_a_run_is_created(
    cluster: ThreeBrokers, log: KafkaLog
) -> None:
    whole = [("ok", "no broker setting allows acknowledged records to be lost with one broker")]
    assert found_by_the_doctor(cluster) == whole
    runs, groups = {RUNS_TOPIC: RUNS_SPEC}, {"durable.groups": topics_of("durable", partitions=1)["durable.groups"]}
    assert log.create_topics(groups) == []
    assert log.create_topics(runs, copies=Copies(replicas=1, loss_allowed=True)) == []
    (warning,) = log.create_topics({**runs, **groups})
    assert warning.startswith("topic penstock.runs has 1 replica, expected 3: the topic could be lost with one broker")
    alone = ("warn", "one copy of penstock.runs, on 3 brokers")
    assert found_by_the_doctor(cluster) == [alone]
    set_unclean(cluster, ConfigResourceType.TOPIC, "durable.groups", "true")
    assert found_by_the_doctor(cluster) == [("warn", "unclean.leader.election.enable is true of durable.groups"), alone]
    set_unclean(cluster, ConfigResourceType.BROKER, "2", "true")
    assert found_by_the_doctor(cluster) == [("warn", "unclean.leader.election.enable is true on broker 2"), alone]
    set_unclean(cluster, ConfigResourceType.BROKER, "2", "false")
    log.delete_topics([*runs, *groups])
    assert found_by_the_doctor(cluster) == whole


@pytest.mark.slow
def test_one_node_away_a_new_leader_and_a_rolling_restart_lose_nothing(cluster: ThreeBrokers, log: KafkaLog) -> None:
    topic, writer, sent = made(log, "kept"), log.transactions("kept.writer"), list[bytes]()

    def write() -> None:
        sent.append(b"%d" % len(sent))
        writer.commit([outgoing(topic, sent[-1])])

    write()
    for end in (cluster.kill, cluster.stop, cluster.freeze):
        leader = cluster.leader(topic, 0)
        end(leader)
        write()
        assert cluster.leader(topic, 0) != leader
        if end == cluster.freeze:
            cluster.thaw(leader)
        cluster.start()
        cluster.await_in_sync(topic, 0, set(NODES))
        write()
    for node in NODES:
        cluster.stop(node)
        write()
        cluster.launch(node)
        cluster.await_serving(node)
        cluster.await_in_sync(topic, 0, set(NODES))
    assert values(log, topic) == sent


@pytest.mark.slow
def test_with_two_nodes_out_of_sync_a_writer_waits_and_nothing_is_acknowledged(cluster: ThreeBrokers, log: KafkaLog) -> None:
    topic, writer = made(log, "shrunken"), log.producer()
    writer.send(outgoing(topic, b"before")).offset(WAIT_S)
    leader = cluster.leader(topic, 0)
    for node in set(NODES) - {leader}:
        cluster.freeze(node)
    waiting = writer.send(outgoing(topic, b"after"))
    with pytest.raises(LogError, match="shrunken/0: the record was not acknowledged within 4 s"):
        waiting.offset(4.0)
    for node in set(NODES) - {leader}:
        cluster.thaw(node)
    assert waiting.offset(WAIT_S) == 1
    cluster.await_in_sync(topic, 0, set(NODES))
    assert values(log, topic) == [b"before", b"after"]


@pytest.mark.slow
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_that_the_cluster_has_lost_is_found_and_written_as_it_was_decided(
    cluster: ThreeBrokers, log: KafkaLog, commit: bool
) -> None:
    run, said = f"lost-end-{commit}", list[str]()
    topic = made(log, f"{run}.groups", Copies(replicas=1, in_sync=1, loss_allowed=True))
    log.transactions(f"lost-end-{commit}.first").close()  # makes the topic of transactions
    leader = cluster.leader(topic, 0)
    writer = next(name for name in (f"lost-end-{commit}.{n}" for n in range(64)) if coordinator(cluster, name) != leader)
    left = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": writer, "transaction.timeout.ms": 60_000})
    left.init_transactions()
    left.begin_transaction()
    left.produce(topic, value=b"decided", partition=0)
    left.flush()
    assert hanging_transactions(log, [topic], patience_s=0.1) == [], "its writer is at work"
    cluster.kill(leader)
    cluster.wait(lambda: cluster.partition(topic, 0)["leader_id"] == -1, f"{topic} has no leader")
    (left.commit_transaction if commit else left.abort_transaction)(WAIT_S)
    cluster.start()
    (found,) = hanging_transactions(log, [topic], patience_s=1.0)
    assert (found.topic, found.partition, found.offset, found.transactional_id, found.committed) == (topic, 0, 0, writer, commit)
    assert log.end_offsets([(topic, 0)])[topic, 0] == 0
    unblock(log, run, said.append)
    assert said == [f"{found}; the end marker has now been written"]
    assert values(log, topic) == [b"decided"] * commit
    assert hanging_transactions(log, [topic], patience_s=0.1) == []


@pytest.mark.slow
def test_a_transaction_whose_writer_and_coordinator_die_is_ended_by_the_next_coordinator(cluster: ThreeBrokers, log: KafkaLog) -> None:
    topic = made(log, "hanging")
    producer = log.producer()
    producer.send(outgoing(topic, b"first")).offset(WAIT_S)
    left = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": "hanging.writer", "transaction.timeout.ms": 4000})
    left.init_transactions()
    left.begin_transaction()
    left.produce(topic, value=b"never", partition=0)
    left.flush()
    producer.send(outgoing(topic, b"second")).offset(WAIT_S)
    for node in NODES:  # one of them coordinates it
        cluster.kill(node)
    cluster.start()
    assert values(log, topic) == [b"first", b"second"]
    with pytest.raises(KafkaException, match=r"(?i)fenced|epoch|invalid"):
        left.commit_transaction()
