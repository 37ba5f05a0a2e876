"""SIGKILL of environment and rollout workers inside trajectories: no answered turn is drawn again, and the weights are the same."""

from pathlib import Path

import pytest

from benchmarks.support.duplicate_samples import count, read_turns
from penstock.infra.memory.log import MemoryLog
from tests.support.counting_run import counting_run
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, clean, complete

KILLED = ("environment", "rollout", "scorer")


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_inside_trajectories_draws_no_answered_turn_again_and_ends_in_the_same_weights(
    broker: str, run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {"run": {"steps": 3, "seed": 7}, "sampling": {"max_new_tokens": 40}}
    plain = complete(MemoryLog(), run_id, counting_run(tiny_model, tmp_path, **sizes))
    config = counting_run(tiny_model, tmp_path, environment={"carrier": "log"}, **sizes)
    with WorkerSet(broker, run_id) as worker_set, Processes(broker, run_id, tmp_path) as workers:
        worker_set.create(config)
        for role in KILLED:
            workers.start(role)
        worker_set.start_all(config, ("trainer", "feeder"))
        worker_set.wait(lambda: len(read_turns(worker_set.log, run_id)) >= 10)
        for role in KILLED:
            workers.kill(f"{role}-0")
            workers.start(role)
        killed = workers.finish(worker_set)
        drawn = count(read_turns(worker_set.log, run_id))
    assert killed["weights"]["digest"] == plain["weights"]["digest"]
    assert drawn.needless == 0, drawn
    audit = clean(broker, run_id)
    assert next(result.examined for result in audit.results if result.check.name == "turns-answered") > 20
