"""Several processes train as one does: plain torch and DeepSpeed's ZeRO stages, on unequal shares and with an empty one."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.errors import BackendError
from penstock.infra.faults import VARIABLE
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.memory.log import MemoryLog
from penstock.infra.sandbox import keeper
from penstock.pipeline.config.load import from_json, to_json
from penstock.pipeline.config.resume import changed
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.runtime.registration.run_registry import find, write
from penstock.workers.trainer import other_ranks
from penstock.workers.trainer.other_ranks import PARENT
from tests.support import listed_records
from tests.support.deaths import kill_rank_at
from tests.support.processes import Processes
from tests.support.ranks import measured, on_ranks
from tests.support.trainer_alone import config_for, group_of, outcome_of, trained, written
from tests.support.worker_set import audited

CASES: list[tuple[str, dict[str, Any]]] = [
    ("torch", {}),
    *(("deepspeed", {"zero_stage": stage}) for stage in range(4)),
    *(("deepspeed", {"zero_stage": stage, "offload": "optimizer"}) for stage in (1, 2)),
    ("deepspeed", {"zero_stage": 3, "offload": "parameters", "offload_activations": True}),
]
TERM = 0.7
"""Mean absolute advantage of a token here. A loss is a mean of terms of this size that nearly cancel (one of them comes to 0.012), so
that what was rounded in it is relative to them and not to what is left."""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("size", "groups", "by", "cases"),
    [
        pytest.param(2, 2, "computed", CASES[:1], id="two"),
        pytest.param(2, 2, "computed", CASES, id="two, all stages", marks=pytest.mark.slow),
        pytest.param(2, 1, "padded", CASES, id="one of two has nothing", marks=pytest.mark.slow),
        pytest.param(3, 3, "computed", CASES, id="three", marks=pytest.mark.slow),
        pytest.param(3, 2, "padded", CASES, id="one of three has nothing", marks=pytest.mark.slow),
        pytest.param(4, 2, "computed", CASES, id="four with a sample each", marks=pytest.mark.slow),
    ],
)
def test_several_processes_give_the_losses_gradients_and_weights_of_one(
    tiny_model: Path, tmp_path: Path, size: int, groups: int, by: str, cases: list[Any]
) -> None:
    # The gradient of a value head's bias, the sum of a step's advantages, is zero but for rounding, which AdamW scales to the learning
    # rate: with a head the one process divides the step like the others.
    value_head = {"value_lr": 1e-2} if cases == CASES[:1] else {}
    settings: dict[str, Any] = {"model_path": str(tiny_model), "lr": 1e-3, "max_grad_norm": 1e9, **value_head}
    config, of_one = (
        config_for(tiny_model, tmp_path, trainer={"processes": count, "micro_batch_by": by}, schedule={"prompts_per_step": groups})
        for count in (size, size if value_head else 1)
    )
    limit = 2e-6 if size == 3 else 1e-6  # an average of three rounds
    alone = measured(settings, "torch", of_one, groups=groups)
    assert min(norm for _, norm, _ in alone["trained_steps"]) > 0
    for (name, own), found in zip(cases, on_ranks(size, cases, settings, config, groups=groups, directory=tmp_path), strict=True):
        case = f"{name} {own}"
        print(f"{size} processes, {groups} groups, {case}: {apart(found, alone)}")
        losses, norms, batches = np.transpose(found["trained_steps"])
        alone_losses, alone_norms, _ = np.transpose(alone["trained_steps"])
        assert by == "padded" or min(batches) >= size, f"{case}: a rank had no work in a step"
        np.testing.assert_allclose(losses, alone_losses, rtol=0, atol=limit * TERM, err_msg=case)
        np.testing.assert_allclose(norms, alone_norms, rtol=limit, err_msg=case)
        for key in ("first", "trained"):
            for tensor, value in alone[key].items():
                distance = np.linalg.norm(found[key][tensor] - value)
                assert distance <= limit * np.linalg.norm(value), f"{case}: {key} {tensor}"


def apart(found: dict[str, Any], alone: dict[str, Any]) -> str:
    """Largest relative differences of losses (to their terms), of norms, and of whole tensors by their norms."""

    def far(key: str) -> float:
        norms = [(np.linalg.norm(found[key][name] - value), np.linalg.norm(value)) for name, value in alone[key].items()]
        return float(max(gap / norm for gap, norm in norms if norm))

    steps = [np.array(run["trained_steps"])[:, :2] for run in (found, alone)]
    losses, norms = (np.abs(steps[0] - steps[1]) / np.stack([np.full(len(steps[1]), TERM), steps[1][:, 1]], axis=1)).max(axis=0)
    tensors = f"first gradients {far('first'):.1e}, weights after {len(steps[0])} steps {far('trained'):.1e}"
    return f"losses {losses:.1e}, norms {norms:.1e}, {tensors}"


def ends_in_the_same_run(broker: str, run_id: str, folder: Path, config: Config, *, disturb: Callable[[Processes], None]) -> None:
    """Train one run undisturbed and another after `disturb`, and compare what they leave."""
    log, results = KafkaLog(broker, client_id="tests"), []
    groups = [group_of(number, version=max(0, number // 2 - 1), tokens=6 if number % 2 else 2) for number in range(12)]
    for run in (f"{run_id}-a", f"{run_id}-b"):
        written(log, run, config, groups)
        with Processes(broker, run, folder) as trainer:
            if run.endswith("-b"):
                disturb(trainer)
            trainer.start("trainer")
            assert trainer.ended("trainer", limit_s=400.0) == 0, trainer.text("trainer")
        results.append(outcome_of(log, run))
    log.close()
    assert results[0]["status"] == "finished" and results[0] == results[1]
    broken = [listed_records.broken(audited(broker, f"{run_id}-{name}")) for name in "ab"]
    assert broken[0] == broken[1] == {"group-samples", "prompt-arithmetic"}  # nobody drew what these groups hold


POINTS = (
    "ledger.run-opened.after", "ledger.version.after", "rank.trained:2", "ledger.step.before", "checkpoint.some",
    "ledger.checkpoint.before", "ledger.checkpoint.after", "chunk.sent:2", "recovery.repeated", "ledger.step.after:2",
    "ledger.run-closed.before",
)  # fmt: skip
"""Points at which a rank is killed in this order, each further in the run than the one before it."""
KILLED = [
    *(pytest.param(2, first, {"backend": "torch"}, id=f"torch, rank {first} first") for first in (0, 1)),
    *(
        pytest.param(2, first, {"backend": "deepspeed", "zero_stage": stage}, id=f"ZeRO-{stage}, rank {first} first")
        for stage in (1, 2, 3)
        for first in (0, 1)
    ),
    pytest.param(4, 0, {"backend": "torch"}, id="four, one rank at each point"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # fourteen starts of a set, and each imports DeepSpeed
@pytest.mark.parametrize(("size", "first", "own"), KILLED)
def test_a_set_of_which_each_rank_is_killed_at_each_point_ends_in_the_same_run(
    broker: str, tiny_model: Path, run_id: str, tmp_path: Path, size: int, first: int, own: dict[str, Any]
) -> None:
    def disturb(trainer: Processes) -> None:
        for number, point in enumerate(POINTS):
            rank = 0 if point.startswith("rank.") else (first + number) % size  # only other ranks than 0 pass such a point
            if rank:
                trainer.start("trainer", before=partial(kill_rank_at, rank, point))
            else:
                trainer.start("trainer", environment={VARIABLE: point})
            assert trainer.ended("trainer", limit_s=400.0) != 0, point
            assert not rank or f"rank {rank} was killed by SIGKILL" in trainer.text("trainer"), point
        before = trainer.text("trainer").count(" processes: ")
        trainer.start("trainer")
        while trainer.text("trainer").count(" processes: ") == before:
            time.sleep(0.1)
        line = trainer.text("trainer").rpartition(" processes: ")[2].splitlines()[0]
        os.kill(int(re.findall(r"\d+", line)[first]), signal.SIGKILL)
        assert trainer.ended("trainer", limit_s=400.0) != 0

    config = config_for(tiny_model, tmp_path, trainer={"processes": size, "micro_batch_by": "computed", **own})
    ends_in_the_same_run(broker, run_id, tmp_path, config, disturb=disturb)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"backend": "torch"}, {"backend": "deepspeed", "zero_stage": 3}], ids=["torch", "ZeRO-3"])
def test_a_run_goes_on_with_fewer_processes_from_the_checkpoint_and_says_so(
    broker: str, tiny_model: Path, run_id: str, tmp_path: Path, own: dict[str, Any]
) -> None:
    log = KafkaLog(broker, client_id="tests")
    groups = [group_of(number, version=max(0, number // 2 - 1), tokens=4) for number in range(12)]
    written(log, run_id, config_for(tiny_model, tmp_path, trainer={"processes": 2, **own}), groups)
    with Processes(broker, run_id, tmp_path) as trainer:
        trainer.start("trainer", environment={VARIABLE: "rank.trained:4"})
        assert trainer.ended("trainer", limit_s=400.0) == 1
        record = find(log, run_id)
        assert record is not None
        config = changed(from_json(record.config), ["trainer.processes=1"], run=run_id)
        write(log, replace(record, config=to_json(config), updated_ns=time.time_ns()))
        trainer.start("trainer")
        assert trainer.ended("trainer", limit_s=400.0) == 0, trainer.text("trainer")
        said = trainer.text("trainer")
    assert "the arithmetic differs from that of the run so far, so repeated steps may differ: processes 2 -> 1" in said
    assert "checkpoint of step 2 loaded" in said
    assert outcome_of(log, run_id)["status"] == "finished"
    log.close()


def refused(run_id: str, config: Config) -> None:
    log = MemoryLog()
    written(log, run_id, config, [])
    trained(log, run_id)


def test_another_number_of_processes_than_were_started_is_refused(
    tiny_model: Path, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AssertionError, match=r"trainer.processes is 1, but WORLD_SIZE is 2"):
        refused(run_id, config_for(tiny_model, tmp_path))


def test_a_process_whose_rank_0_ended_before_it_could_watch_it_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, "1" if os.getppid() != 1 else "2")
    monkeypatch.setattr(keeper, "prctl", lambda *_: None)  # this process is to outlive its parent
    with pytest.raises(BackendError, match=r"rank 0 of the trainer \(process .*\) has exited"):
        other_ranks.follow(MemoryLog(), "run", model=None)


def test_several_processes_need_a_broker(tiny_model: Path, tmp_path: Path, run_id: str) -> None:
    with pytest.raises(AssertionError, match=r"trainer.processes must be 1 with the in-memory log"):
        refused(run_id, config_for(tiny_model, tmp_path, trainer={"processes": 2}))
