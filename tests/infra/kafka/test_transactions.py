"""Transactions on a real broker when the answer to the commit is lost, when they take too long, and while they are open."""

import subprocess
import sys
import time
from typing import Any

import pytest
from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError

from penstock.infra.errors import Fenced, LogError, OutcomeUnknown
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.wire.record import Outgoing
from tests.support.bare_clients import python_client
from tests.support.children import child
from tests.support.containers import contained, containers_work
from tests.support.log_helpers import WAIT_S, make_topics, outgoing, values_in
from tests.support.paths import ROOT


@pytest.fixture
def topic(log: KafkaLog, run_id: str) -> str:
    (name,) = make_topics(log, run_id, "a", partitions=1)
    return name


def lose_one_answer(monkeypatch: pytest.MonkeyPatch, *, after_commit: bool) -> None:
    """The next commit gets no answer: it is lost on its way back, or already on its way there."""
    commit, lost = private_api.commit_transaction, []

    def commit_transaction(producer: Any, timeout_s: float) -> None:
        if lost:
            commit(producer, timeout_s)
            return
        lost.append(True)
        if after_commit:
            commit(producer, timeout_s)
        raise KafkaTimeoutError("no answer")

    monkeypatch.setattr(private_api, "commit_transaction", commit_transaction)


@pytest.mark.parametrize("after_commit", [True, False])
def test_a_commit_without_an_answer_is_looked_up_and_done_once(
    log: KafkaLog, topic: str, run_id: str, monkeypatch: pytest.MonkeyPatch, after_commit: bool
) -> None:
    writer = log.transactions(f"{run_id}.writer")
    writer.commit([outgoing(topic, b"0")])
    lose_one_answer(monkeypatch, after_commit=after_commit)
    offsets = writer.commit([outgoing(topic, b"1"), outgoing(topic, b"2")])
    writer.commit([outgoing(topic, b"3")])
    assert [record.value for record in log.read(topic, 0, offsets)] == [b"1", b"2"]
    assert values_in(log, topic) == [b"0", b"1", b"2", b"3"]


def test_a_commit_that_cannot_be_looked_up_is_unknown_and_the_writer_goes_on(
    log: KafkaLog, topic: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = log.transactions(f"{run_id}.writer")
    lose_one_answer(monkeypatch, after_commit=True)

    def unreadable(*_: object) -> bool:
        raise LogError("cannot be read")

    monkeypatch.setattr(writer, "_visible", unreadable)
    with pytest.raises(OutcomeUnknown, match="it may or may not be written"):
        writer.commit([outgoing(topic, b"1")])
    writer.commit([outgoing(topic, b"2")])
    assert values_in(log, topic) == [b"1", b"2"]


@pytest.mark.slow
def test_a_transaction_that_overstays_its_time_is_done_again_not_taken_for_a_foreign_one(
    log: KafkaLog, topic: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = log.transactions(f"{run_id}.writer", timeout_s=1)
    commit, attempts = private_api.commit_transaction, []

    def slow_at_first(producer: Any, timeout_s: float) -> None:
        attempts.append(timeout_s)
        if len(attempts) == 1:
            time.sleep(3)  # the broker looks for overdue transactions each second
        commit(producer, 10)

    monkeypatch.setattr(private_api, "commit_transaction", slow_at_first)
    (offset,) = writer.commit([outgoing(topic, b"once")])
    assert len(attempts) == 2
    assert [record.offset for record in log.read(topic, 0, [offset])] == [offset]
    assert values_in(log, topic) == [b"once"]


def claim_of(topic: str, token: bytes) -> Outgoing:
    return outgoing(topic, token, key=b"owner", partition=1)


@pytest.fixture
def claimed(log: KafkaLog, run_id: str) -> str:
    (name,) = make_topics(log, run_id, "claimed", partitions=2)
    return name


def test_a_writer_whose_own_renewal_was_done_but_not_answered_is_not_taken_for_fenced(log: KafkaLog, claimed: str, run_id: str) -> None:
    """A broker that dies between raising the epoch and answering leaves exactly this behind."""
    writer = log.transactions(f"{run_id}.writer", claim=claim_of(claimed, b"us"))
    writer.commit([outgoing(claimed, b"1")])
    writer._drop()
    identity = writer._identity
    for _ in range(2):  # a broker that has not been restarted still knows the epoch before the newest
        renewed = KafkaProducer(**writer._configs)
        private_api.init_transactions(renewed, identity, 10.0)
        identity = private_api.producer_identity(renewed)
        private_api.close_producer(renewed, 3.0)
    writer.commit([outgoing(claimed, b"2")])
    assert values_in(log, claimed) == [b"1", b"2"]


@pytest.mark.parametrize("claims", [True, False])
def test_a_writer_that_lost_an_answer_does_not_take_the_id_back_from_its_successor(
    log: KafkaLog, claimed: str, run_id: str, monkeypatch: pytest.MonkeyPatch, claims: bool
) -> None:
    old = log.transactions(f"{run_id}.writer", claim=claim_of(claimed, b"old") if claims else None)
    old.commit([outgoing(claimed, b"old")])
    new: list[Any] = []

    def succeeded_meanwhile(*_: object) -> None:
        monkeypatch.undo()
        new.append(log.transactions(f"{run_id}.writer", claim=claim_of(claimed, b"new") if claims else None))
        raise KafkaTimeoutError("no answer")

    monkeypatch.setattr(private_api, "commit_transaction", succeeded_meanwhile)
    for _ in range(2):
        with pytest.raises(Fenced):
            old.commit([outgoing(claimed, b"zombie")])
    new[0].commit([outgoing(claimed, b"new")])
    assert values_in(log, claimed) == [b"old", b"new"]
    new[0].close()


def test_of_a_writer_and_one_that_has_taken_the_id_but_not_claimed_it_exactly_one_goes_on(log: KafkaLog, claimed: str, run_id: str) -> None:
    """The newcomer holds a fresh epoch and dies, or is slow, before its claim stands: the writer may renew its own and goes on."""
    writer = log.transactions(f"{run_id}.writer", claim=claim_of(claimed, b"us"))
    newcomer = KafkaProducer(**writer._configs)
    newcomer.init_transactions()
    writer.commit([outgoing(claimed, b"1")])
    newcomer.begin_transaction()
    with pytest.raises(KafkaError):
        newcomer.send(claimed, b"late", partition=1, key=b"owner").get(WAIT_S)
    private_api.close_producer(newcomer, 0)
    writer.commit([outgoing(claimed, b"2")])
    assert values_in(log, claimed) == [b"1", b"2"]


_WRITES_UNTIL_FENCED = """
import os, sys
from penstock.infra.errors import Fenced
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.wire.record import Outgoing

bootstrap, writer, topic, token = sys.argv[1:]
claim = Outgoing(topic=topic, partition=1, key=b"owner", headers=(), value=token.encode())
transactions = KafkaLog(bootstrap).transactions(writer, claim=claim)
print("open", os.getpid(), flush=True)
for line in sys.stdin:
    try:
        transactions.commit([Outgoing(topic=topic, partition=0, key=None, headers=(), value=token.encode())])
        print("written", flush=True)
    except Fenced:
        print("fenced", flush=True)
"""


def lines_of(process: "subprocess.Popen[str]", line: str | None = None) -> str:
    """The next line that a process prints, after it was given one."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.skipif(not containers_work(), reason="this system lets nobody make PID namespaces here")
def test_two_processes_with_the_same_pid_do_not_take_each_other_for_themselves(
    broker: str, log: KafkaLog, claimed: str, run_id: str
) -> None:
    arguments = (_WRITES_UNTIL_FENCED, broker, f"{run_id}.writer", claimed)
    with contained([sys.executable, "-c", *arguments, "old"]) as old:
        assert lines_of(old) == "open 1"
        assert lines_of(old, "\n") == "written"
        with contained([sys.executable, "-c", *arguments, "new"]) as new:
            assert lines_of(new) == "open 1"
            said = [(lines_of(new, "\n"), lines_of(old, "\n")) for _ in range(3)]
            new.kill()
        old.kill()
    assert said == [("written", "fenced")] * 3
    assert values_in(log, claimed) == [b"old", b"new", b"new", b"new"]


def test_a_dead_writers_open_transaction_is_ended_by_the_next_one_at_once(broker: str, log: KafkaLog, topic: str, run_id: str) -> None:
    dead = KafkaProducer(**python_client(broker), transactional_id=f"{run_id}.writer", retry_backoff_ms=2)
    dead.init_transactions()
    dead.begin_transaction()
    dead.send(topic, b"half", partition=0).get(WAIT_S)
    began = time.monotonic()
    writer = log.transactions(f"{run_id}.writer")
    writer.commit([outgoing(topic, b"whole")])
    assert values_in(log, topic) == [b"whole"]
    assert time.monotonic() - began < 40  # below the dead one's own time limit of a minute
    dead.close(0)


_HANGS_IN_ITS_TRANSACTION = """
import sys, time
from penstock.infra.kafka.client_repairs import private_api as internals
from penstock.infra.kafka.log import KafkaLog
from penstock.topics.wire.record import Outgoing

def hang(*_):
    print("open", flush=True)
    time.sleep(600)

bootstrap, writer, topic, partition = sys.argv[1:]
internals.commit_transaction = hang
KafkaLog(bootstrap).transactions(writer).commit([Outgoing(topic=topic, partition=int(partition), key=None, headers=(), value=b"half")])
"""


def killed_inside_its_transaction(broker: str, writer: str, topic: str, partition: int) -> None:
    """A process writes as `writer`, gets its record acknowledged, and is killed before it commits."""
    command = [sys.executable, "-c", _HANGS_IN_ITS_TRANSACTION, broker, writer, topic, str(partition)]
    with child(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"


def readable_after_s(log: KafkaLog, place: tuple[str, int]) -> float:
    """Seconds until readers of committed records get past everything that stands in a partition."""
    began = time.monotonic()
    while log.end_offsets([place]) != log.end_offsets([place], committed=False):
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_killed_writer_holds_readers_up_for_15_s_at_most_and_not_at_all_once_it_is_back(broker: str, log: KafkaLog, run_id: str) -> None:
    (topic,) = make_topics(log, run_id, "a", partitions=2)
    gone, back = (topic, 0), (topic, 1)
    killed_inside_its_transaction(broker, f"{run_id}.gone", *gone)
    began = time.monotonic()
    killed_inside_its_transaction(broker, f"{run_id}.back", *back)
    returned = time.monotonic()
    log.transactions(f"{run_id}.back")
    assert readable_after_s(log, back) < 2
    assert time.monotonic() - returned < 4  # a client is made meanwhile
    assert log.end_offsets([gone]) != log.end_offsets([gone], committed=False)
    readable_after_s(log, gone)
    assert time.monotonic() - began < 15
    assert values_in(log, topic) == []
