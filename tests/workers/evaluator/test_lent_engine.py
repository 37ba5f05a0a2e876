"""Evaluations on a rollout worker's engine: the same measures and the same run as with an evaluator, whichever worker lends it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import ConfigError
from penstock.pipeline.learner.evaluation import Evaluator
from penstock.pipeline.runtime.roles import ROLES
from penstock.workers.evaluator.worker import main
from tests.support.counting_run import counting_run
from tests.support.in_flight import config_in_flight
from tests.support.worker_set import PIPELINE, WorkerSet, clean, complete, config_of

ALL = (*PIPELINE, "evaluator")


def held_out(directory: Path, engine: str, **changes: Any) -> dict[str, Any]:
    return {"source": str(directory / "data.jsonl"), "limit": 8, "every": 2, "samples": 4, "engine": engine, "threshold": 0.2} | changes


def measures(report: dict[str, Any], *, last: int) -> list[dict[str, float]]:
    """What was measured of the first and the last version, without the time that took; one between may come after the run's end."""
    measured = {found["version"]: {name: value for name, value in found.items() if name != "eval_s"} for found in report["eval"]}
    return [measured[0], measured[last]]


def test_a_rollout_worker_measures_what_an_evaluator_does_and_the_run_ends_in_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    reports = {}
    for engine in ("own", "rollout"):
        log, config = MemoryLog(), config_of(tiny_model, tmp_path, trainer={"lr": 1e-2}, eval=held_out(tmp_path, engine))
        assert ROLES["evaluator"].workers(config) == (engine == "own")
        reports[engine] = complete(log, engine, config, roles=ALL)
        clean(log, engine)
    own, lent = reports["own"], reports["rollout"]
    assert measures(lent, last=4) == measures(own, last=4)
    assert len({found["sampled_reward"] for found in measures(lent, last=4)}) == 2
    assert lent["examples"] == own["examples"]
    assert lent["weights"]["digest"] == own["weights"]["digest"]


def test_an_engine_in_flight_ends_its_samples_in_hand_and_goes_back_to_the_newest_weights(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    held = held_out(tmp_path, "rollout", every=4, max_new_tokens=8)
    config, log = config_in_flight(tiny_model, tmp_path, run={"steps": 8}, eval=held), MemoryLog()
    report = complete(log, run_id, config, roles=ALL)
    clean(log, run_id)
    found = [evaluation["version"] for evaluation in report["eval"]]
    assert found[0] == 0 and found[-1] == 8 and set(found) <= {0, 4, 8}
    assert report["groups"]["trained"] == 8 and report["lag"]["max"] <= 4


def test_a_worker_that_takes_over_makes_the_evaluations_that_are_left(
    run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []
    evaluate = Evaluator.evaluate

    def noted(self: Evaluator, version: int, tensors: Any) -> Any:
        worker = threading.current_thread().name
        made.append((worker, version))
        if len(made) == 1:  # it is stopped in the midst of its first one
            worker_set.stops[worker].set()
        return evaluate(self, version, tensors)

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    config = config_of(tiny_model, tmp_path, eval=held_out(tmp_path, "rollout"))
    with WorkerSet(MemoryLog(), run_id) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, ALL)
        worker_set.wait()
        report = worker_set.report()
    assert (report["status"], measures(report, last=4)[1]["version"]) == ("finished", 4)
    assert [version for _, version in made] in ([0, 0, 2, 4], [0, 0, 4])
    assert len({worker for worker, _ in made}) == 2


@pytest.mark.slow
def test_trajectories_are_evaluated_by_the_worker_that_answers_turns(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for engine in ("own", "rollout"):
        config = counting_run(
            tiny_model, tmp_path, environment={"carrier": "log"}, launch={"environments": 1}, rollout={"workers": 1},
            sampling={"max_new_tokens": 12}, eval=held_out(tmp_path, engine, limit=2, every=1),
        )  # fmt: skip
        found[engine] = measures(complete(MemoryLog(), f"{run_id}-{engine}", config, roles=(*ALL, "environment")), last=2)
    assert found["rollout"] == found["own"]


def test_an_evaluator_that_is_started_by_hand_beside_it_says_why_it_has_nothing_to_do(tiny_model: Path, tmp_path: Path) -> None:
    class Joined:
        config = config_of(tiny_model, tmp_path, eval=held_out(tmp_path, "rollout"))

    with pytest.raises(
        ConfigError, match=r'this run has no use for an evaluator: with eval\.engine = "rollout" a rollout worker evaluates'
    ):
        main(Joined())  # type: ignore[arg-type]
