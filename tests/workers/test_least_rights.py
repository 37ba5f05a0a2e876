"""A whole run on a broker that asks for SCRAM over TLS: each role is a user who may do what `penstock topics acls` prints, and no more."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection, librdkafka
from penstock.infra.log import Log
from penstock.pipeline.audit.kafka_reader import KafkaSource
from penstock.pipeline.audit.report import audit
from penstock.pipeline.launch.acls import all_rules
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.roles import ROLES
from tests.support.crew import Crew, config_of
from tests.support.secured_broker import SecuredBroker

RUN = "least"


class Users(Crew):
    """Workers that connect as the user of their role."""

    def __init__(self, broker: SecuredBroker, run: str) -> None:
        super().__init__(broker.plain, run)
        self.broker = broker

    def _connect(self, role: str, name: str) -> Log:
        return KafkaLog(self.broker.secure, security=credentials(self.broker, role), client_id=f"{self.run}.{name}")


def credentials(broker: SecuredBroker, role: str) -> Mapping[str, Any]:
    return broker.credentials(f"{RUN}-{role}", f"pw-{role}")


def refusals(broker: SecuredBroker, role: str) -> list[str]:
    """What the broker answers a role that writes a foreign topic, takes a foreign transactional id, and empties the ledger."""
    settings = librdkafka(Connection(bootstrap=broker.secure, client_id="intruder", security=credentials(broker, role)))
    told: list[str] = []
    topic = f"{RUN}.run" if role != "launcher" else f"{RUN}.groups"
    producer = Producer(settings)
    producer.produce(topic, b"x", on_delivery=lambda error, _: told.append(error.name() if error else "written"))
    producer.flush(10.0)
    try:
        Producer({**settings, "transactional.id": f"{RUN}.{'feeder' if role == 'trainer' else 'trainer'}"}).init_transactions(10.0)
        told.append("taken")
    except KafkaException as error:
        told.append(error.args[0].name())
    admin = AdminClient(settings)
    (future,) = admin.delete_records([TopicPartition(f"{RUN}.ledger", 0, -1)]).values()
    try:
        future.result(10.0)
        told.append("emptied")
    except KafkaException as error:
        told.append(error.args[0].name())
    return told


@pytest.mark.slow
def test_a_run_is_whole_with_the_least_rights_and_no_role_has_more(new_home: Callable[[], Path], tiny_model: Path, tmp_path: Path) -> None:
    broker = SecuredBroker(new_home())
    try:
        for role, rules in all_rules(RUN).items():
            broker.add_user(f"{RUN}-{role}", f"pw-{role}")
            broker.allow(f"{RUN}-{role}", rules)
        config = config_of(tiny_model, tmp_path, run={"steps": 3, "seed": 7})
        launcher = KafkaLog(broker.secure, security=credentials(broker, "launcher"))
        create(config, log=launcher, run_id=RUN, say=lambda _: None)
        launcher.close()
        with Users(broker, RUN) as crew:
            crew.start_all(config, [role for role in ROLES if role != "evaluator"])
            crew.wait()
            report = crew.report()
        assert (report["status"], report["steps"]) == ("finished", 3)
        reader = librdkafka(Connection(bootstrap=broker.secure, client_id="a", security=credentials(broker, "reader")))
        assert audit(KafkaSource(broker.secure, RUN, settings=reader)).clean
        wanted = ["TOPIC_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"]
        assert {role: refusals(broker, role) for role in all_rules(RUN)} == dict.fromkeys(all_rules(RUN), wanted)
    finally:
        broker.close()
