"""Each repair of the client library against the fault it repairs, on a real broker; the faults are shown on the library as it is."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.net import transport
from kafka.record.default_records import DefaultRecordBatchBuilder

from penstock.infra.errors import SendFailed, Unrecoverable
from penstock.infra.kafka.client_repairs import faults, private_api
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.kafka.member import KafkaMember
from penstock.topics.catalogue import TopicSpec
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics, outgoing, values_in, write

pytestmark = pytest.mark.costly  # starts processes


@pytest.fixture
def small_topics(log: KafkaLog, run_id: str) -> list[str]:
    """Two topics that refuse records above 1 MB."""
    names = [f"{run_id}.stock", f"{run_id}.repaired"]
    log.create_topics({name: TopicSpec(name=name, partitions=1, configs={"max.message.bytes": "1000000"}) for name in names})
    return names


def shown(fault: str, broker: str, topics: Sequence[str]) -> list[dict[str, Any]]:
    """What `fault` looks like with the library as it is, and repaired; both at once, each in a process and a topic of its own."""
    processes = [
        subprocess.Popen([sys.executable, "-m", "tests.support.stock_faults", fault, how, broker, topic], stdout=subprocess.PIPE, text=True)
        for how, topic in zip(("stock", "repaired"), topics, strict=True)
    ]
    return [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes]


def in_a_process(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A fresh process, in which nothing is repaired yet."""
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_every_replaced_function_of_the_installed_client_has_a_known_source() -> None:
    messages = in_a_process(
        "from penstock.infra.kafka.client_repairs import faults\n"
        "assert set(faults.SOURCES) == {name for names in faults.REPAIRS.values() for name in names}\n"
        "faults.apply(); print(*faults._applied, len(faults.REPAIRS))"
    )
    assert messages.returncode == 0, f"kafka-python has moved; faults.py says what to do:\n{messages.stderr}"
    chosen, *repairs, known = messages.stdout.split()
    assert (chosen, len(repairs)) == ("repaired", int(known))


MOVED = (
    "from kafka.coordinator.consumer import ConsumerCoordinator\n"
    "from penstock.infra.kafka.client_repairs import faults\n"
    "def other(self): return False\n"
    "ConsumerCoordinator.need_rejoin = other\n"
    "faults.source_digest = lambda name, stock=faults.source_digest: 'abc' if 'need_rejoin' in name else stock(name)\n"
)


def test_a_moved_function_is_named_and_nothing_starts() -> None:
    messages = in_a_process(MOVED + "faults.apply()")
    last = messages.stderr.splitlines()[-1]
    assert "Unrecoverable: ConsumerCoordinator.need_rejoin of kafka-python" in last
    assert "(source abc) is not the one that the patch" in last
    assert "install kafka-python==3.0.12, or set PENSTOCK_KAFKA_CLIENT=stock" in last


def test_a_function_without_its_fault_is_left_as_it_is() -> None:
    messages = in_a_process(
        MOVED
        + "faults.FIXED['_running_join_is_remembered'] = ('abc',)\n"
        + "faults.apply(); print(ConsumerCoordinator.need_rejoin is other, *faults._applied)"
    )
    assert messages.stdout.startswith("True repaired "), messages.stderr
    assert "_running_join_is_remembered" not in messages.stdout
    assert "_finished_join_is_used" in messages.stdout


def test_the_client_runs_without_repairs_when_that_is_chosen() -> None:
    program = MOVED + "faults.apply(); print(*faults._applied)"
    assert in_a_process(program, PENSTOCK_KAFKA_CLIENT="stock").stdout == "stock\n"
    assert "choose repaired or stock" in in_a_process(program, PENSTOCK_KAFKA_CLIENT="other").stderr


def test_without_the_fast_checksum_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_applied", [])
    monkeypatch.setattr(faults.record_util, "crc32c_c", None)
    with pytest.raises(Unrecoverable, match="install crc32c"):
        faults.apply()


@pytest.mark.slow
def test_a_join_that_outlasts_a_poll_is_not_forgotten(broker: str, log: KafkaLog, run_id: str) -> None:
    stock, repaired = shown("late_second_join", broker, make_topics(log, run_id, "stock", "repaired", partitions=2))
    assert stock == {"stable": False, "late_joins": True, "owned": 2}
    assert repaired == {"stable": True, "late_joins": True, "owned": 4}


@pytest.mark.slow
def test_a_join_that_ends_between_two_polls_is_used(broker: str, log: KafkaLog, run_id: str) -> None:
    stock, repaired = shown("short_polls", broker, make_topics(log, run_id, "stock", "repaired", partitions=2))
    assert stock["joins"] > 5
    assert repaired["owned"] == 2
    assert repaired["joins"] <= 3


def test_a_large_response_is_read_in_large_pieces(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("small_reads", broker, small_topics)
    assert stock == {"received": 900_000, "more_than_a_page": False}
    assert repaired == {"received": 900_000, "more_than_a_page": True}


@pytest.mark.parametrize("kind", [transport.KafkaTCPTransport, transport.KafkaSSLTransport])
def test_what_arrives_with_the_end_of_the_connection_is_read(kind: Any) -> None:
    faults.apply()
    near, far = socket.socketpair()
    near.setblocking(False)
    far.sendall(b"the reason")
    far.close()
    held = SimpleNamespace(_sock=near)
    assert kind._sock_recv(held) == (b"the reason", None)
    nothing, error = kind._sock_recv(held)
    assert (nothing, str(error)) == (b"", "KafkaConnectionError: socket disconnected")
    near.close()


def test_sending_over_tls_copies_nothing(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("tls_copies", broker, small_topics)
    assert stock == {"sent": 1 << 20, "error": None, "copied_mib": 31}
    assert repaired == {"sent": 1 << 20, "error": None, "copied_mib": 0}


def test_a_batch_that_inflates_without_end_is_refused(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("inflated_batch", broker, small_topics)
    assert stock == {"small": True, "inflated_mib": 65}
    assert repaired == {"small": True, "error": "CorruptRecordError"}


def test_a_leader_that_is_missing_among_the_brokers_for_a_moment_is_read_from_afterwards(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("unlisted_leader", broker, small_topics)
    assert (stock["read"], repaired["read"]) == ([], ["record"])


def test_a_client_opens_although_one_of_its_addresses_sends_nothing(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("silent_broker", broker, small_topics)
    assert stock == {"opened": False, "error": "KafkaTimeoutError"}
    assert repaired == {"opened": True, "partitions": 1}


def test_a_record_the_broker_refuses_does_not_spoil_the_next_ones(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("refused_record", broker, small_topics)
    refused = "MessageSizeTooLargeError"
    assert stock["outcomes"] == ["written", refused, refused, refused]
    assert repaired["outcomes"] == ["written", refused, "written", "written"]


@pytest.mark.slow
def test_a_record_that_is_not_acknowledged_does_not_silence_its_producer(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("stalled_broker", broker, small_topics)
    assert stock["outcomes"][0] == repaired["outcomes"][0] == "written"
    assert "written" not in stock["outcomes"][1:]
    assert repaired["outcomes"][2:] == ["written", "written"]


@pytest.mark.slow
def test_a_header_name_that_is_no_text_does_not_stop_its_reader(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("foreign_header_name", broker, small_topics)
    assert stock["values"] == []
    assert repaired == {"values": ["foreign", "next"], "names": ["??", "name"]}


def test_our_producer_goes_on_after_a_refused_record_and_the_flush_tells_of_it(log: KafkaLog, small_topics: list[str]) -> None:
    producer = log.producer()
    pending = [producer.send(outgoing(small_topics[0], value)) for value in (b"a", bytes(2 << 20), b"b")]
    with pytest.raises(SendFailed, match="cannot write to"):
        producer.flush(WAIT_S)
    assert [pending[0].offset(WAIT_S), pending[2].offset(WAIT_S)] == [0, 1]
    assert pending[1].done()
    with pytest.raises(SendFailed):
        pending[1].offset(0.0)
    producer.flush(WAIT_S)


@pytest.mark.slow
def test_a_committed_transaction_has_all_its_records(broker: str, small_topics: list[str]) -> None:
    stock, repaired = shown("commit_without_its_record", broker, small_topics)
    assert stock == {"committed": ["0", "1", "2"], "found": []}
    assert repaired == {"committed": ["0", "1", "2"], "found": ["0", "1", "2"]}


def test_our_transactions_go_on_after_a_refused_record(log: KafkaLog, small_topics: list[str]) -> None:
    topic, _ = small_topics
    writer = log.transactions("our-transactions-go-on")
    for number in range(2):
        with pytest.raises(SendFailed, match="wrote nothing"):
            writer.commit([outgoing(topic, b"lost"), outgoing(topic, bytes(2 << 20))])
        writer.commit([outgoing(topic, b"%d" % number)])
    writer.close()
    assert values_in(log, topic) == [b"0", b"1"]


def test_a_writer_whose_clock_is_wrong_is_told_to_set_it_at_once(log: KafkaLog, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = f"{run_id}.dated"
    log.create_topics({topic: TopicSpec(name=topic, partitions=1, configs={"message.timestamp.after.max.ms": "3600000"})})
    producer, writer = log.producer(), log.transactions(f"{run_id}.writer")
    clocks = DefaultRecordBatchBuilder.append.__defaults__  # the client holds on to the clock that it found when it was loaded
    wrong = tuple((lambda: time.time() + 86400) if default is time.time else default for default in clocks)
    assert wrong != clocks
    monkeypatch.setattr(DefaultRecordBatchBuilder.append, "__defaults__", wrong)
    began = time.monotonic()
    with pytest.raises(SendFailed, match=rf"cannot write to {topic}/0: .*correct this machine's clock"):
        producer.send(outgoing(topic, b"tomorrow")).offset(WAIT_S)
    with pytest.raises(SendFailed, match=r"the transaction of .* wrote nothing.*correct this machine's clock"):
        writer.commit([outgoing(topic, b"tomorrow")])
    assert time.monotonic() - began < WAIT_S, "neither waits for kafka.give_up_s"
    monkeypatch.undo()
    assert (producer.send(outgoing(topic, b"plain")).offset(WAIT_S), len(writer.commit([outgoing(topic, b"together")]))) == (0, 1)
    producer.close(), writer.close()


def test_a_lone_member_needs_one_join(log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"x"])
    heard = Heard(log.member(f"{run_id}.group", [topic]))
    listen(heard, until=lambda: bool(heard.records))
    heard.events += heard.member.take(1.5)
    assert heard.assigned.membership.generation == 1
    assert len(heard.records) == 1


def test_a_member_without_a_completed_join_is_made_anew_and_waits_longer_each_time(
    log: KafkaLog, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (topic,) = make_topics(log, run_id, "a")
    write(log, topic, [b"x"])
    joined, consumers, made = private_api.has_joined, [], []

    def hangs_twice(consumer: Any) -> bool:
        if consumer not in consumers:
            consumers.append(consumer)
            made.append(time.monotonic())
        return len(consumers) > 2 and joined(consumer)

    monkeypatch.setattr(private_api, "has_joined", hangs_twice)
    member = KafkaMember(log, f"{run_id}.group", [topic], max_records=10, max_bytes=1 << 20, join_limit_s=0.5)
    heard = Heard(member)
    listen(heard, until=lambda: len(consumers) == 3 and len(heard.records) == 3 and len(heard.owned) == 4)
    assert made[1] - made[0] >= 0.5 and made[2] - made[1] >= 1.0
    member.close()
