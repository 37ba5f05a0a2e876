"""An evaluator's engine starts when samples are drawn, and not before."""

from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create
from penstock.topics.metrics import Activity, activity_of
from penstock.workers.evaluator import worker
from tests.support.worker_set import WorkerSet, complete, config_of

ROLES = ("evaluator", "trainer", "rollout", "scorer", "feeder")


def _evaluated(tiny_model: Path, folder: Path) -> Config:
    held = {"source": str(folder / "data.jsonl"), "limit": 2, "samples": 1, "every": 1}
    return config_of(tiny_model, folder, run={"steps": 1, "seed": 7}, eval=held)


def test_the_evaluators_engine_starts_after_the_first_samples(
    run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, drawn, make_engine = MemoryLog(), [], worker.make_engine

    def noted(config: Config) -> Any:
        drawn.append(sum(log.end_offsets([(f"{run_id}.rollouts", partition) for partition in range(config.partitions)]).values()))
        return make_engine(config)

    monkeypatch.setattr(worker, "make_engine", noted)
    report = complete(log, run_id, _evaluated(tiny_model, tmp_path), roles=ROLES)
    assert len(drawn) == 1 and drawn[0] > 0
    assert [found["version"] for found in report["eval"]] == [0, 1]


def test_an_evaluator_that_waits_for_samples_is_not_busy_and_ends_when_it_is_asked_to(
    run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_config: Config) -> Any:
        raise AssertionError("nothing was drawn yet")

    log = MemoryLog()
    monkeypatch.setattr(worker, "make_engine", refused)
    create(_evaluated(tiny_model, tmp_path), log=log, run_id=run_id)
    with WorkerSet(log, run_id) as worker_set:
        worker_set.start("evaluator")
        worker_set.wait(lambda: "evaluator" in (seen := load(log, run_id).workers) and "samples" in seen["evaluator"].labels["doing"])
        waiting = load(log, run_id).workers["evaluator"]
        assert activity_of(waiting.labels) == Activity.NO_SAMPLES
        assert "time_busy_s" not in waiting.values
        worker_set.stop("evaluator")
        assert not worker_set.failures
