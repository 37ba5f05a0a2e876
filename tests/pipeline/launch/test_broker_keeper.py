"""The embedded broker under a launcher's eyes: one that died comes back, one that was stopped does not."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.broker import embedded
from penstock.infra.errors import BrokerError
from penstock.pipeline.config.schema import RunSection
from penstock.pipeline.launch.broker_keeper import BrokerKeeper


def keeper_of(bootstrap: str, said: list[str], *, max_restarts: int = 5) -> BrokerKeeper:
    return BrokerKeeper(bootstrap, RunSection(max_restarts=max_restarts), said.append)


def look_until(keeper: BrokerKeeper, holds: Callable[[], bool], *, limit_s: float = 60.0) -> str | None:
    """Look as the launcher does, until that holds or the broker is given up."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        given_up = keeper.check(now_s=time.monotonic())
        if given_up is not None:
            return given_up
        time.sleep(0.1)
    return None


INFO = embedded.BrokerInfo(bootstrap="127.0.0.1:9", pid=1, running=True, home=Path(), log_file=Path(), started_s=0.0, risk=None, ended=None)


class StandIn:
    """Stands in for the embedded broker: it dies, is stopped, and starts unless a start is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info = INFO
        self.refusal: str | None = None
        monkeypatch.setattr(embedded, "status", lambda: self.info)
        monkeypatch.setattr(embedded, "start", self.start)

    def end(self, why: str | None) -> None:
        self.info = replace(self.info, running=False, pid=None, ended=why)

    def start(self) -> embedded.BrokerInfo:
        if self.refusal is not None:
            raise BrokerError(self.refusal)
        self.info = replace(self.info, running=True, pid=2, ended=None)
        return self.info


def checked(keeper: BrokerKeeper, seconds: int) -> str | None:
    """Check once a second of a clock that nobody waits for, until the broker is given up."""
    began = time.monotonic()
    for now in range(seconds):
        given_up = keeper.check(now_s=began + now)
        if given_up is not None:
            return given_up
        if keeper._starting is not None:
            keeper._starting.join()
    return None


def test_a_broker_that_died_is_started_and_one_that_was_stopped_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, said = StandIn(monkeypatch), list[str]()
    keeper = keeper_of("127.0.0.1:9", said)
    broker.end("the broker was killed")
    assert checked(keeper, 60) is None
    assert keeper.up and said == ["the broker was killed; restarting it", "the broker at 127.0.0.1:9 was restarted"]
    broker.end(None)
    assert checked(keeper, 60) is None
    assert not keeper.up and not broker.info.running and "was stopped" in said[2]


def test_a_broker_whose_start_is_refused_again_and_again_is_given_up_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, said = StandIn(monkeypatch), list[str]()
    keeper = keeper_of("127.0.0.1:9", said, max_restarts=1)
    broker.end("the broker was killed")
    broker.refusal = "the broker exited during startup"
    assert "the broker exited during startup (2 times in a row, run.max_restarts = 1" in (checked(keeper, 600) or "")
    assert not any("was stopped" in line for line in said)


@pytest.mark.slow
def test_a_broker_that_was_killed_serves_again_and_one_that_was_stopped_stays_so(
    new_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PENSTOCK_HOME", str(new_home()))
    said: list[str] = []
    bootstrap = embedded.start().bootstrap
    keeper = keeper_of(bootstrap, said)
    first = embedded.status().pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert look_until(keeper, lambda: bool(said) and keeper.up) is None
    assert embedded.status().pid not in (None, first)
    assert said[0] == "the broker was killed: its log contains no error; restarting it"
    assert said[1] == f"the broker at {bootstrap} was restarted"
    embedded.stop()
    assert look_until(keeper, lambda: not keeper.up) is None
    for _ in range(10):
        assert keeper.check(now_s=time.monotonic()) is None
        time.sleep(0.1)
    assert not embedded.status().running
    assert "was stopped" in said[2]


def test_a_keeper_passes_on_what_a_start_after_a_kill_may_have_cost(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    keeper = keeper_of("127.0.0.1:9", said)
    monkeypatch.setattr(embedded, "start", lambda: replace(INFO, risk="a transaction may hang"))
    keeper._start()
    assert said == ["a transaction may hang"]
    monkeypatch.setattr(embedded, "start", lambda: INFO)
    keeper._start()
    assert len(said) == 1


def test_another_broker_is_somebody_elses():
    keeper = keeper_of("kafka.example:9092", [])
    assert not keeper.ours
    assert keeper.check(now_s=time.monotonic()) is None
    assert keeper.up
