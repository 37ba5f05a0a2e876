"""A trainer that comes back, on the in-memory log: from a checkpoint or from the beginning, to the same bits or to a clear stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import Unrecoverable
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.workers.trainer.resuming import Resumed
from penstock.workers.trainer.worker import Trainer
from tests.support.number_run import RUN, STEPS, NumberBackend, config_of, log_with, scored, session_of

pytestmark = pytest.mark.usefixtures("checkpoints_at_once")

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine's arithmetic adds to each step."""
    chosen: dict[str, Any] = {"drift": 0.0}
    monkeypatch.setattr(policy_trainer, "make_backend", lambda *_, **__: NumberBackend(**chosen))
    return chosen


def trainer_of(log: MemoryLog, checkpoints: Path | None, *, begin: bool = True, **chosen: Any) -> Trainer:
    transactions = log.transactions(f"{RUN}.trainer")  # fences the thread of an earlier trainer
    past = read_ledger_history(log, RUN)
    session = session_of(log, config_of(checkpoints, trainer=chosen))
    trainer = Trainer.open(session, transactions, Resumed(past=past))
    if begin:
        trainer.start(Resumed(past=past))
    return trainer


def digest_of(trainer: Trainer) -> str:
    return trainer.policy.weights().digest


@pytest.mark.parametrize("kept", [True, False])
def test_a_trainer_comes_back_to_the_same_bits_from_its_checkpoint_or_from_the_log(tmp_path: Path, *, kept: bool) -> None:
    checkpoints = tmp_path if kept else None
    log = log_with(scored(2 * STEPS))
    first = trainer_of(log, checkpoints)
    for _ in range(3):
        assert first.train_step()
    second = trainer_of(log, checkpoints)
    assert digest_of(second) == digest_of(first)
    values = second.session.reporter.values
    assert (values["recovered_from_step"], values["repeated_steps"]) == ((2, 1) if kept else (0, 3))
    assert second.train_step()
    second.end()
    past = read_ledger_history(log, RUN)
    assert [entry.step for entry in past.steps] == [0, 1, 2, 3]
    assert past.trained == list(range(8))
    assert past.ledger_state.closed is not None


def test_another_arithmetic_stops_the_trainer_with_the_numbers(arithmetic: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    log = log_with(scored(2 * STEPS))
    first = trainer_of(log, None)
    assert first.train_step()
    arithmetic["drift"] = 1e-9
    with pytest.raises(Unrecoverable, match=r"step 0 repeated from the log gave weights blake3:[0-9a-f]{9}…, recorded"):
        trainer_of(log, None, on_mismatch="stop")
    assert "the arithmetic differs from that of the run so far, so repeated steps may differ: drift 0.0 -> 1e-09" in capsys.readouterr().out
    arithmetic |= {"drift": 1e-9, "told": 0.0}
    log = log_with(scored(2 * STEPS))
    trainer_of(log, None).train_step()
    arithmetic["drift"] = 2e-9  # with the same fingerprint and on a CPU nobody expects it
    with pytest.raises(Unrecoverable, match=r"--set trainer.on_mismatch=rebase"):
        trainer_of(log, None)


@pytest.mark.parametrize("kept", [True, False])
def test_another_arithmetic_is_recorded_and_the_run_goes_on_from_its_weights(
    tmp_path: Path, arithmetic: dict[str, Any], *, kept: bool
) -> None:
    log = log_with(scored(2 * STEPS))
    first = trainer_of(log, tmp_path if kept else None)
    for _ in range(3):
        assert first.train_step()
    arithmetic["drift"] = 1e-9
    second = trainer_of(log, tmp_path if kept else None)
    (entry,) = [entry for entry in read_ledger_history(log, RUN).entries if entry.kind == "rebased"]
    details = json.loads(entry.details or "")
    assert (entry.step, entry.digest) == (3, digest_of(second))
    assert details["changed"] == {"drift": ["0.0", "1e-09"]}
    assert {(one["step"], one["name"]) for one in details["differences"]} == {(n, "weights digest") for n in ((2,) if kept else (0, 1, 2))}
    assert second.train_step()
    newest = digest_of(second)
    third = trainer_of(log, tmp_path if kept else None, on_mismatch="stop" if kept else "rebase")
    assert digest_of(third) == newest  # the checkpoint made at the rebase is where it begins
    assert third.session.reporter.values["repeated_steps"] == (0 if kept else 4)
    third.end()
    past = read_ledger_history(log, RUN)
    assert [entry.step for entry in past.steps] == [0, 1, 2, 3]
    assert past.ledger_state.manifests[4].digest == newest == past.ledger_state.closed.digest


def test_where_the_fingerprint_is_the_same_a_gpu_may_give_other_bits_and_a_cpu_may_not(arithmetic: dict[str, Any]) -> None:
    def again(device: str, **chosen: Any) -> tuple[MemoryLog, Trainer]:
        """A trainer that comes back where a step gives other bits than it gave the first."""
        log = log_with(scored(2 * STEPS))
        arithmetic.update(device=device, told=0.0, drift=0.0)
        assert trainer_of(log, None, **chosen).train_step()
        arithmetic["drift"] = 1e-9
        return log, trainer_of(log, None, **chosen)

    log, second = again("NVIDIA H100 80GB HBM3")
    (entry,) = [entry for entry in read_ledger_history(log, RUN).entries if entry.kind == "rebased"]
    details = json.loads(entry.details or "")
    assert (details["changed"], entry.step, entry.digest) == ({}, 1, digest_of(second))
    assert [(one["step"], one["name"]) for one in details["differences"]] == [(0, "weights digest")]
    for device, chosen in (("cpu", {}), ("NVIDIA H100 80GB HBM3", {"on_mismatch": "stop"})):
        with pytest.raises(Unrecoverable, match="step 0 repeated from the log gave weights"):
            again(device, **chosen)


def test_a_request_to_stop_ends_the_repetition() -> None:
    log = log_with(scored(2 * STEPS))
    first = trainer_of(log, None)
    for _ in range(2):
        assert first.train_step()
    second = trainer_of(log, None, begin=False)
    second.session.stop.set()
    second.start(Resumed(past=read_ledger_history(log, RUN)))
    second.end()
    assert second.policy.steps_done == 0
    assert len(read_ledger_history(log, RUN).steps) == 2


def test_a_trainer_that_is_asked_to_stop_says_what_it_still_finishes(tmp_path: Path) -> None:
    trainer = trainer_of(log_with(scored(2 * STEPS)), tmp_path)
    assert trainer.finishing() == "finishes step 0 if all its groups have arrived, otherwise drops it; then writes a checkpoint"
    for _ in range(2):
        trainer.train_step()
    line = "finishes step 2 if all its groups have arrived (about 1 s), otherwise drops it; then writes a checkpoint (about 1 s)"
    assert trainer.finishing() == line
