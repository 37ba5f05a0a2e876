"""Workers come in any order and at any time; the result does not change and nothing is lost."""

import random
import time
from pathlib import Path

import pytest

from benchmarks.support import duplicate_samples
from penstock.infra.memory.log import MemoryLog
from tests.support.worker_set import WorkerSet, complete, config_of

SOME = ("join 1", "leave 0")
MANY = ("join 1", "join 2", "leave 0", "join 3", "leave 2", "leave 1", "join 4")
"""Moves of rollout workers while the run goes on; one is always left."""


@pytest.mark.parametrize("moves", [SOME, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "many"])
def test_the_worst_order_and_joiners_and_leavers_half_way_give_the_same_report_and_weights(
    run_id, tiny_model, tmp_path: Path, moves: tuple[str, ...]
):
    config = config_of(tiny_model, tmp_path, run={"steps": 2 * len(moves) + 2, "seed": 7}, scorer={"workers": 2})
    log = MemoryLog()
    plain = complete(log, f"{run_id}-plain", config)
    draw = random.Random(3)
    with WorkerSet(log, f"{run_id}-odd") as worker_set:
        worker_set.start("trainer")  # the run does not exist yet
        worker_set.start("scorer", 0)
        worker_set.start("rollout", 0)
        worker_set.create(config)
        worker_set.start("scorer", 1)
        worker_set.start("feeder")
        for done, move in enumerate(moves, start=1):
            worker_set.wait(lambda done=done: worker_set.report()["steps"] >= 2 * done - 1)
            time.sleep(draw.uniform(0.0, 0.5))  # at any instant of a group, or of the rebalance before
            what, slot = move.split()
            worker_set.start("rollout", int(slot)) if what == "join" else worker_set.stop(f"rollout-{slot}")
        worker_set.wait()
        odd = worker_set.report()
        drawn = duplicate_samples.count(duplicate_samples.read_samples(worker_set.log, worker_set.run))
    assert odd["weights"]["digest"] == plain["weights"]["digest"]
    for name in ("groups", "reward", "steps", "versions", "tokens", "dead_letters"):
        assert odd[name] == plain[name], name
    assert odd["groups"]["admitted"] == odd["groups"]["trained"] + odd["groups"]["filtered"]
    assert drawn.needless == 0, drawn
    assert drawn.samples == 4 * odd["groups"]["admitted"]
