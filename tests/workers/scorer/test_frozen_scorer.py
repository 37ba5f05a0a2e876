"""A scorer is stopped inside an open transaction, another takes its partitions over, and the first one continues: no group twice."""

import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.launch.create import create
from tests.support.crew import Crew, complete, config_of
from tests.support.frozen import stops_inside_its_third_transaction
from tests.support.processes import Processes

pytestmark = pytest.mark.slow
STOPPED_S = 20.0


def test_a_stopped_scorer_that_continues_neither_loses_nor_doubles_a_group(broker: str, run_id: str, tiny_model: Path, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 60, "seed": 7}, rollout={"workers": 1}, scorer={"workers": 2})
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-frozen"
    with Crew(broker, run) as watching, Processes(broker, run, tmp_path) as workers:
        create(config, log=watching.log, run_id=run, say=lambda _: None)
        workers.start("scorer", 0, before=stops_inside_its_third_transaction)
        for role, slot in (("scorer", 1), ("trainer", 0), ("rollout", 0), ("feeder", 0)):
            workers.start(role, slot)
        zombie = psutil.Process(workers.running["scorer-0"].pid)
        watching.wait(lambda: zombie.status() == psutil.STATUS_STOPPED)
        stopped, steps = time.monotonic(), watching.report()["steps"]
        watching.wait(lambda: watching.report()["steps"] > steps + 2 and time.monotonic() - stopped > STOPPED_S)
        workers.signal("scorer-0", signal.SIGCONT)
        watching.wait(lambda: watching.report()["status"] == "finished")
        for name in workers.running:
            assert workers.ended(name) == 0, workers.text(name)
        tail = watching.log.tail({(f"{run}.groups", partition): "earliest" for partition in range(8)})
        written = Counter(record.key for record in tail.read_to_end(60.0))
        tail.close()
        report = watching.report()
    assert max(written.values()) == 1
    assert report["groups"] == plain["groups"]
    assert report["weights"]["digest"] == plain["weights"]["digest"]
