"""The proximal policy of a version is the one it began with, also for a trainer that comes back in its middle."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import Unrecoverable
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.load import from_json
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.train_step import Step, StepOutcome
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.pipeline.runtime.session import Session
from penstock.workers.trainer import worker
from penstock.workers.trainer.resuming import Resumed
from penstock.workers.trainer.worker import Trainer
from tests.support.trainer_alone import config_for, group_of, outcome_of, written

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")

RUN, STEPS = "snapshots", 6


@pytest.fixture(params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def make_log(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Callable[[str], MemoryLog]:
    """Makes logs with the same run: two versions of three steps, sampled one version behind; checkpoints lie in the middle of both."""

    def make(name: str) -> MemoryLog:
        return log_of(tiny_model, tmp_path, checkpoints=tmp_path / name, dtype=request.param)

    return make


def log_of(model: Path, directory: Path, *, checkpoints: Path, dtype: str) -> MemoryLog:
    config = config_for(
        model,
        directory,
        run={"steps": STEPS, "seed": 7},
        schedule={"steps_per_version": 3},
        algorithm={"proximal": "snapshot", "loss": "dapo"},
        trainer={"checkpoint_every": 2, "checkpoint_dir": str(checkpoints), "dtype": dtype, "lr": 1e-2},
    )
    assert config.correction == "tis"
    made = MemoryLog()
    written(made, RUN, config, [group_of(number, version=max(0, number // 6 - 1)) for number in range(2 * STEPS)])
    return made


def opened(log: MemoryLog) -> Trainer:
    """Another trainer of the run, back where the ledger ends."""
    record = find(log, RUN)
    assert record is not None
    session = Session(
        run=RUN, role="trainer", worker="trainer", log=log, record=record, config=from_json(record.config), info=json.loads(record.info),
        stop=threading.Event(),
    )  # fmt: skip
    past = read_ledger_history(session.log, session.run)
    trainer = Trainer.open(session, log.transactions(f"{RUN}.trainer"), Resumed(past=past))
    trainer.start(Resumed(past=past))
    return trainer


def finished(trainer: Trainer) -> dict[str, Any]:
    while trainer.policy.steps_done < STEPS:
        assert trainer.train_step()
    trainer.end()
    return outcome_of(trainer.session.log, RUN)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[StepOutcome]:
    """Every step that is finished from now on, repeated ones too."""
    found: list[StepOutcome] = []
    finish = Step.finish

    def noted(step: Any, *, learner_version: int) -> StepOutcome:
        found.append(finish(step, learner_version=learner_version))
        return found[-1]

    monkeypatch.setattr(Step, "finish", noted)
    return found


def test_a_trainer_that_comes_back_within_a_version_has_the_snapshot_of_its_start(
    make_log: Callable[[str], MemoryLog], seen: list[StepOutcome]
) -> None:
    plain = finished(opened(make_log("plain")))
    seen.clear()
    log = make_log("again")
    first = opened(log)
    for _ in range(5):
        assert first.train_step()
    moved = [outcome.metrics["kl"] for outcome in seen]
    assert [step for step, kl in enumerate(moved) if kl > 1e-6] == [1, 2, 4]  # a version's first step is taken at its own start
    second = opened(log)  # from the checkpoint of step 4: step 4 is the middle one of version 1
    assert second.session.reporter.values["recovered_from_step"] == 4
    assert len(seen) == 6
    assert (seen[5].loss_bits, seen[5].grad_norm_bits) == (seen[4].loss_bits, seen[4].grad_norm_bits)
    assert finished(second) == plain
    assert [version for version, _ in plain["versions"]] == [0, 1, 2]


def test_the_weights_of_the_checkpoint_would_be_another_snapshot(
    make_log: Callable[[str], MemoryLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log("kept")
    first = opened(log)
    for _ in range(5):
        assert first.train_step()
    monkeypatch.setattr(worker, "fetch", lambda *_, **__: first.policy.backend.weights())
    with pytest.raises(Unrecoverable, match="step 4 repeated from the log gave loss"):
        opened(log)
