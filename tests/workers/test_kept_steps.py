"""A run that deletes what it needs no more: however its workers rest, it ends in the weights of one that keeps all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.export import export
from penstock.pipeline.cli import main
from penstock.pipeline.inspect.audit.kafka_reader import KafkaSource
from penstock.pipeline.inspect.audit.report import as_text, audit
from penstock.pipeline.inspect.live import saved_view
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime.topic_reader import deleted
from penstock.workers.tracker import retention, worker
from tests.support.bare_clients import c_client
from tests.support.worker_set import PIPELINE, WorkerSet, clean, complete, config_of, finish, forget_offsets, records_of

ROLES = (*PIPELINE, "tracker")
STEPS, KEPT = 14, 3


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Views and deletions at each poll, on one machine's clock."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(saved_view, "EVERY_S", 0.0)
    monkeypatch.setattr(retention, "CLOCKS_APART_S", 0.0)
    monkeypatch.setattr(worker, "POLL_S", 0.05)


def short(model: Path, folder: Path, **kafka: Any) -> Any:
    """A run of two prompts a step on few partitions, so that each of them is deleted from."""
    return config_of(
        model,
        folder,
        run={"steps": STEPS, "seed": 7},
        schedule={"mode": "pipelined", "prompts_per_step": 2, "samples_per_prompt": 2},
        trainer={"lr": 1e-3, "micro_batch_tokens": 80, "export": False, "checkpoint_every": 2, "checkpoint_dir": str(folder / "saved")},
        kafka={"partitions": 2, **kafka},
    )


def begins(log: MemoryLog, run: str) -> dict[tuple[str, int], int]:
    """Topic and number of each partition that has lost its beginning -> its first offset."""
    found = log.beginning_offsets([(name, number) for name in log.topics(f"{run}.") for number in range(log.partitions(name) or 0)])
    return {(name.removeprefix(f"{run}."), number): offset for (name, number), offset in found.items() if offset}


@pytest.mark.slow
def test_what_was_exported_and_deleted_is_in_the_archive(
    tiny_model: Path, tmp_path: Path, broker: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = short(tiny_model, tmp_path, bootstrap=broker, keep_steps=KEPT, archive=str(tmp_path / "archive"))
    with WorkerSet(broker, run_id) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, ROLES)
        worker_set.wait()
        export(worker_set.log, run_id, tmp_path / "archive")
        assert deleted(worker_set.log, *(f"{run_id}.{topic}" for topic in ("prompts", "rollouts", "groups")))
        found = audit(KafkaSource(broker, run_id, settings=c_client(broker)))
    assert found.clean, as_text(found)
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "archive"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted_below"] == {}


@pytest.mark.parametrize(
    "expired", [pytest.param(False, marks=pytest.mark.slow, id="with its notes"), pytest.param(True, id="after its offsets have expired")]
)
def test_a_run_that_deletes_and_rests_ends_in_the_weights_of_one_that_keeps_all(tiny_model: Path, tmp_path: Path, expired: bool) -> None:
    (tmp_path / "plain").mkdir()
    plain = complete(MemoryLog(), "plain", short(tiny_model, tmp_path / "plain"))
    log, run = MemoryLog(), "kept"
    config = short(tiny_model, tmp_path, keep_steps=KEPT)
    with WorkerSet(log, run) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, ROLES)
        worker_set.wait(lambda: {("prompts", 0), ("rollouts", 0), ("groups", 0)} <= begins(log, run).keys())
        for name in list(worker_set.threads):
            worker_set.stop(name)
    if expired:
        forget_offsets(log)
    before = begins(log, run)
    report = finish(log, run, roles=ROLES, config=config)
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    assert (report["groups"], report["reward"]) == (plain["groups"], plain["reward"])
    assert {topic for topic, _ in begins(log, run)} == {"prompts", "rollouts", "groups"}
    assert sum(begins(log, run).values()) > sum(before.values()), "nothing more was deleted after the rest"
    clean(log, run)
    view, _ = saved_view.newest(log, run)
    outcomes = len(view.groups) + view.past.outcomes.total()
    assert (view.steps_done, outcomes, len(view.open)) == (STEPS, 2 * STEPS + plain["groups"]["filtered"], 0)
    assert not records_of(log, f"{run}.dead-letters")


def test_a_trainer_that_has_lost_its_checkpoints_says_what_it_would_have_to_repeat(tiny_model: Path, tmp_path: Path) -> None:
    log, run = MemoryLog(), "lost"
    with WorkerSet(log, run) as worker_set:
        create(short(tiny_model, tmp_path, keep_steps=KEPT), log=log, run_id=run, notify=lambda _: None)
        worker_set.start_all(short(tiny_model, tmp_path), ROLES)
        worker_set.wait(lambda: ("groups", 0) in begins(log, run))
    shutil.rmtree(tmp_path / "saved")
    with WorkerSet(log, run) as worker_set:
        worker_set.start("trainer")
        with pytest.raises(AssertionError, match=r"step 0 must be repeated, .* were deleted from the log .* penstock fork lost"):
            worker_set.wait()
