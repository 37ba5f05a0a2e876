"""A run that trains adapters publishes them: every worker forms the weights that merged publication gives, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.topics import weights
from tests.support.edited_run import EditedRun
from tests.support.listed_records import broken
from tests.support.trainer_alone import outcome_of
from tests.support.worker_set import WorkerSet, audited, clean, complete, config_of, records_of

pytestmark = [pytest.mark.costly, pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")]


def adapting(model: Path, directory: Path, *, encoding: str, **sections: Any) -> Any:
    trainer = {"lora_rank": 4, "lr": 3e-2, "checkpoint_every": 2}
    return config_of(model, directory, trainer=trainer, weights={"encoding": encoding}, run={"steps": 5, "seed": 7}, **sections)


def encodings(log: MemoryLog, run: str) -> list[str]:
    records = records_of(log, f"{run}.weights")
    return [weights.read(record, run=run)[1].encoding for record in records if record.partition == weights.MANIFESTS]


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLog, dict[str, Any]]:
    """A run that publishes its first version whole and then adapters, and its report."""
    log = MemoryLog()
    return log, complete(log, "adapters-auto", adapting(tiny_model, tmp_path_factory.mktemp("auto"), encoding="auto"))


def test_a_run_ends_in_the_same_weights_however_they_are_published(
    adapters: tuple[MemoryLog, dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    merged = MemoryLog()
    reports = {"auto": adapters, "merged": (merged, complete(merged, "adapters-merged", adapting(tiny_model, tmp_path, encoding="merged")))}
    assert all(audited(log, f"adapters-{name}").clean for name, (log, _) in reports.items())
    assert encodings(adapters[0], "adapters-auto") == ["full", *4 * ["adapter"], "adapter"]
    assert "adapter" not in encodings(merged, "adapters-merged")
    found = {name: outcome_of(log, f"adapters-{name}") for name, (log, _) in reports.items()}
    assert found["auto"] == found["merged"]
    for name in ("reward", "tokens"):
        assert adapters[1][name] == reports["merged"][1][name]
    assert len({digest for _, digest in found["auto"]["versions"]}) == 6


@pytest.mark.slow
def test_workers_that_join_late_and_a_trainer_that_comes_back_go_on_with_adapters(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    undisturbed, log, late = MemoryLog(), MemoryLog(), f"{run_id}-late"
    config = adapting(tiny_model, tmp_path, encoding="adapter", schedule={"mode": "pipelined"})
    complete(undisturbed, run_id, config)
    with WorkerSet(log, late) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config)
        worker_set.wait(lambda: encodings(log, late).count("adapter") >= 2)
        for name in ("rollout-0", "trainer"):
            worker_set.stop(name)
        worker_set.start("trainer")
        worker_set.start("rollout", 0)
        worker_set.wait()
    clean(log, late)
    assert outcome_of(log, late)["versions"] == outcome_of(undisturbed, run_id)["versions"]
    assert encodings(log, late) == encodings(undisturbed, run_id)


def test_the_audit_finds_a_damaged_adapter_and_one_whose_digest_does_not_fit(adapters: tuple[MemoryLog, dict[str, Any]]) -> None:
    log, run_id = adapters[0], "adapters-auto"
    records = [record for topic in log.topics(f"{run_id}.") for record in records_of(log, topic)]

    def found_in(kind: str, where: dict[str, Any], change: Callable[[Any], Any]) -> set[str]:
        edited = EditedRun(run_id, records)
        edited.alter(kind, change, where=where)
        return broken(edited.audit())

    def damaged(chunk: weights.Chunk) -> weights.Chunk:
        return replace(chunk, data=bytes(chunk.data[:200]) + bytes([chunk.data[200] ^ 1]) + bytes(chunk.data[201:]))

    EditedRun(run_id, records).clean()
    assert found_in("chunks", {"version": 1}, damaged) == {"chunks"}
    assert "digests" in found_in("manifests", {"encoding": "adapter"}, lambda held: replace(held, digest=held.digest[::-1]))
