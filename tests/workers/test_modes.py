"""Whole runs of all kinds: each schedule on the broker, real prompts for one epoch, a lagging schedule, too many drops."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.explain.as_json import explain
from penstock.pipeline.inspect.recorded_run import read_run
from penstock.pipeline.scheduling.rules import MODES
from tests.support.paths import GSM8K
from tests.support.worker_set import WorkerSet, clean, complete, config_of


# The lag rule of every schedule has its own tests; by default `test_audited_run.py` has a run on a broker whose audit is clean.
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_each_schedule_on_a_broker_keeps_its_lag_and_its_audit_is_clean(broker, run_id, tiny_model, tmp_path: Path, mode: str):
    engine = "toy" if MODES[mode].loads_at == "step" else "transformers"
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 3, "seed": 7},
        schedule={"mode": mode, "prompts_per_step": 2, "samples_per_prompt": 2},
        algorithm={"filter_zero_variance": False},
        rollout={"engine": engine, "workers": 2},
    )
    report = complete(broker, run_id, config)
    assert (report["status"], report["steps"]) == ("finished", 3)
    assert report["groups"]["trained"] == 6
    assert report["lag"]["max"] <= MODES[mode].max_lag
    clean(broker, run_id)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K questions are not beside the checkout")
def test_32_real_questions_go_through_the_pipeline_once_and_every_group_has_one_fate(run_id, tiny_model, tmp_path: Path):
    config = config_of(
        tiny_model,
        tmp_path,
        run={"epochs": 1, "steps": None, "seed": 1},
        data={"source": str(GSM8K), "limit": 32, "prompt_field": "question", "answer_field": "answer", "max_prompt_tokens": 1500},
        reward={"functions": ["math_verify"]},
        schedule={"prompts_per_step": 8, "samples_per_prompt": 2},
        algorithm={"filter_zero_variance": False},
        trainer={"micro_batch_tokens": 4096},
    )
    report = complete(MemoryLog(), run_id, config)
    assert (report["status"], report["steps"], report["samples"]) == ("finished", 4, 64)
    assert {fate: count for fate, count in report["groups"].items() if count} == {"admitted": 32, "trained": 32}
    assert report["dead_letters"]["total"] == 0


@pytest.mark.parametrize(
    "trainer", [{}, pytest.param({"backend": "deepspeed", "zero_stage": 2}, marks=pytest.mark.slow)], ids=["torch", "deepspeed"]
)
def test_a_lagging_run_with_an_evaluator_stays_within_its_lag_and_ends_early_when_asked(
    run_id, tiny_model, tmp_path: Path, trainer: dict[str, Any]
):
    config = config_of(
        tiny_model,
        tmp_path,
        run={"steps": 200, "seed": 3},
        schedule={"mode": "one_step_off", "order": "arrival", "prompts_per_step": 2},
        trainer=trainer,
        eval={"source": str(tmp_path / "data.jsonl"), "limit": 4, "every": 2, "samples": 2, "patience": 1},
    )
    log = MemoryLog()
    report = complete(log, run_id, config, roles=("trainer", "rollout", "scorer", "feeder", "evaluator"))
    assert report["status"] == "finished" and report["steps"] < 200  # an untrained model gets no better
    assert report["lag"]["max"] <= 1 and report["eval"][0]["version"] == 0
    groups = report["groups"]
    assert groups["admitted"] == groups["trained"] + sum(groups[fate] for fate in ("filtered", "stale", "failed", "abandoned", "unused"))
    run = read_run(log, run_id)
    untrained = sorted(set(range(groups["admitted"])) - set(run.past.trained))
    lives = [explain(log, run_id, number, notify=lambda _: None) for number in untrained]
    unused = [life for life in lives if life["status"] == "unused"]
    assert len(unused) == groups["unused"] > 0
    closed = json.loads(run.past.ledger_state.closed.details)
    assert "evaluations since the best" in closed["reason"]
    assert all(life["why"].startswith(f"the run ended first ({closed['reason']}); the group was waiting for ") for life in unused)
    assert all(life["step"] is None and life["version"] is None for life in unused)


@pytest.mark.slow
def test_a_run_whose_groups_are_all_filtered_ends_with_the_cause(run_id, tiny_model, tmp_path: Path):
    (tmp_path / "same.py").write_text("def same(prompts, completions, **columns):\n    return [0.5 for _ in completions]\n")
    config = config_of(
        tiny_model,
        tmp_path,
        reward={"functions": [f"{tmp_path / 'same.py'}:same"]},
        schedule={"prompts_per_step": 2, "samples_per_prompt": 2, "max_drops_per_step": 6},
    )
    with WorkerSet(MemoryLog(), run_id) as worker_set:
        worker_set.create(config, ("trainer", "rollout", "scorer", "feeder"))
        with pytest.raises(AssertionError, match=r"trainer failed: \d+ groups were dropped .* filtered at reward 0.5"):
            worker_set.wait()
    report = worker_set.report()  # once all have ended: a run that was stopped counts as running while workers report
    assert report["status"] == "stopped"
    assert report["groups"]["admitted"] <= 4 + 16  # the feeder does not go on for ever
