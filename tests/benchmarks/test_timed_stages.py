"""Stages that take time instead of computing: their events have the simulator's times, whatever the machine's load."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.timed import pages
from benchmarks.support.timed.engine import TimedEngine
from benchmarks.support.timed.stages import Stages
from penstock.infra.engines.base import Completion, GroupRequest, Sampling
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.launch.planning.simulator import simulate
from penstock.pipeline.launch.planning.workload import Workload, linear, lognormal
from penstock.pipeline.scheduling.rules import preset

GROUPS, SAMPLES = 6, 4


def stages(**more: bool) -> tuple[Workload, Stages]:
    schedule = preset("synchronous", prompts_per_step=GROUPS, samples_per_prompt=SAMPLES, steps_per_version=1)
    work = Workload(
        schedule=schedule, steps=1, lengths=lognormal(50, 0.5), engines=1, concurrency=6, decode=linear(0.5, 0.1), slots=GROUPS, seed=3
    )
    return work, Stages.of(work, speed_up=1000.0, **more)


def generated(engine: TimedEngine) -> list[Completion]:
    """All samples of `GROUPS` groups, which are requested at once."""
    sampling = Sampling(max_new_tokens=1000, stop_ids=(2,))
    for group in range(GROUPS):
        engine.submit(
            GroupRequest(
                group=group, prompt_ids=np.ones(3, np.int32), samples=tuple(range(SAMPLES)), rows=SAMPLES, seed=0, sampling=sampling
            )
        )
    completions: list[Completion] = []
    while not engine.idle:
        completions += engine.step()
    return completions


def test_samples_end_at_the_times_of_the_simulation() -> None:
    work, timed = stages()
    completions = generated(TimedEngine(timed))
    assert [len(completion.token_ids) for completion in sorted(completions, key=lambda each: (each.group, each.sample))] == [
        length for group in range(GROUPS) for length in work.lengths.of_group(group, samples=SAMPLES, seed=work.seed)
    ]
    lasted_s = (max(each.ended_ns for each in completions) - min(each.started_ns for each in completions)) / 1e9 * timed.speed_up
    assert lasted_s == pytest.approx(simulate(work).wall_s, rel=0.01)


def test_without_priority_rows_are_filled_from_all_groups() -> None:
    started = {by_group: generated(TimedEngine(stages(by_group=by_group)[1])) for by_group in (True, False)}
    orders = {
        by_group: [each.group for each in sorted(done, key=lambda each: (each.started_ns, each.group))]
        for by_group, done in started.items()
    }
    assert orders[True] == sorted(orders[True])
    assert orders[False] != sorted(orders[False])


def test_weights_that_load_in_flight_start_a_span() -> None:
    engine = TimedEngine(stages()[1])
    tensor = TensorBytes(name="w", dtype="float32", shape=(1,), data=b"\0" * 4)
    engine.load_weights(0, [tensor])
    engine.submit(GroupRequest(group=0, prompt_ids=np.ones(3, np.int32), samples=(0,), rows=1, seed=0, sampling=Sampling(
        max_new_tokens=1000, stop_ids=(2,))))  # fmt: skip
    engine._advance(engine._at_s + 10.5 * 0.6 / 1000)
    engine.load_weights(1, [tensor])
    (completion,) = engine._advance(engine._at_s + 1.0)
    assert [tuple(span) for span in completion.spans] == [(0, 0), (1, 10)]


def test_a_table_replaces_the_one_between_its_comments_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n")
    pages.replace_table("x", pages.markdown(["n", "v"], [["one", json.dumps(1)]]), page=page)
    assert page.read_text() == "a\n<!-- x -->\n|n|v|\n|---|--:|\n|one|1|\n<!-- /x -->\nb\n"
    with pytest.raises(SystemExit, match="found 0"):
        pages.replace_table("y", "", page=page)
