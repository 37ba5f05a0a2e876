"""Power loss: what the broker acknowledged is on disk, whoever it was acknowledged to."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.broker import settings
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Committed, Pending
from tests.support import power_loss
from tests.support.log_helpers import WAIT_S, Heard, listen, make_topics, outgoing, values_in
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(power_loss.COMPILER is None, reason="needs a C compiler: a library in Java notes what was synced")


def write_until_the_power_fails(broker: power_loss.PowerBroker, log: KafkaLog, topic: str) -> list[bytes]:
    """Kill the broker while single records are written, one after the other; returns those that were acknowledged before."""
    producer, sent, stop = log.producer(linger_ms=0), list[tuple[bytes, Pending]](), threading.Event()

    def write() -> None:
        while not stop.is_set():
            value = os.urandom(3000)
            sent.append((value, producer.send(outgoing(topic, value))))
            stop.wait(0.002)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    until(lambda: sum(pending.done() for _, pending in sent) >= 100, limit_s=WAIT_S)
    acknowledged = [value for value, pending in sent if pending.done()]
    broker.kill()
    stop.set()
    writer.join(WAIT_S)
    producer.close(0)
    return acknowledged


@pytest.mark.slow
def test_everything_that_was_acknowledged_survives_a_power_loss(new_home: Callable[[], Path], tmp_path: Path) -> None:
    broker = power_loss.PowerBroker(new_home(), tmp_path)
    log = KafkaLog(broker.start())
    plain, transactional, grouped = make_topics(log, "r", "plain", "transactional", "grouped", partitions=1)
    heard = Heard(log.member("r.group", [grouped]))
    listen(heard, until=lambda: bool(heard.owned))
    membership = heard.member.membership()
    writer = log.transactions("r.writer")
    for number in range(3):
        writer.commit([outgoing(transactional, b"%d" % number)], offsets={(grouped, 0): (number, "in a transaction")}, member=membership)
    alone = log.tail({(plain, 0): 0}, group="r.alone")
    alone.commit({(plain, 0): (7, "by itself")})
    acknowledged = write_until_the_power_fails(broker, log, plain)
    taken = broker.cut()
    assert taken[".index"] > 0
    for client in (heard.member, writer, alone, log):
        client.close(0) if client is not log else client.close()

    again = KafkaLog(broker.start())
    there = values_in(again, plain)
    assert there[: len(acknowledged)] == acknowledged
    assert values_in(again, transactional) == [b"0", b"1", b"2"]
    alone, grouped_again = again.tail({(plain, 0): 0}, group="r.alone"), again.tail({(grouped, 0): 0}, group="r.group")
    assert alone.committed() == {(plain, 0): Committed(offset=7, metadata="by itself")}
    assert grouped_again.committed() == {(grouped, 0): Committed(offset=2, metadata="in a transaction")}
    writer = again.transactions("r.writer")
    writer.commit([outgoing(transactional, b"3")])
    assert values_in(again, transactional) == [b"0", b"1", b"2", b"3"]
    for client in (alone, grouped_again, writer):
        client.close()
    again.close()
    broker.kill()


@pytest.mark.slow
def test_a_broker_that_leaves_writing_to_the_operating_system_loses_records(
    new_home: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(settings._DISK, "log.flush.interval.messages")
    broker = power_loss.PowerBroker(new_home(), tmp_path)
    log = KafkaLog(broker.start())
    (topic,) = make_topics(log, "r", "plain", partitions=1)
    acknowledged = write_until_the_power_fails(broker, log, topic)
    assert broker.cut()[".log"] > 0
    log.close()
    again = KafkaLog(broker.start())
    assert len(values_in(again, topic)) < len(acknowledged)
    again.close()
    broker.kill()
