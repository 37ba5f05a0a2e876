"""A place has one owner at a time: rivals see each other in the log, and one that was fenced never fences its successor."""

import threading
import time
from typing import Any

import pytest

from penstock.infra.errors import Fenced
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime import leases
from penstock.pipeline.runtime.leases import WriterLease, new_token, process_token
from penstock.topics.catalogue import topics_of
from penstock.topics.wire.record import Outgoing

RUN = "places"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    made = MemoryLog()
    made.create_topics(topics_of(RUN, partitions=1))
    return made


def lease_of(
    log: MemoryLog, *, writer: str = "trainer", watch_s: float = 0.3, ended: frozenset[str] = frozenset(), **more: Any
) -> WriterLease:
    return WriterLease(log=log, run=RUN, writer=writer, token=new_token(), ended=ended, watch_s=watch_s, **more)


def entry(value: bytes) -> list[Outgoing]:
    return [Outgoing(topic=f"{RUN}.ledger", partition=0, key=None, headers=(), value=value)]


def test_a_place_whose_owner_is_alive_is_not_taken(log: MemoryLog) -> None:
    owner = lease_of(log)
    writer = owner.acquire()
    with pytest.raises(Fenced, match="trainer of run places is already running"):
        lease_of(log, watch_s=300.0).acquire()
    writer.commit(entry(b"1"))
    lease_of(log, writer="feeder").acquire()
    owner.release()


def test_a_silent_owner_loses_its_place_and_does_not_get_it_back_however_often_it_is_started_again(log: MemoryLog) -> None:
    frozen = lease_of(log, watch_s=0.0)  # it says nothing more
    zombie = frozen.acquire()
    said: list[str] = []
    successor = lease_of(log, notify=said.append)
    began = time.monotonic()
    writer = successor.acquire()
    assert time.monotonic() - began > 0.25
    assert len(said) == 1
    with pytest.raises(Fenced):
        zombie.commit(entry(b"zombie"))
    with pytest.raises(Fenced, match=r"another process, on .+, now writes as places\.trainer: this process must stop"):
        frozen.require_held()
    successor.require_held()
    for number in range(3):
        with pytest.raises(Fenced):
            lease_of(log, watch_s=300.0).acquire()
        writer.commit(entry(str(number).encode()))
    successor.release()


def test_a_place_that_was_left_or_whose_owner_has_certainly_ended_is_free_at_once(log: MemoryLog) -> None:
    first = lease_of(log, watch_s=300.0)
    first.acquire()
    first.release()
    killed = lease_of(log, watch_s=0.0)
    killed.acquire()
    began = time.monotonic()
    last = lease_of(log, watch_s=300.0, ended=frozenset({killed.token}))
    last.acquire()
    assert time.monotonic() - began < 250
    last.release()


def test_a_note_that_a_fenced_process_has_ended_does_not_free_its_successors_place(log: MemoryLog) -> None:
    fenced, owner = lease_of(log, watch_s=0.0), lease_of(log)
    fenced.acquire()
    owner.acquire()
    fenced.release()
    with pytest.raises(Fenced):
        lease_of(log, watch_s=300.0).acquire()
    owner.release()


def let_it_claim(first: WriterLease, log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let `first` claim its place between another one's look at it and that one's claim; its writer is in the list then."""
    transactions, made = log.transactions, []

    def first_comes_between(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        made.append(first.acquire())
        return transactions(*arguments, **options)

    monkeypatch.setattr(log, "transactions", first_comes_between)
    return made


def test_of_two_writers_that_found_the_place_free_exactly_one_goes_on(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = lease_of(log), lease_of(log)
    made = let_it_claim(first, log, monkeypatch)
    second.acquire().commit(entry(b"written"))
    with pytest.raises(Fenced):
        made[0].commit(entry(b"refused"))
    first.release()
    second.release()


def test_of_two_launchers_that_found_the_place_free_the_one_that_claims_first_has_it(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (lease_of(log, writer="launcher", first_wins=True) for _ in range(2))
    let_it_claim(first, log, monkeypatch)
    with pytest.raises(Fenced, match="launcher of run places is already running"):
        second.acquire()
    first.release()


def test_one_that_is_asked_to_stop_does_not_watch_on(log: MemoryLog) -> None:
    lease_of(log, watch_s=0.0).acquire()
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    lease_of(log, watch_s=300.0, stop=stop).acquire()
    assert time.monotonic() - began < 250


def test_tokens_are_random_unless_the_launcher_made_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert len({process_token() for _ in range(100)}) == 100
    monkeypatch.setenv(leases.TOKEN, "abc")
    assert process_token() == "abc"
