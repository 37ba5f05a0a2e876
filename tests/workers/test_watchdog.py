"""A run in which one stage is held: the watchdog names it, and whoever waits for it is not blamed."""

import io
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.live.view import LiveView
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.launch import stall_watchdog
from penstock.pipeline.launch.stall_watchdog import Watchdog
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, config_of


class Listener:
    """A launcher's eyes and ears without its hands."""

    def __init__(self, worker_set: WorkerSet, *, stall_s: float) -> None:
        self.said: list[str] = []
        self.view = LiveView(worker_set.log, worker_set.run, console=Console(file=io.StringIO()), plain=True)
        self._dog = Watchdog(worker_set.log, stall_s, self.said.append)

    def hears(self, *words: str, limit_s: float = 300.0) -> None:
        """Listen until all of these are said in one message that comes from now on."""
        self.said.clear()
        deadline = time.monotonic() + limit_s
        while not any(all(word in text for word in words) for text in self.said):
            assert time.monotonic() < deadline, f"not said: {words}; said: {self.said}"
            self.view.poll(0.1)
            self._dog.check(self.view.view, silent=self.view.silent, outage_s=self.view.outage_s, notes={})


class Clock:
    """The watchdog's monotonic clock, set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_lost_ends_are_looked_for_once_a_run_stands_still_and_never_while_the_broker_is_away(monkeypatch: pytest.MonkeyPatch):
    clock, calls, view = Clock(), list[float](), RunView(run="r")
    monkeypatch.setattr(stall_watchdog, "time", clock)
    dog = Watchdog(MemoryLog(), 3600.0, pytest.fail, unblock=lambda: calls.append(clock.now_s))

    def calls_after(seconds: float, *, outage_s: float = 0.0) -> list[float]:
        clock.now_s = 1000.0 + seconds
        dog.check(view, silent={}, outage_s=outage_s, notes={})
        for thread in threading.enumerate():
            if thread.name == "unblock":
                thread.join()
        return [at_s - 1000.0 for at_s in calls]

    assert calls_after(0) == calls_after(19) == calls_after(21, outage_s=6.0) == calls_after(500, outage_s=485.0) == []
    assert [calls_after(seconds) for seconds in (501, 502, 535)] == [[501], [501], [501]]
    assert calls_after(537) == [501, 537], "it has not moved since: another transaction may have lost its end"
    view.moved_ms += 1
    assert [len(calls_after(seconds)) for seconds in (600, 619, 621)] == [2, 2, 3]


def test_a_role_without_a_worker_is_named_with_what_waits_for_it(run_id: str, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 2}, rollout={"workers": 1})
    with WorkerSet(MemoryLog(), run_id) as worker_set:
        worker_set.create(config)
        listener = Listener(worker_set, stall_s=1.0)
        listener.hears("stuck: trainer\n  the run is not opened yet; no trainer")
        worker_set.start("trainer")
        listener.hears("stuck: rollout\n  no rollout worker")
        worker_set.start("rollout")
        listener.hears("stuck: feeder\n  step 0 waits for the prompt of group 0; no feeder")
        worker_set.start("feeder")
        listener.hears("stuck: scorer, group 0", "complete since", "no scorer")
        worker_set.start("scorer")
        listener.hears("the run makes progress again")
        worker_set.wait()
    listener.view.close()


@pytest.mark.slow
def test_whoever_holds_a_run_up_is_named_with_the_group_and_the_reason(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 400}, rollout={"workers": 1})
    with WorkerSet(broker, run_id) as worker_set, Processes(broker, run_id, tmp_path) as workers:
        worker_set.create(config)
        listener = Listener(worker_set, stall_s=3.0)
        for role in ("trainer", "rollout", "feeder", "scorer"):
            workers.start(role)
        worker_set.wait(lambda: worker_set.report()["steps"] >= 1)
        for name in ("rollout-0", "scorer-0"):
            workers.signal(name, signal.SIGSTOP)
            listener.hears(f"stuck: {name.partition('-')[0]}", f"{name} has not reported for")
            workers.signal(name, signal.SIGCONT)
            listener.hears("the run makes progress again")
    listener.view.close()
