"""Runs whose workers load weights from the trainer's memory end in the same weights as others, also when the trainer is killed."""

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.faults import VARIABLE
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.weights.read import ChunkReader
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, clean, complete, config_of, same_run

IPC = {"transport": "ipc", "anchor_every": 2}


def test_workers_on_the_trainers_machine_read_no_chunks_and_draw_the_same(
    tiny_model: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, by_workers = ChunkReader.read, list[str]()

    def noted(self: ChunkReader, manifest: Any) -> Any:
        if threading.current_thread().name == "weights":
            by_workers.append(f"{self.run} {manifest.version}")
        return read(self, manifest)

    monkeypatch.setattr(ChunkReader, "read", noted)
    reports = {}
    for name, chosen in (("log", {}), ("memory", IPC)):
        config = config_of(tiny_model, tmp_path, run={"steps": 3, "seed": 7}, weights=chosen)
        log = MemoryLog()
        reports[name] = complete(log, f"{run_id}-{name}", config)
        clean(log, f"{run_id}-{name}")
    assert reports["memory"]["weights"]["digest"] == reports["log"]["weights"]["digest"]
    assert reports["memory"]["groups"] == reports["log"]["groups"]
    assert by_workers
    assert not [one for one in by_workers if "memory" in one]


@pytest.mark.slow
def test_a_trainer_that_is_killed_again_and_again_is_followed_by_one_whose_memory_the_workers_find(
    broker: str, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    config = config_of(tiny_model, tmp_path, run={"steps": 6, "seed": 7}, weights=IPC)
    plain = complete(broker, f"{run_id}-plain", config)
    run = f"{run_id}-killed"
    with WorkerSet(broker, run) as watching, Processes(broker, run, tmp_path) as workers:
        watching.create(config)
        for role in ("rollout", "scorer", "feeder"):
            workers.start(role)
        for fault in ("ledger.version.before:2", "chunk.sent:2", "ledger.version.after:2"):
            workers.start("trainer", environment={VARIABLE: fault})
            assert workers.ended("trainer", limit_s=400.0) == -9, workers.text("trainer")
        workers.start("trainer")
        report = workers.finish(watching)
        said = workers.text("rollout")
    clean(broker, run)
    assert "cannot be read" not in said
    same_run(report, plain)
