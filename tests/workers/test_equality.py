"""What the modes promise of each other: the same groups in the same steps, and the same bits at the end."""

from functools import partial
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.topics import rollouts
from tests.support.worker_set import clean, complete, config_of, records_of


@pytest.mark.parametrize("steps_per_version", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_synchronous_and_pipelined_end_in_the_same_weights(run_id, tiny_model, tmp_path: Path, steps_per_version: int):
    def outcome(name: str, mode: str, workers: int) -> dict[str, object]:
        config = config_of(
            tiny_model,
            tmp_path,
            schedule={"mode": mode, "prompts_per_step": 4, "samples_per_prompt": 4, "steps_per_version": steps_per_version},
            rollout={"workers": workers},
        )
        return complete(MemoryLog(), f"{run_id}.{name}".replace(".", "-"), config)

    first, second = outcome("sync", "synchronous", 1), outcome("pipe", "pipelined", 2)
    assert (first["weights"]["digest"], first["reward"]) == (second["weights"]["digest"], second["reward"])
    assert first["groups"]["trained"] == 16
    assert second["lag"]["max"] == 0


@pytest.mark.slow
def test_records_of_several_samples_and_of_one_each_end_in_the_same_weights(run_id, tiny_model, tmp_path: Path, monkeypatch):
    def outcome(name: str) -> tuple[dict[str, object], list[int]]:
        config, log, run = config_of(tiny_model, tmp_path), MemoryLog(), f"{run_id}-{name}"
        report = complete(log, run, config)
        clean(log, run)
        sizes = [len(rollouts.read_all(record, run=run)[1]) for record in records_of(log, f"{run}.rollouts")]
        assert report["samples"] == sum(sizes) == 4 * report["groups"]["admitted"]
        return report, sizes

    together, sizes = outcome("together")
    assert max(sizes) > 1
    monkeypatch.setattr(rollouts, "batches", partial(rollouts.batches, max_samples=1))
    alone, sizes = outcome("alone")
    assert set(sizes) == {1}
    for figure in ("weights", "reward", "tokens"):
        assert together[figure] == alone[figure]
