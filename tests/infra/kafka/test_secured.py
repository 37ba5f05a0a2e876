"""A broker that asks who one is: SCRAM over TLS, OAUTHBEARER, and one line for who is not let in."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from penstock.infra.errors import LogError, LogUnreachable
from penstock.infra.kafka.bulk import BulkReader
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection, Tokens, expires_s, librdkafka
from penstock.pipeline.runtime.roles import AclRule
from tests.support.log_helpers import closed_at_end, make_topics, outgoing, values_in, write
from tests.support.refusals import one_line
from tests.support.secured_broker import REAUTH_MS, SecuredBroker, unsecured_token


@pytest.fixture(scope="module")
def secured(new_home: Callable[[], Path]) -> Iterator[SecuredBroker]:
    broker = SecuredBroker(new_home())
    yield broker
    broker.close()


def made(broker: SecuredBroker, name: str) -> str:
    """A topic that the broker's own user has made."""
    with closed_at_end(KafkaLog(broker.plain)) as log:
        return make_topics(log, name, "a", partitions=1)[0]


def goes_both_ways(bootstrap: str, security: Mapping[str, Any], topic: str) -> bool:
    """Whether both clients pass: kafka-python writes and reads, librdkafka reads."""
    with closed_at_end(KafkaLog(bootstrap, security=security)) as log:
        before = len(values_in(log, topic))
        write(log, topic, [b"one"])
        (records,) = BulkReader(log.connection).read(topic, 0, first=before, end=before + 1)
        return values_in(log, topic)[before:] == [b"one"] == [record.value for record in records]


def test_who_has_a_password_or_a_token_is_let_in_by_both_clients_and_others_get_one_line(secured: SecuredBroker, tmp_path: Path) -> None:
    topic = made(secured, "r")
    secured.add_user("ann", "right")
    for user in ("ann", "carl"):
        secured.allow(user, [AclRule("topic", "r.a", "literal", operation) for operation in ("READ", "WRITE")])
        secured.allow(user, [AclRule("group", "penstock-bulk", "literal", "DESCRIBE")])
    assert goes_both_ways(secured.secure, secured.credentials("ann", "right"), topic)

    began = time.monotonic()
    with one_line(LogUnreachable, "invalid credentials") as refused:
        KafkaLog(secured.secure, security=secured.credentials("ann", "wr0ng"), unreachable_after_s=3.0)
    assert time.monotonic() - began < 60
    assert "wr0ng" not in str(refused.value)

    token, program = tmp_path / "token", tmp_path / "token.py"
    token.write_text(unsecured_token("carl") + "\n")
    program.write_text(f"print(open({str(token)!r}).read())\n")
    oauth = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}
    assert goes_both_ways(secured.oauth, {**oauth, "sasl_oauth_token_file": str(token)}, topic)
    command = shlex.join([sys.executable, str(program)])
    assert goes_both_ways(secured.oauth, {**oauth, "sasl_oauth_token_command": command}, topic)


def test_a_worker_whose_token_expires_continues_with_a_new_one_on_every_client(secured: SecuredBroker, tmp_path: Path) -> None:
    topic = made(secured, "renewed")
    rights = [("topic", topic, "READ"), ("topic", topic, "WRITE"), ("transactional-id", "renewed", "WRITE")]
    secured.allow("dora", [AclRule(resource, name, "literal", operation) for resource, name, operation in rights])
    issued, program = tmp_path / "issued", tmp_path / "token.py"
    program.write_text(f"print('x', file=open({str(issued)!r}, 'a'))\nprint(open({str(tmp_path / 'token')!r}).read())\n")
    (tmp_path / "token").write_text(unsecured_token("dora"))
    command = {"sasl_oauth_token_command": shlex.join([sys.executable, str(program)])}
    log = KafkaLog(secured.oauth, security={"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER", **command})
    producer, transactions, tail = log.producer(), log.transactions("renewed"), log.tail({(topic, 0): "earliest"})
    sent, received = list[bytes](), list[bytes]()
    end = time.monotonic() + 3 * REAUTH_MS / 1000
    while time.monotonic() < end:
        for write_one in (lambda record: producer.send(record).offset(30.0), lambda record: transactions.commit([record])):
            sent.append(f"{len(sent)}".encode())
            write_one(outgoing(topic, sent[-1]))
        received += [bytes(record.value) for record in tail.poll(0.2)]
    received += [bytes(record.value) for record in tail.read_to_end(include_open=True)]
    assert received == sent
    assert log.partitions(topic) == 1
    for client in (producer, transactions, tail, log):
        client.close()


def test_a_certificate_lets_in_both_clients_and_a_new_one_is_read_by_the_next_connection(secured: SecuredBroker) -> None:
    topic = made(secured, "mutual")
    secured.allow("CN=eve", [AclRule("topic", topic, "literal", operation) for operation in ("READ", "WRITE")])
    secured.allow("CN=eve", [AclRule("group", "penstock-bulk", "literal", "DESCRIBE")])
    with pytest.raises(LogUnreachable, match=f"TLS handshake with the broker at {secured.mutual} failed"):
        KafkaLog(secured.mutual, security={"security_protocol": "SSL", "ssl_cafile": str(secured.certificate)}, unreachable_after_s=3.0)
    eve, mallory = secured.certify("eve"), secured.certify("mallory")
    assert goes_both_ways(secured.mutual, eve, topic)
    log = KafkaLog(secured.mutual, security=eve)
    assert log.describe([topic])[topic].partitions == 1
    files = [(Path(eve[name]), Path(mallory[name])) for name in ("ssl_certfile", "ssl_keyfile")]
    for ours, theirs in files:
        ours.write_bytes(theirs.read_bytes())
    assert log.describe([topic])[topic].partitions == 1  # its connection is up
    assert log._client is not None
    for node in list(log._client._manager._conns):
        log._client._manager.close(node)  # as a broker's restart does; the client connects again
    with pytest.raises(LogError, match="TopicAuthorizationFailed"):  # mallory may not see it
        log.describe([topic])
    log.close()


def test_a_token_that_cannot_be_had_is_one_line_that_does_not_hold_it(tmp_path: Path) -> None:
    for security, said in (
        ({"sasl_oauth_token_file": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"sasl_oauth_token_command": "false"}, "ended with status 1"),
        ({"sasl_oauth_token_command": "echo two words"}, "returned no OAuth token"),
        ({"sasl_oauth_token_command": "/no/such/program"}, "cannot be started"),
    ):
        with pytest.raises(LogError, match=said):
            Tokens(security).token()
    with pytest.raises(ValueError, match="OAUTHBEARER needs sasl_oauth_token_file or"):
        KafkaLog("127.0.0.1:9092", security={"sasl_mechanism": "OAUTHBEARER"})


@pytest.mark.parametrize("mechanism", ["GSSAPI", "AWS_MSK_IAM", "", "scram"])
def test_a_mechanism_that_only_one_of_the_clients_has_is_refused_before_anybody_connects(mechanism: str) -> None:
    with pytest.raises(ValueError, match=rf"sasl_mechanism='{mechanism}' is not supported; choose PLAIN, SCRAM-SHA-256, "):
        KafkaLog("127.0.0.1:1", security={"security_protocol": "SASL_SSL", "sasl_mechanism": mechanism})


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_mechanism_that_is_not_refused_is_one_that_librdkafka_was_built_with(mechanism: str) -> None:
    security = {"security_protocol": "SASL_SSL", "sasl_mechanism": mechanism, "sasl_plain_username": "a", "sasl_plain_password": "b"}
    Consumer({**librdkafka(Connection(bootstrap="h:1", client_id="c", security=security)), "group.id": "x"}).close()


def test_the_end_of_a_token_is_read_from_it() -> None:
    assert expires_s(unsecured_token("ann")) == pytest.approx(time.time() + 600, abs=30)
    assert [expires_s(text) for text in ("", "opaque", "a.b.c", "a.e30.c")] == [None] * 4


@pytest.mark.parametrize(("given", "checked"), [("false", "none"), (False, "none"), ("No", "none"), ("True", "https"), (True, "https")])
def test_security_settings_get_the_names_that_librdkafka_knows(given: Any, checked: str) -> None:
    security = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "ann",
        "sasl_plain_password": "secret",
        "ssl_check_hostname": given,
    }
    found = librdkafka(Connection(bootstrap="h:1", client_id="c", security=security))
    assert found["sasl.password"] == "secret"
    assert found["ssl.endpoint.identification.algorithm"] == checked
    Consumer({**found, "group.id": "x"}).close()  # refuses a name it does not know


def test_a_broker_that_sends_its_clients_to_an_address_out_of_reach_is_one_line(secured: SecuredBroker) -> None:
    with pytest.raises(LogUnreachable) as refused:
        KafkaLog(secured.astray)
    assert re.fullmatch(
        rf"the broker at {secured.astray} responds, but tells its clients to connect to broker-0\.kafka\.invalid:9092, which this machine "
        r"cannot reach \([^)]+\): set advertised\.listeners in the brokers' configuration to addresses that clients reach",
        str(refused.value),
    )


def test_a_connection_that_a_listener_refuses_is_one_line_with_the_cause(secured: SecuredBroker, tmp_path: Path) -> None:
    certified, no_text = secured.certify("erin"), tmp_path / "no.pem"
    no_text.write_text("no certificate")
    anonymous = {name: value for name, value in certified.items() if name not in ("ssl_certfile", "ssl_keyfile")}
    cases: list[tuple[str, Mapping[str, Any], str]] = [
        (secured.mutual, {}, r"cannot reach .* \(its listener has TLS: set security_protocol to SSL or SASL_SSL\)"),
        (secured.oauth, certified, r"TLS handshake .* failed \(EOF .*\): .* that this listener has TLS$"),
        (secured.mutual, anonymous, r"TLS handshake .* failed \(.* alert .*certificate.*\)"),
        (secured.mutual, {**certified, "ssl_cafile": str(no_text)}, r"TLS handshake .* failed \(no certificate or crl found\)"),
    ]
    for bootstrap, security, message in cases:
        with one_line(LogUnreachable, match=message):
            KafkaLog(bootstrap, security=security, unreachable_after_s=3.0)
    with pytest.raises(LogError, match=r"^kafka security setting ssl_keyfile: /no/such\.key does not exist or cannot be read$"):
        KafkaLog(secured.mutual, security={**certified, "ssl_keyfile": "/no/such.key"})
