"""A broker that is not there, goes away and comes back: who waits, who gives up, and that nothing hangs."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.infra.broker import access
from penstock.infra.errors import LogError, LogUnreachable, OutcomeUnknown, SendFailed
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.settings import Connection
from penstock.infra.log import Committed
from tests.support.log_helpers import WAIT_S, Heard, closed_at_end, listen, make_topics, outgoing, values_in
from tests.support.own_broker import OwnBroker
from tests.support.waiting import until


@pytest.fixture
def log(own_broker: OwnBroker) -> Iterator[KafkaLog]:
    with closed_at_end(KafkaLog(own_broker.start(), unreachable_after_s=5)) as opened:
        yield opened


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run `work` on a thread; its value, or what it raised, is put into the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except LogError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def refused_at(bootstrap: str, **options: object) -> str:
    """The message with which a log that cannot be opened says so."""
    with pytest.raises(LogUnreachable) as caught:
        KafkaLog(bootstrap, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_where_nothing_listens_one_line_says_so_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    message = refused_at(f"127.0.0.1:{port}")
    assert message.startswith(f"cannot reach a Kafka broker at 127.0.0.1:{port} (Connection refused)")
    assert message.endswith("start one with `penstock broker start` or set kafka.bootstrap")
    assert "\n" not in message


def test_an_unknown_host_is_named() -> None:
    assert "no-such-host.invalid:9092" in refused_at("no-such-host.invalid:9092")


@pytest.mark.parametrize("bootstrap", ["127.0.0.1", "", ":9092", "host:kafka", "host:0", "host:70000", "one:9092,two"])
def test_a_malformed_address_is_refused_before_anything_is_tried(bootstrap: str) -> None:
    with pytest.raises(ValueError, match=f"^kafka.bootstrap is {bootstrap!r}, expected HOST:PORT"):
        KafkaLog(bootstrap)


def test_security_settings_are_parsed_once_for_every_client() -> None:
    for given, checked in (("false", False), ("No", False), (False, False), ("True", True), (True, True)):
        security = {"ssl_check_hostname": given, "sasl_mechanism": "PLAIN"}
        parsed = Connection(bootstrap="[::1]:9092,b:1", client_id="c", security=security).security
        assert parsed == {"ssl_check_hostname": checked, "sasl_mechanism": "PLAIN"}
    with pytest.raises(ValueError, match="ssl_check_hostname='maybe' is neither true nor false"):
        KafkaLog("127.0.0.1:9092", security={"ssl_check_hostname": "maybe"})
    with pytest.raises(ValueError, match="'sasl_password' is unknown"):
        KafkaLog("127.0.0.1:9092", security={"sasl_password": "x"})


def test_a_listener_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = set(threading.enumerate())
        assert "cannot reach a Kafka broker" in refused_at(f"127.0.0.1:{server.getsockname()[1]}", unreachable_after_s=1.5)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


def test_at_the_own_broker_its_login_counts_whatever_is_given_and_others_get_one_line(
    own_broker: OwnBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = own_broker.start()
    security = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-256", "sasl_plain_username": "penstock"}
    security["sasl_plain_password"] = "wr0ng"
    for own in (bootstrap, bootstrap.replace("127.0.0.1", "localhost")):
        KafkaLog(own, security=security, unreachable_after_s=30).close()
    monkeypatch.setattr(access, "started", set())
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    for patience_s in (2, 10, 60):  # a busy broker's refusal takes its time
        message = refused_at(bootstrap, security=security, unreachable_after_s=patience_s)
        assert "wr0ng" not in message
        if "cannot reach" not in message:
            break
    assert re.match(r"the broker at \S+ refuses the login \(Authentication failed .*\): check the credentials in", message)
    message = refused_at(bootstrap, unreachable_after_s=2)
    assert "cannot reach a Kafka broker" in message
    assert "PENSTOCK_SECURITY" in message
    assert "\n" not in message


def test_everybody_survives_a_broker_that_is_killed_and_comes_back(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b", partitions=1)
    tail, producer, writer = log.tail({(a, 0): "earliest"}), log.producer(), log.transactions(f"{run_id}.writer", timeout_s=4)
    heard = Heard(log.member(f"{run_id}.group", [a]))
    producer.send(outgoing(a, b"before")).offset(WAIT_S)
    writer.commit([outgoing(b, b"before")])
    listen(heard, until=lambda: len(heard.records) == 1)
    seen = tail.read_to_end(WAIT_S)

    own_broker.kill()
    pending = producer.send(outgoing(a, b"meanwhile"))
    committing, committed = in_background(lambda: writer.commit([outgoing(b, b"meanwhile")]))
    assert heard.member.commit({(a, 0): (1, "noted in the outage")})
    deadline = time.monotonic() + WAIT_S
    while tail.outage_s < 2 or heard.member.outage_s < 1:
        assert time.monotonic() < deadline
        seen += tail.poll(0.2)
        heard.events += heard.member.take(0.2)
    assert not pending.done()

    own_broker.start()
    assert pending.offset(WAIT_S) == 1
    committing.join(WAIT_S)
    assert len(committed) == 1  # its offset tells nothing: an attempt that the broker's return cut short leaves a marker before it
    producer.send(outgoing(a, b"after")).offset(WAIT_S)
    until(lambda: seen.extend(tail.poll(0.5)) or len(seen) >= 3, limit_s=WAIT_S)
    assert [record.value for record in seen] == [b"before", b"meanwhile", b"after"]
    assert values_in(log, b) == [b"before", b"meanwhile"]
    listen(heard, until=lambda: {record.offset for record in heard.records} == {0, 1, 2})
    assert (tail.outage_s, heard.member.outage_s) == (0.0, 0.0)


@pytest.mark.slow
def test_all_clients_give_up_after_the_same_time_and_the_outage_is_said_once(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    a, b = make_topics(log, run_id, "a", "b", partitions=1)
    said: list[str] = []
    log.wait_out(8.0, notify=said.append)
    tail, producer, writer = log.tail({(a, 0): "earliest"}), log.producer(), log.transactions(f"{run_id}.writer", timeout_s=2)
    heard = Heard(log.member(f"{run_id}.group", [a]))
    producer.send(outgoing(a, b"before")).offset(WAIT_S)
    writer.commit([outgoing(b, b"before")])
    listen(heard, until=lambda: len(heard.records) == 1)
    tail.read_to_end(WAIT_S)
    producer.check()

    own_broker.kill()
    began = time.monotonic()
    lost = producer.send(outgoing(a, b"meanwhile"))

    def until_it_ends(turn: Callable[[], object]) -> tuple[str, float]:
        while time.monotonic() - began < WAIT_S:
            try:
                turn()
            except LogError as error:
                return str(error), time.monotonic() - began
        raise AssertionError("does not give up")

    turns: dict[str, Callable[[], object]] = {
        "tail": lambda: tail.poll(0.5),
        "member": lambda: heard.member.take(0.5),
        "writer": lambda: writer.commit([outgoing(b, b"meanwhile")]),
        "producer": lambda: (time.sleep(0.2), producer.check()),
        "log": lambda: log.end_offsets([(a, 0)]),
    }
    ends = {name: in_background(lambda turn=turn: until_it_ends(turn)) for name, turn in turns.items()}
    for name, (thread, outcome) in ends.items():
        thread.join(WAIT_S)
        message, seconds = outcome[0]  # type: ignore[misc]
        assert "\n" not in message
        assert 7 < seconds < 13, (name, seconds, message)
    with pytest.raises(OutcomeUnknown):
        lost.offset(0.0)
    own_broker.start()
    log.end_offsets([(a, 0)])
    until(lambda: len(said) >= 2, lambda: said, limit_s=WAIT_S)
    assert "has not responded for" in said[0]
    assert "8 s at most" in said[0]
    assert "responds again, after" in said[1]
    for client in (tail, producer, writer, heard.member):
        client.close()
    assert len(said) == 2


@pytest.mark.slow
def test_a_frozen_broker_is_an_outage_though_its_connections_stand(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    tail, heard = log.tail({(topic, 0): "earliest"}), Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: bool(heard.owned))
    for _ in range(4):
        tail.poll(0.5)
        assert (tail.outage_s, heard.member.outage_s) == (0.0, 0.0)
    own_broker.freeze()
    try:
        until(lambda: tail.poll(0.5) == [] and tail.outage_s and heard.member.outage_s, limit_s=WAIT_S)
    finally:
        own_broker.thaw()
    until(lambda: tail.poll(0.5) == [] and not (tail.outage_s or heard.member.outage_s), limit_s=WAIT_S)


@pytest.mark.slow
def test_a_commit_made_in_an_outage_is_noted_afterwards(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: bool(heard.owned))
    own_broker.freeze()
    assert heard.member.commit({(topic, 0): (7, "late")})
    time.sleep(1.0)
    own_broker.thaw()
    tail = log.tail({(topic, 0): "earliest"}, group=f"{run_id}.group")
    until(lambda: tail.committed()[topic, 0] == Committed(offset=7, metadata="late"), limit_s=WAIT_S)


@pytest.mark.slow
def test_a_producer_blocks_while_its_budget_is_used_up_and_gives_up_in_time(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    producer = log.producer(max_in_flight_bytes=1 << 20, give_up_s=2)
    producer.send(outgoing(topic, b"first")).offset(WAIT_S)
    patient = log.producer(max_in_flight_bytes=1 << 20, give_up_s=60)
    patient.send(outgoing(topic, b"second")).offset(WAIT_S)
    own_broker.freeze()
    try:
        pending = producer.send(outgoing(topic, bytes(800_000)))
        began = time.monotonic()
        with contextlib.suppress(SendFailed):  # or the first record is given up and makes room just before
            producer.send(outgoing(topic, bytes(800_000)))
        assert 1 < time.monotonic() - began < 30
        with pytest.raises(OutcomeUnknown, match="cannot write to"):
            pending.offset(5)
        patient.send(outgoing(topic, bytes(800_000)))
        blocked, outcome = in_background(lambda: patient.send(outgoing(topic, bytes(800_000))).offset(WAIT_S))
        blocked.join(0.5)
        assert blocked.is_alive()
    finally:
        own_broker.thaw()
    blocked.join(WAIT_S)
    assert isinstance(outcome[0], int)
    deadline, again = time.monotonic() + WAIT_S, None
    while again is None:  # the same producer goes on: stock would time out for ever after a batch that was given up
        assert time.monotonic() < deadline
        with contextlib.suppress(OutcomeUnknown):
            again = producer.send(outgoing(topic, b"again")).offset(WAIT_S)
    began = time.monotonic()
    producer.close()
    patient.close()
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_with_a_dead_broker_every_close_and_every_new_client_ends_in_seconds(own_broker: OwnBroker, log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=1)
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    tail, producer, writer = log.tail({(topic, 0): "earliest"}), log.producer(), log.transactions(f"{run_id}.writer")
    log.read(topic, 0, [producer.send(outgoing(topic, b"x")).offset(WAIT_S)])
    listen(heard, until=lambda: bool(heard.owned))
    own_broker.kill()
    producer.send(outgoing(topic, b"never written"))
    with pytest.raises(LogError, match="not acknowledged after"):
        producer.flush(0.5)
    log.wait_out(1.0)
    made = {
        "tail": lambda: log.tail({(topic, 0): 0}),
        "member": lambda: log.member(f"{run_id}.group", [topic]),
        "producer": log.producer,
        "transactions": lambda: log.transactions(f"{run_id}.other"),
        "offsets": lambda: log.end_offsets([(topic, 0)]),
        "read": lambda: log.read(topic, 0, [1]),
    }
    for name, make in made.items():
        began = time.monotonic()
        with pytest.raises(LogUnreachable, match=r"cannot reach a Kafka broker|has not responded for 1 s"):
            make()
        assert time.monotonic() - began < 60, name
    for client in (heard.member, tail, producer, writer, log):
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 40, client
