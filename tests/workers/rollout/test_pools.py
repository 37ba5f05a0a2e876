"""Pools of rollout workers in whole runs: a tagged prompt is drawn in its pool, and elsewhere only where its fallback says so."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.inspect.run_view import load
from penstock.topics import prompts, rollouts
from penstock.topics.turns import replies
from tests.support.counting_run import counting_run
from tests.support.processes import Processes
from tests.support.worker_set import PIPELINE, WorkerSet, clean, complete, config_of, records_of

RUN = "pools"
HARD, EASY = "rollout-0", "rollout-1"
"""The worker of each pool."""
BY_LOG = ("trainer", "environment", "rollout", "scorer", "feeder")


def tagged(model: Path, directory: Path, *, fallback: tuple[str, ...] = (), carrier: str = "", steps: int = 4) -> Config:
    """A run with two pools of one worker each; every third row is hard."""
    rows = directory / "tagged.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1), "level": "hard" if i % 3 == 0 else f"easy-{i % 2}"}) + "\n"
            for i in range(40)
        )
    )
    pools = {"hard": {"tags": ["hard"], "fallback": list(fallback)}, "easy": {"workers": 1}}
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"steps": steps, "seed": 7},
        "data": {"source": str(rows), "max_prompt_tokens": 32, "tag_field": "level"},
        "rollout": {"workers": 2, "pools": pools},
    }
    if not carrier:
        return config_of(model, directory, **sections)
    return counting_run(model, directory, **sections, environment={"carrier": carrier})


def drawn_by(log: Log, run: str = RUN) -> dict[int, set[str]]:
    """Group -> workers that drew its samples, or the turns of its trajectories."""
    workers: dict[int, set[str]] = {}
    found = [(reply.group, reply.worker) for record in records_of(log, f"{run}.replies") for reply in [replies.read(record, run=run)[1]]]
    if not found:
        samples = [sample for record in records_of(log, f"{run}.rollouts") for sample in rollouts.read_all(record, run=run)[1]]
        found = [(sample.group, sample.worker) for sample in samples]
    for group, worker in found:
        workers.setdefault(group, set()).add(worker)
    return workers


def hard_groups(log: Log, run: str = RUN) -> set[int]:
    asked = [prompts.read(record, run=run)[1] for record in records_of(log, f"{run}.prompts")]
    return {prompt.group for prompt in asked if json.loads(prompt.columns)["level"] == "hard"}


@pytest.mark.parametrize("carrier", [pytest.param("", id="groups"), pytest.param("log", id="calls", marks=pytest.mark.slow)])
def test_each_pool_draws_the_prompts_of_its_tags_and_the_weights_are_those_of_a_run_without_pools(
    carrier: str, tiny_model: Path, tmp_path: Path
) -> None:
    log, roles, config = MemoryLog(), BY_LOG if carrier else PIPELINE, tagged(tiny_model, tmp_path, carrier=carrier, steps=3)
    report = complete(log, RUN, config, roles=roles)
    drawn, hard = drawn_by(log), hard_groups(log)
    assert hard and set(drawn) > hard
    assert {group: workers for group, workers in drawn.items() if workers != ({HARD} if group in hard else {EASY})} == {}
    clean(log, RUN)
    without = {"rollout": config.rollout.model_copy(update={"pools": {}}), "data": config.data.model_copy(update={"tag_field": None})}
    plain = config.model_copy(update=without)
    assert complete(MemoryLog(), "plain", plain, roles=roles)["weights"]["digest"] == report["weights"]["digest"]


def test_prompts_of_a_pool_without_workers_wait_for_one_and_no_other_pool_draws_them(tiny_model: Path, tmp_path: Path) -> None:
    config = tagged(tiny_model, tmp_path)
    with WorkerSet(MemoryLog(), RUN) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, ("trainer", "scorer", "feeder"))
        worker_set.start("rollout", 1)
        worker_set.wait(lambda: feeder_says(worker_set) == "waiting for a rollout worker for pool 'hard'")
        worker_set.start("rollout", 0)
        worker_set.wait()
        drawn, hard = drawn_by(worker_set.log), hard_groups(worker_set.log)
    assert {group: workers for group, workers in drawn.items() if workers != ({HARD} if group in hard else {EASY})} == {}


@pytest.mark.slow
def test_the_work_of_a_pool_that_is_killed_moves_to_its_fallback_and_the_weights_are_the_same(
    broker: str, run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    config = tagged(tiny_model, tmp_path, fallback=("easy",))
    plain = complete(MemoryLog(), run_id, config)
    with WorkerSet(broker, run_id) as worker_set, Processes(broker, run_id, tmp_path) as workers:
        worker_set.create(config)
        for slot in (0, 1):
            workers.start("rollout", slot)
        worker_set.start_all(config, ("trainer", "scorer", "feeder"))
        worker_set.wait(lambda: HARD in set().union(*drawn_by(worker_set.log, run_id).values()))
        workers.kill(HARD)
        worker_set.wait(lambda: worker_set.report()["status"] == "finished")
        drawn, hard, report = drawn_by(worker_set.log, run_id), hard_groups(worker_set.log, run_id), worker_set.report()
    moved = {group for group in hard if EASY in drawn[group]}
    assert moved and all(drawn[group] <= {HARD, EASY} for group in hard)
    assert all(drawn[group] == {EASY} for group in drawn if group not in hard)
    assert report["weights"]["digest"] == plain["weights"]["digest"]
    clean(broker, run_id)


def feeder_says(worker_set: WorkerSet) -> str | None:
    feeder = load(worker_set.log, worker_set.run).workers.get("feeder")
    return None if feeder is None else feeder.labels.get("doing")
