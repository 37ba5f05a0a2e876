"""Settings of a cluster that lose or refuse records are named; the cluster is one broker, for some tests counted several times."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from penstock.infra.broker import embedded, settings
from penstock.infra.errors import LogError
from penstock.infra.kafka.admin import UNCLEAN, Admin
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Copies
from penstock.pipeline.launch import doctor
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.bare_clients import python_client
from tests.support.log_helpers import WAIT_S, Heard, listen
from tests.support.waiting import until

FACTOR = "transaction.state.log.replication.factor"
TOPIC, BROKER = ConfigResourceType.TOPIC, ConfigResourceType.BROKER


@pytest.fixture
def admin(broker: str) -> Iterator[KafkaAdminClient]:
    """An admin client; the broker's own settings are as before afterwards."""
    client = KafkaAdminClient(**python_client(broker))
    yield client
    set_unclean(client, BROKER, "1", "false")
    client.close()


def set_unclean(admin: KafkaAdminClient, kind: ConfigResourceType, name: str, value: str) -> None:
    admin.alter_configs([ConfigResource(kind, name, {UNCLEAN: value})])
    asked = [ConfigResource(kind, name, None)]
    until(lambda: admin.describe_configs(asked, config_filter="all")[kind.name.lower()][name][UNCLEAN]["value"] == value, limit_s=WAIT_S)


def found_by_the_doctor(bootstrap: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.found) for finding in doctor._durability(bootstrap)]


def test_copies_that_the_cluster_cannot_have_or_that_one_lost_broker_takes_along_are_refused(
    log: KafkaLog, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {f"{run_id}.groups": topics_of(run_id, partitions=1)[f"{run_id}.groups"]}
    with pytest.raises(LogError, match=r"kafka.replication_factor: 2 replicas need as many brokers, 1 are up"):
        log.create_topics(groups, copies=Copies(replicas=2))
    monkeypatch.setattr(Admin, "brokers", lambda _: [1, 1, 1])
    with pytest.raises(LogError, match=r"kafka.replication_factor: with 1 replicas.* loss of one of 3 brokers .*kafka.allow_loss = true"):
        log.create_topics(groups, copies=Copies(replicas=1))
    assert log.partitions(f"{run_id}.groups") is None


def test_what_one_lost_broker_would_take_along_is_named_by_the_doctor_and_when_its_topic_is_used(
    broker: str, log: KafkaLog, admin: KafkaAdminClient, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{run_id}.groups"
    groups = {topic: topics_of(run_id, partitions=1)[topic]}
    assert log.create_topics(groups) == []
    assert found_by_the_doctor(broker) == [("ok", "no broker setting allows acknowledged records to be lost with one broker")]
    monkeypatch.setattr(Admin, "brokers", lambda _: [1, 1, 1])
    monkeypatch.setattr(Admin, "topics", lambda *_: [topic])
    allowed = Copies(replicas=3, in_sync=1, loss_allowed=True)
    (warning,) = log.create_topics(groups, copies=allowed)
    assert warning.startswith(f"topic {topic} has 1 replica, expected 3: the topic could be lost with one broker")
    alone = ("warn", f"one copy of {topic}, on 3 brokers")
    assert found_by_the_doctor(broker) == [alone]
    set_unclean(admin, TOPIC, topic, "true")
    assert found_by_the_doctor(broker) == [("warn", f"{UNCLEAN} is true of {topic}"), alone]
    set_unclean(admin, BROKER, "1", "true")
    assert found_by_the_doctor(broker) == [("warn", f"{UNCLEAN} is true on broker 1"), alone]


@pytest.fixture(scope="module")
def limited(new_home: Callable[[], Path]) -> str:
    """A broker that cannot make its topic of transactions, and whose groups have one member at most."""
    stock = settings.server_properties
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "server_properties", lambda **given: f"{stock(**given)}\n{FACTOR}=3\ngroup.max.size=1\n")
        return embedded.start(home=new_home()).bootstrap


def test_a_cluster_that_cannot_make_its_internal_topics_is_refused_at_once_and_named_by_the_doctor(limited: str) -> None:
    problem = f"{FACTOR} is 3 on 1 broker: Kafka cannot make its topic __transaction_state"
    log = KafkaLog(limited)
    with pytest.raises(LogError, match=f"^{problem}: set it to 1 in the brokers' configuration, or start more brokers$"):
        log.create_topics({RUNS_TOPIC: RUNS_SPEC})
    assert log.partitions(RUNS_TOPIC) is None
    log.close()
    assert ("warn", problem) in found_by_the_doctor(limited)


def test_a_limit_of_the_broker_that_no_retry_lifts_is_one_line_with_its_setting(limited: str, log: KafkaLog, run_id: str) -> None:
    with pytest.raises(LogError, match=r"InvalidTransactionTimeoutError; set the broker's transaction\.max\.timeout\.ms to 10000 or more$"):
        log.transactions(f"{run_id}.writer", timeout_s=7200.0, give_up_s=WAIT_S)
    admin, other = KafkaAdminClient(**python_client(limited)), KafkaLog(limited)
    admin.create_topics({"crowded": {"num_partitions": 2, "replication_factor": 1}}, timeout_ms=20_000)
    admin.close()
    first = Heard(other.member("crowd", ["crowded"]))
    listen(first, until=lambda: len(first.owned) == 2)
    second = other.member("crowd", ["crowded"])
    with pytest.raises(LogError, match=r"GroupMaxSizeReachedError.*; set the broker's group\.max\.size to the number of workers"):
        second.take(WAIT_S)
    for client in (first.member, second, other):
        client.close()
