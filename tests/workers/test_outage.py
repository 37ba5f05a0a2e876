"""The broker goes away in mid-run, frozen and killed: no worker ends, memory stays bounded, and the run goes on soon after its return."""

import time
from pathlib import Path

import psutil
import pytest

from tests.support.own_broker import OwnBroker
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, complete, config_of, same_run

AWAY_S = 6.0
"""Longer than a group member may be silent, and long enough to be said."""
BACK_S = 30.0
"""On a machine busy with other tests; a quiet one needs less than 10 s (`python -m benchmarks outage`)."""
GROWTH_MIB = 200.0


def rss_mib(workers: Processes) -> dict[str, float]:
    return {name: psutil.Process(process.pid).memory_info().rss / 2**20 for name, process in workers.running.items()}


@pytest.mark.slow
def test_a_run_bears_a_broker_that_is_frozen_and_one_that_is_killed(own_broker: OwnBroker, run_id: str, tiny_model: Path, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 14, "seed": 7}, rollout={"workers": 1})
    bootstrap = own_broker.start()
    plain = complete(bootstrap, f"{run_id}-plain", config)
    run = f"{run_id}-outage"
    with WorkerSet(bootstrap, run) as watching, Processes(bootstrap, run, tmp_path) as workers:
        watching.create(config)
        for role in ("trainer", "rollout", "scorer", "feeder", "tracker"):
            workers.start(role)
        for away, back, steps in ((own_broker.freeze, own_broker.thaw, 3), (own_broker.kill, own_broker.start, 8)):
            watching.wait(lambda steps=steps: watching.report()["steps"] >= steps)
            done, before = watching.report()["steps"], rss_mib(workers)
            away()
            time.sleep(AWAY_S)
            grown = {name: size - before[name] for name, size in rss_mib(workers).items()}
            assert max(grown.values()) < GROWTH_MIB, grown
            back()
            returned = time.monotonic()
            watching.wait(lambda done=done: watching.report()["steps"] > done + 1)  # the step in work may have been committed just before
            assert time.monotonic() - returned < BACK_S
            assert all(process.is_alive() for process in workers.running.values())
        report = workers.finish(watching)
        for name in ("rollout-0", "scorer-0", "feeder", "trainer"):
            assert workers.text(name).count("has not responded for") == workers.text(name).count("responds again, after") in (1, 2), name
    same_run(report, plain)


@pytest.mark.slow
def test_workers_that_have_waited_long_enough_say_so_and_end_for_the_launcher_to_restart_them(
    own_broker: OwnBroker, run_id: str, tiny_model: Path, tmp_path: Path
):
    config = config_of(tiny_model, tmp_path, run={"steps": 500, "seed": 7}, rollout={"workers": 1}, kafka={"give_up_s": 8.0})
    bootstrap = own_broker.start()
    with WorkerSet(bootstrap, run_id) as watching, Processes(bootstrap, run_id, tmp_path) as workers:
        watching.create(config)
        for role in ("trainer", "rollout", "scorer", "feeder", "tracker"):
            workers.start(role)
        watching.wait(lambda: watching.report()["steps"] >= 2)
        own_broker.kill()
        for name in workers.running:
            assert workers.ended(name) == 1
            (last,) = [line for line in workers.text(name).splitlines() if line.startswith("penstock: ")]
            assert "has not responded for 8 s (kafka.give_up_s)" in last or "cannot write to" in last, last
        own_broker.start()
