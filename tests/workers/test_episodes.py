"""Whole runs over trajectories of several turns on the in-memory log: what is trained, and what becomes of broken environments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.archive.sql import ask
from penstock.pipeline.inspect.explain.as_json import explain
from penstock.pipeline.inspect.explain.text import as_page
from penstock.topics import groups
from penstock.topics.rollouts import reward_of
from tests.support.counting_run import counting_run
from tests.support.environments import COUNTING
from tests.support.worker_set import clean, complete, records_of

ROLES = ("trainer", "rollout", "scorer", "feeder")


@dataclass(frozen=True, slots=True)
class InMemory:
    """A run's tables for questions in SQL that name none of its raw records."""

    log: Any
    run: str

    def rows(self, name: str) -> Any:
        raise AssertionError(name)


def test_trajectories_are_drawn_scored_and_trained_and_the_audit_is_clean(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    log = MemoryLog()
    config = counting_run(tiny_model, tmp_path, sampling={"max_new_tokens": 40})
    report = complete(log, run_id, config, roles=ROLES)
    assert (report["status"], report["steps"], report["groups"]["failed"]) == ("finished", 2, 0)
    samples = [sample for record in records_of(log, f"{run_id}.groups") for sample in groups.read(record, run=run_id)[1].samples]
    assert len({sample.reward for sample in samples}) > 1
    for sample in samples:
        rollout = sample.rollout
        assert sample.reward == reward_of(rollout.turns)
        assert rollout.segments == ((0, len(rollout.token_ids), 0),)
        drawn = np.zeros(len(rollout.token_ids), bool)
        for turn in rollout.turns or ():
            drawn[turn.start : turn.end] = turn.source == "model"
        assert np.array_equal(drawn, rollout.loss_mask)
        assert rollout.environment_seed is not None and (rollout.environment or "").endswith(":Counting")
    audit = clean(log, run_id)
    assert next(result.examined for result in audit.results if result.check.name == "trajectory-turns") >= len(samples)
    played = report["episodes"]
    assert played["trajectories"] >= len(samples) and 1 <= played["turns_mean"] <= 3
    assert (played["broken"], played["segments_mean"]) == (0, 1.0)
    figures = "any_value(step) step, sum(reward) reward, count(*) filter (source = 'model') turns"
    rows = ask(InMemory(log, run_id), f"select group_id, sample, {figures} from turns group by all").to_pylist()
    found = {(row["group_id"], row["sample"]): (row["reward"], row["turns"]) for row in rows}
    for sample in samples:
        turns = sum(turn.source == "model" for turn in sample.rollout.turns or ())
        assert found[sample.rollout.group, sample.rollout.sample] == (sample.reward, turns)
    assert {row["step"] for row in rows} >= {0, 1}
    life = explain(log, run_id, samples[0].rollout.group, notify=lambda _: None)
    assert [turn["source"] for turn in life["samples"][0]["turns"][:2]] == ["prompt", "model"]
    assert f"turns in {samples[0].rollout.environment} (seed {samples[0].rollout.environment_seed}), rewards" in as_page(life)


@pytest.mark.parametrize(("oversample", "failed"), [pytest.param(1, False, marks=pytest.mark.slow), (0, True)])
def test_a_broken_environment_is_no_zero_but_covered_by_oversampling_or_a_failed_group(
    run_id: str, tiny_model: Path, tmp_path: Path, oversample: int, failed: bool
) -> None:
    log = MemoryLog()
    # The first sample whose environment begins breaks whenever it is tried; no other does.
    breaking = COUNTING.replace('breaks="", times=1', 'breaks="reset-raises", times=1')
    config = counting_run(
        tiny_model, tmp_path, code=breaking, run={"steps": 1}, sampling={"max_new_tokens": 40}, schedule={"oversample": oversample}
    )
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"retries": 0})})
    report = complete(log, run_id, config, roles=ROLES)
    assert report["status"] == "finished"
    ended = [groups.read(record, run=run_id)[1] for record in records_of(log, f"{run_id}.groups")]
    reasons = [group.reason or "" for group in ended if group.outcome == "failed"]
    assert bool(reasons) == failed
    assert all(reason.startswith("environment-reset: RuntimeError: no such luck") for reason in reasons)
    assert all(sample.rollout.finish != "abort" for group in ended for sample in group.samples)
    assert report["dead_letters"]["by_kind"] == ({"environment-failed": 1} if failed else {})
    if failed:
        assert report["episodes"]["causes"] == {"reset": 1}
    clean(log, run_id)
