"""Weights that change between decode steps: what is in flight goes on, what can no longer be fresh is ended, nothing too old is trained.

The toy engine draws; the trainer, the topics and the audit are the real ones.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from penstock.infra.engines import toy
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.data.run_data import order
from penstock.pipeline.inspect.report.text import as_text
from penstock.topics import prompts
from penstock.topics.rollouts import Rollout
from tests.support.in_flight import SlowGroups, config_in_flight, run_of
from tests.support.worker_set import records_of

ROWS = 40


def spans(samples: Iterable[Rollout]) -> list[int]:
    return [len(sample.span_versions) for sample in samples]


@pytest.fixture
def slow_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "ToyEngine", SlowGroups)


@pytest.mark.usefixtures("slow_groups")
def test_samples_in_flight_go_on_under_new_weights_and_say_so(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    report, samples, _ = run_of(MemoryLog(), run_id, config_in_flight(tiny_model, tmp_path))
    assert max(spans(samples)) >= 3
    assert all((np.diff(sample.span_versions) > 0).all() for sample in samples)
    assert 1 <= report["lag"]["max"] <= 4
    assert {sample.finish for sample in samples} <= {"stop", "length"}


@pytest.mark.usefixtures("slow_groups")
def test_a_group_that_can_no_longer_be_fresh_is_aborted_and_replaced(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    log, config = MemoryLog(), config_in_flight(tiny_model, tmp_path, schedule={"mode": "bounded"})
    report, samples, ended = run_of(log, run_id, config)
    aborted = {sample.group for sample in samples if sample.finish == "abort"}
    assert aborted
    assert aborted == {group.group for group in ended if group.outcome == "abandoned"}
    assert all("the group would be stale" in (group.reason or "") for group in ended if group.group in aborted)
    assert report["groups"]["abandoned"] == len(aborted)
    assert report["length"]["abandoned"] == pytest.approx(np.mean([len(one.token_ids) for one in samples if one.group in aborted]))
    prompts_of = [prompts.read(record, run=run_id)[1] for record in records_of(log, f"{run_id}.prompts")]
    rows = {prompt.group: (prompt.epoch, prompt.row) for prompt in prompts_of}
    again = {prompt.group: prompt.again for prompt in prompts_of if prompt.again is not None}
    assert report["repeated"] == len(again) == len(set(again.values())) > 0
    assert set(again.values()) <= aborted - set(again)  # once and not twice
    assert all(rows[group] == rows[first] for group, first in again.items())
    fresh = [rows[group] for group in sorted(rows) if group not in again]
    assert fresh == [order(config.run.seed, place, ROWS) for place in range(len(fresh))]  # no row lost its turn
    assert f"{len(again)} prompts sent again after their groups were abandoned" in " ".join(as_text(report, full=True).split())
    assert report["lag"]["max"] <= 1


@pytest.mark.usefixtures("slow_groups")
def test_old_tokens_of_a_group_that_goes_on_are_not_trained(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    chosen = config_in_flight(tiny_model, tmp_path, schedule={"mode": "bounded", "stale_in_hand": "continue"})
    report, samples, _ = run_of(MemoryLog(), run_id, chosen)
    cut = [sample for sample in samples if not sample.loss_mask.all()]
    assert cut
    for sample in (sample for sample in cut if sample.loss_mask.any()):
        assert sample.version_min == sample.token_versions[sample.loss_mask].min() > sample.span_versions[0]
    assert report["lag"]["max"] <= 1
    assert report["groups"]["abandoned"] == 0


def test_a_group_is_closed_when_enough_of_its_samples_have_ended(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    chosen = config_in_flight(
        tiny_model, tmp_path, run={"steps": 8}, sampling={"max_new_tokens": 30}, schedule={"oversample": 2, "samples_per_prompt": 3}
    )
    report, samples, ended = run_of(MemoryLog(), run_id, chosen)
    by_group = {group.group: [sample.rollout.sample for sample in group.samples] for group in ended}
    assert {len(numbers) for numbers in by_group.values()} == {3}
    assert any(max(numbers) >= 3 for numbers in by_group.values())
    assert len(samples) == report["samples"]
    assert report["dead_letters"]["total"] == 0


@pytest.mark.parametrize(
    ("max_lag", "stale_in_hand"),
    [(0, "abort"), pytest.param(0, "finish", marks=pytest.mark.slow), pytest.param(1, "abort", marks=pytest.mark.slow)],
)
def test_of_r_plus_s_groups_the_first_r_are_trained_and_the_others_end_by_the_rules(
    run_id: str, tiny_model: Path, tmp_path: Path, max_lag: int, stale_in_hand: str
) -> None:
    extra = {"mode": "bounded", "max_lag": max_lag, "stale_in_hand": stale_in_hand, "prompts_per_step": 2, "oversample_groups": 3}
    report, samples, _ = run_of(MemoryLog(), run_id, config_in_flight(tiny_model, tmp_path, run={"steps": 10}, schedule=extra))
    counts, told = dict(report["groups"]), report["redundancy"]
    assert counts.pop("admitted") == sum(counts.values())
    assert counts["trained"] == told["trained"] == 20 <= told["scored"]
    assert counts["stale"] + counts["abandoned"] + counts["unused"] >= 3
    assert counts["abandoned"] == told["unfinished"] <= len({one.group for one in samples if one.finish == "abort"})
    assert report["lag"]["max"] <= max_lag
    assert told["length"]["trained"] == pytest.approx(report["length"]["trained"])
    assert "trained samples have" in as_text(report)


def test_extra_groups_are_refused_where_each_group_is_waited_for(tiny_model: Path, tmp_path: Path) -> None:
    for schedule in ({"order": "submission"}, {"mode": "one_step_off", "order": "arrival"}):
        with pytest.raises(ValueError, match=r"schedule\.oversample_groups: 2 is useless"):
            config_in_flight(tiny_model, tmp_path, schedule=schedule | {"oversample_groups": 2})


@pytest.mark.parametrize("mode", ["in_flight", "bounded"])
def test_weights_between_decode_steps_need_an_engine_that_takes_them(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine = 'vllm'"):
        config_in_flight(tiny_model, tmp_path, schedule={"mode": mode}, rollout={"engine": "transformers"})
