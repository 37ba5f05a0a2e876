"""A trainer whose gradients differ in their last bit from process to process: the run survives every death, and says what happened."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.backends.base import LossFunction, TokenBatch
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.audit import report as audit_report
from penstock.pipeline.inspect.explain import as_json, text
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.steps import ReplayRequest
from penstock.pipeline.replay.verify import ReplayResult, replay
from penstock.pipeline.runtime.factories import make_backend
from penstock.workers.trainer import resuming
from tests.support.trainer_alone import config_for, group_of, killed, trained, written
from tests.support.worker_set import WorkerSet, clean, config_of

torch = pytest.importorskip("torch")

DEATHS = {
    "after a step, before its version, at once after a recovery": ("ledger.step.after:2", "ledger.version.before:2", "ledger.step.after:1"),
    "before and after a rebase is recorded": ("ledger.step.after:4", "ledger.rebased.before:1", "ledger.rebased.after:1", "chunk.sent:2"),
}


class NoisyBackend:
    """A torch backend whose every gradient is off by `ulps` units in the last place: what another process's kernels may give."""

    def __init__(self, inner: Any, ulps: int, *, before: int = 10**9) -> None:
        """Noise is added to steps below `before` only."""
        self.__dict__.update(inner=inner, ulps=ulps, before=before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def backward(self, batch: TokenBatch, loss_fn: LossFunction, *, denominator: float | None = None) -> dict[str, float]:
        stats: dict[str, float] = self.inner.backward(batch, loss_fn, denominator=denominator)
        for master in self.inner.masters:
            for _ in range(self.ulps if self.inner.steps < self.before else 0):
                master.grad = torch.nextafter(master.grad, torch.full_like(master.grad, torch.inf))
        return stats


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    ulps = itertools.count()
    monkeypatch.setattr(policy_trainer, "make_backend", lambda *given, **named: NoisyBackend(make_backend(*given, **named), next(ulps)))


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param("after a step, before its version, at once after a recovery", marks=pytest.mark.slow),
        "before and after a rebase is recorded",
    ],
)
def test_a_run_whose_trainer_is_killed_again_and_again_ends_and_tells_of_three_rebases(
    run_id: str, tiny_model: Path, tmp_path: Path, deaths: str
) -> None:
    trainer = {"checkpoint_every": 3, "checkpoint_dir": str(tmp_path / "kept"), "on_mismatch": "rebase"}
    config = config_of(
        tiny_model, tmp_path, run={"steps": 7, "seed": 7}, rollout={"workers": 1}, trainer=trainer, schedule={"prompts_per_step": 2}
    )
    log = MemoryLog()
    with WorkerSet(log, run_id) as worker_set:
        worker_set.create(config, ("rollout", "scorer", "feeder"))
        for fault in DEATHS[deaths]:
            killed(log, run_id, fault)
        worker_set.start("trainer")
        worker_set.wait()
        report = worker_set.report()
    assert (report["status"], report["steps"], report["groups"]["trained"]) == ("finished", 7, 14)
    rebased = [entry for entry in read_ledger_history(log, run_id).entries if entry.kind == "rebased"]
    assert len(rebased) == len(report["rebased"]) == 3
    assert all(one["recorded"] != one["found"] for found in report["rebased"] for one in found["differences"])
    assert as_text(report).count("rebased after") == 3
    known = {name for name, value in report["practice"].items() if value is not None}
    assert known == set(report["practice"]) - {"peak_gpu_bytes"}  # measured by real steps, on a machine without a GPU
    assert 0.0 < report["practice"]["entropy"] < 10.0
    assert "nats a token" in as_text(report, full=True)

    assert audit_report.as_text(clean(log, run_id)).count("note: rebased after") == 3

    last = report["groups"]["admitted"] - 1
    group = next(n for n in range(last, 0, -1) if n in read_ledger_history(log, run_id).trained)
    life = as_json.explain(log, run_id, group, notify=lambda _: None)
    assert [found["entry"] for found in life["step"]["rebased"]] == [entry.seq for entry in rebased]
    assert text.as_page(life).count("rebased after") == 3


@pytest.mark.usefixtures("noise")
def test_a_run_that_is_to_stop_stops(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model, tmp_path, rollout={"workers": 1}, trainer={"on_mismatch": "stop", "checkpoint_every": 0})
    log = MemoryLog()
    with WorkerSet(log, run_id) as worker_set:
        worker_set.create(config, ("rollout", "scorer", "feeder"))
        killed(log, run_id, "ledger.step.after:1")
        worker_set.start("trainer")
        with pytest.raises(AssertionError, match="step 0 repeated from the log gave"):
            worker_set.wait()


def test_a_replay_crosses_a_rebase_by_the_checkpoint_that_was_made_there(
    run_id: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tiny_model, tmp_path, trainer={"checkpoint_every": 50, "checkpoint_dir": str(tmp_path / "kept")})
    log = MemoryLog()
    written(log, run_id, config, [group_of(number, version=max(0, number // 2 - 1)) for number in range(12)])
    ulps = iter((0, 1))  # the second trainer gets other bits while it repeats the first three steps
    with monkeypatch.context() as patch:
        noisy = lambda *given, **named: NoisyBackend(make_backend(*given, **named), next(ulps), before=3)  # noqa: E731
        patch.setattr(policy_trainer, "make_backend", noisy)
        patch.setattr(resuming, "rebases", lambda *_: True)
        trained(log, run_id, "ledger.version.before:4")

    def replayed() -> tuple[ReplayResult, list[str]]:
        said: list[str] = []
        recording, result = Recording.open(log, run_id), ReplayResult(run_id)
        replay(recording, ReplayRequest(keep_going=True), result=result, notify=said.append)
        recording.close()
        return result, said

    result, said = replayed()
    assert (result.matching, result.first) == (6, None)
    assert f"{run_id} was rebased after 3 steps: continuing from the checkpoint of the rebase" in said
    shutil.rmtree(tmp_path / "kept")
    result, said = replayed()
    assert (result.matching, result.first and result.first["step"]) == (3, 3)
    why = "was rebased after 3 steps and the checkpoint of the rebase cannot be used (this machine does not have it)"
    assert any(why in line for line in said)
