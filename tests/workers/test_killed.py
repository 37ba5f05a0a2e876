"""SIGKILL at any instant: what was committed stays, and the run goes on to the same weights."""

from pathlib import Path

from crew import Crew, complete, config_of
from processes import Processes

from pipeline.runs import create


def test_a_run_whose_workers_are_killed_ends_in_the_weights_of_the_undisturbed_one(broker, run_id, tiny_model, tmp_path: Path):
    config = config_of(tiny_model, tmp_path, run={"steps": 12, "seed": 7}, rollout={"workers": 1})
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-killed"
    with Crew(broker, run) as crew, Processes(broker, run, tmp_path) as workers:
        create(config, log=crew.log, run_id=run, say=lambda _: None)
        for role in ("trainer", "rollout", "scorer", "feeder"):
            workers.start(role)
        for done, role in enumerate(("rollout-0", "scorer-0", "trainer", "feeder"), start=1):
            crew.wait(lambda done=done: crew.report()["steps"] >= 2 * done)
            workers.kill(role)
            workers.start(role.split("-")[0])
        crew.wait(lambda: crew.report()["status"] == "finished")
        for name in workers.running:
            assert workers.ended(name) == 0, workers.text(name)
        killed = crew.report()
    assert killed["weights"]["digest"] == plain["weights"]["digest"]
    assert killed["groups"] == plain["groups"]
