"""A whole run on a broker that asks for SCRAM over TLS: each role is a user who may do what `penstock topics acls` prints, and no more."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection, librdkafka
from penstock.infra.log import Log
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import audit
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.roles import ROLES, AclRule, acl_rules
from penstock.topics.catalogue import RUNS_SPEC, RUNS_TOPIC, topics_of
from tests.support.bare_clients import c_client
from tests.support.secured_broker import SecuredBroker
from tests.support.worker_set import WorkerSet, config_of

RUN = "least"


class Users(WorkerSet):
    """Workers that connect as the user of their role."""

    def __init__(self, broker: SecuredBroker, run: str) -> None:
        super().__init__(broker.plain, run)
        self.broker = broker

    def _connect(self, role: str, name: str) -> Log:
        return KafkaLog(self.broker.secure, security=credentials(self.broker, role), client_id=f"{self.run}.{name}")


def credentials(broker: SecuredBroker, role: str, run: str = RUN) -> Mapping[str, Any]:
    return broker.credentials(f"{run}-{role}", f"pw-{role}")


def add_users(broker: SecuredBroker, run: str) -> None:
    """A user for each role of a run, with the rules that are printed."""
    for role, rules in acl_rules(run).items():
        broker.add_user(f"{run}-{role}", f"pw-{role}")
        broker.allow(f"{run}-{role}", rules)


def refusals(broker: SecuredBroker, role: str) -> list[str]:
    """What the broker answers a role that writes a foreign topic, takes a foreign transactional id, and empties the ledger."""
    settings = librdkafka(Connection(bootstrap=broker.secure, client_id="intruder", security=credentials(broker, role)))
    records: list[str] = []
    topic = f"{RUN}.run" if role != "launcher" else f"{RUN}.groups"
    producer = Producer(settings)
    producer.produce(topic, b"x", on_delivery=lambda error, _: records.append(error.name() if error else "written"))
    producer.flush(120.0)
    try:
        Producer({**settings, "transactional.id": f"{RUN}.{'feeder' if role == 'trainer' else 'trainer'}"}).init_transactions(120.0)
        records.append("taken")
    except KafkaException as error:
        records.append(error.args[0].name())
    admin = AdminClient(settings)
    (future,) = admin.delete_records([TopicPartition(f"{RUN}.ledger", 0, -1)]).values()
    try:
        future.result(120.0)
        records.append("emptied")
    except KafkaException as error:
        records.append(error.args[0].name())
    return records


@pytest.mark.slow
def test_a_run_is_whole_with_the_least_rights_and_no_role_has_more(new_home: Callable[[], Path], tiny_model: Path, tmp_path: Path) -> None:
    broker = SecuredBroker(new_home())
    try:
        add_users(broker, RUN)
        config = config_of(tiny_model, tmp_path, run={"steps": 3, "seed": 7})
        launcher = KafkaLog(broker.secure, security=credentials(broker, "launcher"))
        create(config, log=launcher, run_id=RUN, notify=lambda _: None)
        launcher.close()
        with Users(broker, RUN) as worker_set:
            worker_set.start_all(config, [role for role in ROLES if role != "evaluator"])
            worker_set.wait()
            report = worker_set.report()
        assert (report["status"], report["steps"]) == ("finished", 3)
        reader = librdkafka(Connection(bootstrap=broker.secure, client_id="a", security=credentials(broker, "reader")))
        assert audit(KafkaSource(broker.secure, RUN, settings=reader)).clean
        wanted = ["TOPIC_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"]
        assert {role: refusals(broker, role) for role in acl_rules(RUN)} == dict.fromkeys(acl_rules(RUN), wanted)
    finally:
        broker.close()


def may(rules: list[AclRule], resource: str, operation: str, names: list[str]) -> set[str]:
    """Those of the resources on which the rules allow the operation."""
    fitting = [rule for rule in rules if (rule.resource, rule.operation) == (resource, operation)]
    return {name for name in names for rule in fitting if (name.startswith if rule.pattern == "prefixed" else name.__eq__)(rule.name)}


def written(settings: Mapping[str, Any], topics: list[str]) -> set[str]:
    """Those of the topics that a user has written a record to; the others were refused for want of a right."""
    answers: dict[str, KafkaError | None] = {}
    producer = Producer(settings)
    for topic in topics:
        producer.produce(topic, b"x", key=b"x", partition=0, on_delivery=lambda error, message: answers.update({message.topic(): error}))
    assert producer.flush(60.0) == 0
    assert {error.code() for error in answers.values() if error} <= {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    return {topic for topic in topics if answers[topic] is None}


def read(settings: Mapping[str, Any], topics: list[str], *, wanted: set[str]) -> set[str]:
    """Those of the topics that a user has read a record of, a second after it has those that are wanted."""
    found: set[str] = set()
    consumer = Consumer({**settings, "group.id": "none", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0) for topic in topics])
    left = 600
    while left:
        message = consumer.poll(0.1)
        if message is not None and not message.error():
            found.add(message.topic() or "")
        left = min(left, 10) - 1 if found >= wanted else left - 1
    consumer.close()
    return found


def taken(settings: Mapping[str, Any], names: list[str]) -> set[str]:
    answers: dict[str, int | None] = {}
    for name in names:
        try:
            Producer({**settings, "transactional.id": name}).init_transactions(300.0)
            answers[name] = None
        except KafkaException as error:
            answers[name] = error.args[0].code()
    assert set(answers.values()) <= {None, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    return {name for name in names if answers[name] is None}


@pytest.mark.slow
def test_of_its_own_run_and_of_another_tenants_each_user_may_do_what_the_rules_say_and_no_more(new_home: Callable[[], Path]) -> None:
    broker, tenants = SecuredBroker(new_home()), ("one", "two")
    try:
        owner = KafkaLog(broker.plain)
        topics = [RUNS_TOPIC]
        owner.create_topics({RUNS_TOPIC: RUNS_SPEC})
        for run in tenants:
            add_users(broker, run)
            owner.create_topics(specs := topics_of(run, partitions=1, turns=True))
            topics += specs
        owner.close()
        written(c_client(broker.plain), topics)
        ids = [f"{run}.{name}" for run in tenants for name in ("launcher", "feeder", "scorer-0", "trainer")]
        for run in tenants:
            for role, rules in acl_rules(run).items():
                user = credentials(broker, role, run)
                settings = librdkafka(Connection(bootstrap=broker.secure, client_id="a", security=user))
                assert written(settings, topics) == may(rules, "topic", "WRITE", topics), (run, role)
                wanted = may(rules, "topic", "READ", topics)
                assert read(settings, topics, wanted=wanted) == wanted, (run, role)
                assert taken(settings, ids) == may(rules, "transactional-id", "WRITE", ids), (run, role)
    finally:
        broker.close()
