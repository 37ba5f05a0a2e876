"""A step whose groups hold no trained token is committed without an update, and every reader agrees on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.explain import as_json, text
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.inspect.report.text import as_text
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.steps import ReplayRequest
from penstock.pipeline.replay.verify import ReplayResult, replay
from penstock.topics.groups import Group
from tests.support import listed_records
from tests.support.trainer_alone import config_for, group_of, trained, written
from tests.support.worker_set import audited

MaskedRun = tuple[MemoryLog, str, dict[str, Any]]


@pytest.fixture
def masked_run(run_id: str, tiny_model: Path, tmp_path: Path) -> MaskedRun:
    """Every sample ran out of tokens and is masked; the trainer dies once after a step and once in recovery."""
    log = MemoryLog()
    config = config_for(tiny_model, tmp_path, algorithm={"truncated": "mask"}, trainer={"lr_schedule": "linear"})
    written(log, run_id, config, [group_of(number, version=max(0, number // 2 - 1)) for number in range(12)])
    return log, run_id, trained(log, run_id, "ledger.step.after:5", "recovery.repeated:1")


def test_a_run_without_a_trained_token_ends_with_the_weights_it_began_with(masked_run: MaskedRun) -> None:
    log, run, outcome = masked_run
    assert outcome["status"] == "finished"
    assert outcome["kinds"] == {"run-opened": 1, "step": 6, "version": 7, "run-closed": 1}
    assert len({digest for _, digest in outcome["versions"]}) == 1
    for entry in read_ledger_history(log, run).steps:
        assert (entry.boundaries, entry.metrics["trained_samples"], entry.metrics["samples"]) == ((), 0.0, 4.0)
        assert (entry.metrics["loss"], entry.metrics["grad_norm"]) == (0.0, 0.0)
    violated = listed_records.broken(audited(log, run))
    assert violated <= {"group-samples", "prompt-arithmetic"}  # nobody drew the samples of this run, and no feeder admitted its prompts


def test_report_explain_and_replay_say_that_a_step_was_empty(masked_run: MaskedRun) -> None:
    log, run, _ = masked_run
    report = collect(log, run)
    assert report["empty_steps"] == 6
    assert "6 of 6 steps had no trained token and did not change the weights" in as_text(report)
    life = as_json.explain(log, run, 3, notify=lambda _: None)
    assert life["status"] == "trained"
    assert {sample["trained"] for sample in life["samples"]} == {"truncated, and algorithm.truncated = mask"}
    assert "the step has no trained token, so it did not change the weights" in text.as_page(life)
    recording, result = Recording.open(log, run), ReplayResult(run)
    replay(recording, ReplayRequest(), result=result, notify=lambda _: None)
    recording.close()
    assert (result.matching, result.first, result.whole) == (6, None, True)


def half_masked(number: int) -> Group:
    """A group whose first sample is whole and whose second ran out of tokens."""
    group = group_of(number, version=0)
    whole, cut = group.samples
    return replace(group, samples=(replace(whole, rollout=replace(whole.rollout, finish="stop")), cut))


@pytest.mark.parametrize(("loss", "expected"), [("grpo", 2.0), ("dr_grpo", 2.0), ("dapo", 1.0)])
def test_masked_samples_count_in_what_a_step_is_divided_by_unless_the_run_is_of_the_first_edition(
    run_id: str, tiny_model: Path, tmp_path: Path, loss: str, expected: float
) -> None:
    """`expected`: the loss and the gradient under the first edition beside those under the second; two of four samples are masked."""
    found = {}
    for edition in (1, 2):
        same = {"proximal": "behaviour", "correction": "none", "clip_dual": 0.0}  # what else differs between the editions
        chosen = {"loss": loss, "defaults": edition, "truncated": "mask", **same}
        config = config_for(tiny_model, tmp_path, run={"steps": 1, "seed": 7}, algorithm=chosen, trainer={"checkpoint_every": 0})
        log, run = MemoryLog(), f"{run_id}-{edition}"
        written(log, run, config, [half_masked(number) for number in range(2)])
        trained(log, run)
        (entry,) = read_ledger_history(log, run).steps
        assert (entry.metrics["trained_samples"], entry.metrics["samples"]) == (2.0, 4.0)
        found[edition] = (entry.metrics["grad_norm"], entry.metrics["loss"])
    assert found[2][0] > 0.0
    assert found[1] == pytest.approx([expected * value for value in found[2]], rel=1e-5)
