"""SIGKILL and SIGSTOP at any instant: what was committed stays, and the run goes on to the same weights."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.support import duplicate_samples
from penstock.infra.kafka.client_repairs import private_api
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.exit_status import NO_RETRY
from tests.support.in_flight import config_in_flight
from tests.support.processes import Processes
from tests.support.signals import signal_self
from tests.support.worker_set import WorkerSet, clean, complete, config_of, same_run

WORKERS = ("trainer", "feeder", "rollout-0", "rollout-1", "scorer-0", "scorer-1")
STOP_S = 7.5
"""Longer than the 6 s after which a group member that says nothing is replaced."""
Plan = tuple[tuple[str, tuple[str, ...]], ...]
ALL_AT_ONCE: Plan = (("kill", WORKERS),)
WAVES: Plan = (
    ("kill", ("rollout-0", "scorer-0", "trainer")),
    ("stop", ("rollout-1", "scorer-1")),
    ("kill", WORKERS),
    ("kill", ("feeder", "scorer-1", "rollout-1", "trainer")),
)
"""Done to the workers in this order, each wave when the run has gone on by some steps; those of a wave are hit within a second."""


class Waves:
    """Does what is planned to the workers of a run, each a little later than the one before."""

    def __init__(self, workers: Processes, *, seed: int) -> None:
        self.workers, self.stops = workers, dict[str, list[tuple[int, int]]]()
        self._draw = random.Random(seed)

    def hit(self, what: str, names: tuple[str, ...]) -> None:
        for name in names:
            time.sleep(self._draw.uniform(0.0, 1.0 / len(names)))  # at any instant of the others' recovery
            if what == "kill":
                self.workers.kill(name)
                self.start(name)
        if what == "stop":
            self._stop(names)

    def start(self, name: str) -> None:
        role, _, slot = name.partition("-")
        self.workers.start(role, int(slot or 0))

    def _stop(self, names: tuple[str, ...]) -> None:
        began = time.time_ns()
        for name in names:
            self.workers.signal(name, signal.SIGSTOP)
        time.sleep(STOP_S)
        for name in names:
            self.workers.signal(name, signal.SIGCONT)
            self.stops.setdefault(name, []).append((began, time.time_ns()))

    def run(self, plan: Plan, worker_set: WorkerSet) -> None:
        """Start all workers, and hit those of each wave of the plan after another three steps."""
        for name in WORKERS:
            self.start(name)
        for done, (what, names) in enumerate(plan, start=1):
            worker_set.wait(lambda done=done: worker_set.report()["steps"] >= 3 * done)
            self.hit(what, names)


@pytest.mark.parametrize(
    ("plan", "steps"), [(ALL_AT_ONCE, 7), pytest.param(WAVES, 14, marks=pytest.mark.slow)], ids=["all at once", "in waves"]
)
def test_a_run_whose_workers_are_killed_and_stopped_ends_in_the_weights_of_the_undisturbed_one(
    broker, run_id, tiny_model, tmp_path: Path, plan: Plan, steps: int
):
    sizes = {"run": {"steps": steps, "seed": 7}, "rollout": {"workers": 2}, "scorer": {"workers": 2}}
    config = config_of(tiny_model, tmp_path, **sizes)
    plain = complete(MemoryLog(), f"{run_id}-plain", config)
    run = f"{run_id}-killed"
    with WorkerSet(broker, run) as worker_set, Processes(broker, run, tmp_path) as workers:
        worker_set.create(config)
        waves = Waves(workers, seed=7)
        waves.run(plan, worker_set)
        zombie = workers.running["scorer-0"]
        waves.start("scorer-0")  # a second process takes the name of one that is alive, or has just begun
        worker_set.wait(lambda: worker_set.report()["status"] == "finished")
        for name in workers.running.keys() - {"scorer-0"}:
            assert workers.ended(name) == 0, workers.text(name)
        zombie.join(300.0)
        assert sorted([zombie.exitcode, workers.ended("scorer-0")]) == [0, NO_RETRY], workers.text("scorer-0")
        assert "is already running" in workers.text("scorer-0") or "another process now writes" in workers.text("scorer-0")
        assert "Traceback" not in workers.text("scorer-0")
        killed = worker_set.report()
        drawn = duplicate_samples.count(duplicate_samples.read_samples(worker_set.log, run), stops=waves.stops)
    same_run(killed, plain)
    assert drawn.needless == 0, drawn
    clean(broker, run)


@pytest.mark.slow
def test_with_extra_groups_every_group_ends_once_whatever_is_killed(broker, run_id, tiny_model, tmp_path: Path) -> None:
    extra = {"mode": "bounded", "max_lag": 0, "prompts_per_step": 3, "oversample_groups": 2}
    sizes = {"run": {"steps": 28, "seed": 7}, "scorer": {"workers": 2}, "schedule": extra, "sampling": {"max_new_tokens": 60}}
    config = config_in_flight(tiny_model, tmp_path, **sizes)
    with WorkerSet(broker, run_id) as worker_set, Processes(broker, run_id, tmp_path) as workers:
        worker_set.create(config)
        Waves(workers, seed=7).run(WAVES, worker_set)
        worker_set.wait(lambda: worker_set.report()["status"] == "finished")
        report = worker_set.report()
    counts = dict(report["groups"])
    assert counts.pop("admitted") == sum(counts.values())
    assert counts["trained"] == 28 * 3
    assert report["lag"]["max"] == 0
    clean(broker, run_id)


def stop_in_the_third_transaction() -> None:
    """Let this process stop itself between the last record of its third transaction and its commit."""
    commit, left = private_api.commit_transaction, [3]

    def stopping(*arguments: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            signal_self(signal.SIGSTOP)
        commit(*arguments)

    private_api.commit_transaction = stopping


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [STOP_S, 20.0])
def test_a_scorer_that_is_stopped_inside_a_transaction_loses_and_doubles_no_group(broker, run_id, tiny_model, tmp_path, seconds):
    """20 s is longer than the transaction may last: the broker has aborted it by then."""
    config = config_of(tiny_model, tmp_path, run={"steps": 6, "seed": 7}, rollout={"workers": 1})
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-stopped"
    with WorkerSet(broker, run) as worker_set, Processes(broker, run, tmp_path) as workers:
        worker_set.create(config)
        workers.start("scorer", 1, before=stop_in_the_third_transaction)
        for role in ("trainer", "rollout", "feeder"):
            workers.start(role)
        process = psutil.Process(workers.running["scorer-1"].pid)
        worker_set.wait(lambda: process.status() == psutil.STATUS_STOPPED)
        workers.start("scorer")  # takes the partitions over, but not before the open transaction has ended one way or the other
        time.sleep(seconds)
        workers.signal("scorer-1", signal.SIGCONT)
        stopped = workers.finish(worker_set)
        tail = worker_set.log.tail({(f"{run}.groups", partition): "earliest" for partition in range(8)})
        outcomes = [record.key for record in tail.read_to_end()]
        tail.close()
    assert len(outcomes) == len(set(outcomes)) == stopped["groups"]["admitted"]
    same_run(stopped, plain)
