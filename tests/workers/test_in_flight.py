"""Weights that change between decode steps: what is in flight goes on, what can no longer be fresh is ended, nothing too old is trained.

The toy engine draws; the trainer, the topics and the audit are the real ones.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.audit.report import as_text, audit_kafka
from penstock.pipeline.config.load import Config
from penstock.pipeline.launch.create import create
from penstock.topics import groups, rollouts
from penstock.topics.groups import Group
from penstock.topics.samples import Rollout
from penstock.topics.wire.record import Record
from tests.support.crew import Crew, config_of

TOY = {"engine": "toy", "workers": 2, "toy_delay_s": 0.03}


def config_in_flight(model: Path, directory: Path, **sections: Any) -> Config:
    """Groups of very unequal length, a step and a version a group: those that are long see many versions go by."""
    table: dict[str, Any] = {
        "run": {"steps": 16, "seed": 11},
        "schedule": {"mode": "in_flight", "prompts_per_step": 1, "samples_per_prompt": 2, "max_drops_per_step": 100},
        "sampling": {"max_new_tokens": 100},
        "rollout": TOY,
        "algorithm": {"filter_zero_variance": False},
        "trainer": {"lr": 1e-4, "micro_batch_tokens": 400, "export": False},
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return config_of(model, directory, **table)


def run_of(broker: str, run: str, config: Config) -> tuple[dict[str, Any], list[Rollout], list[Group]]:
    """A whole run: its report, its samples and its groups; its audit is clean."""
    with Crew(broker, run) as crew:
        create(config, log=crew.log, run_id=run, say=lambda _: None)
        for role, count in (("trainer", 1), ("rollout", config.rollout.workers), ("scorer", 1), ("feeder", 1)):
            for slot in range(count):
                crew.start(role, slot)
        crew.wait()
        report = crew.report()
        samples = [rollouts.read(record, run=run)[1] for record in everything(crew, run, "rollouts", config.partitions)]
        ended = [groups.read([record], run=run)[1] for record in everything(crew, run, "groups", config.partitions)]
    found = audit_kafka(broker, run)
    assert found.clean, as_text(found)
    assert report["status"] == "finished"
    assert report["groups"]["trained"] == config.run.steps * config.schedule.prompts_per_step
    return report, samples, ended


def everything(crew: Crew, run: str, topic: str, partitions: int) -> Iterable[Record]:
    """All records of a topic."""
    tail = crew.log.tail({(f"{run}.{topic}", partition): "earliest" for partition in range(partitions)})
    found = tail.read_to_end(60.0)
    tail.close()
    return found


def spans(samples: Iterable[Rollout]) -> list[int]:
    return [len(sample.span_versions) for sample in samples]


def test_samples_in_flight_go_on_under_new_weights_and_say_so(broker: str, run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    report, samples, _ = run_of(broker, run_id, config_in_flight(tiny_model, tmp_path))
    assert max(spans(samples)) >= 3
    assert all((np.diff(sample.span_versions) > 0).all() for sample in samples)
    assert 1 <= report["lag"]["max"] <= 4
    assert {sample.finish for sample in samples} <= {"stop", "length"}


def test_a_group_that_can_no_longer_be_fresh_is_aborted_and_replaced(broker: str, run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    bounded = config_in_flight(tiny_model, tmp_path, schedule={"mode": "bounded"})
    report, samples, ended = run_of(broker, run_id, bounded)
    aborted = {sample.group for sample in samples if sample.finish == "abort"}
    assert aborted
    assert aborted == {group.group for group in ended if group.outcome == "abandoned"}
    assert all("could no longer be fresh" in (group.reason or "") for group in ended if group.group in aborted)
    assert report["groups"]["abandoned"] == len(aborted)
    assert report["lag"]["max"] <= 1


def test_old_tokens_of_a_group_that_goes_on_are_not_trained(broker: str, run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    chosen = config_in_flight(tiny_model, tmp_path, schedule={"mode": "bounded", "stale_in_hand": "continue"})
    report, samples, _ = run_of(broker, run_id, chosen)
    cut = [sample for sample in samples if not sample.loss_mask.all()]
    assert cut
    for sample in (sample for sample in cut if sample.loss_mask.any()):
        assert sample.version_min == sample.token_versions[sample.loss_mask].min() > sample.span_versions[0]
    assert report["lag"]["max"] <= 1
    assert report["groups"]["abandoned"] == 0


def test_a_group_is_closed_when_enough_of_its_samples_have_ended(broker: str, run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    chosen = config_in_flight(
        tiny_model, tmp_path, run={"steps": 8}, sampling={"max_new_tokens": 30}, schedule={"oversample": 2, "samples_per_prompt": 3}
    )
    report, samples, ended = run_of(broker, run_id, chosen)
    by_group = {group.group: [sample.rollout.sample for sample in group.samples] for group in ended}
    assert {len(numbers) for numbers in by_group.values()} == {3}
    assert any(max(numbers) >= 3 for numbers in by_group.values())
    assert len(samples) == report["samples"]
    assert report["dead_letters"]["total"] == 0


@pytest.mark.parametrize("mode", ["in_flight", "bounded"])
def test_weights_between_decode_steps_need_an_engine_that_takes_them(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine = 'vllm'"):
        config_in_flight(tiny_model, tmp_path, schedule={"mode": mode}, rollout={"engine": "transformers"})
