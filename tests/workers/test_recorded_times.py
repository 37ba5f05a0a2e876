"""A recorded run as a workload: simulated, it takes about as long as it took, and what is too short is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.report.summary import collect
from penstock.pipeline.launch.planning import recorded
from penstock.pipeline.launch.planning.simulator import simulate
from tests.support.worker_set import WorkerSet, complete, config_of

LONG_ENOUGH: dict[str, Any] = {
    "run": {"steps": 8},
    "rollout": {"workers": 1, "engine": "toy", "toy_delay_s": 0.01, "concurrency": 1},
    "algorithm": {"filter_zero_variance": False},
}
"""A toy engine that draws one group at a time, 10 ms a decode step: sleeping is most of the run, which depends little on the machine."""


def run_and_read(run: str, model: Path, directory: Path, **sections: Any) -> tuple[Log, recorded.RunTimes]:
    log = MemoryLog()
    complete(log, run, config_of(model, directory, **LONG_ENOUGH | sections))
    return log, recorded.read(log, run)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous", "one_step_off", "in_flight"])
@pytest.mark.slow
def test_a_run_simulated_with_its_own_times_takes_as_long_as_it_took(mode: str, run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    schedule = {"mode": mode, "prompts_per_step": 4, "samples_per_prompt": 4}
    _, record = run_and_read(run_id, tiny_model, tmp_path, schedule=schedule)
    work = recorded.workload(record)
    # within 5 % on a quiet machine and over more steps; here threads of one process share cores with other tests
    assert simulate(work).wall_s == pytest.approx(recorded.wall_s(record), rel=0.25)
    drawn = {span.group for span in record.sample_spans}
    assert all(work.lengths.of_group(group, samples=4, seed=0).sum() == _tokens(record, group) for group in drawn)


def test_a_run_whose_groups_are_all_as_long_is_simulated_too(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    _, record = run_and_read(run_id, tiny_model, tmp_path, sampling={"max_new_tokens": 1})
    assert simulate(recorded.workload(record)).wall_s > 0
    assert recorded.compare(record, run=run_id).variants


@pytest.fixture(scope="module")
def timed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, recorded.RunTimes]:
    """A pipelined run of four groups a step, and what is recorded of its times."""
    return run_and_read("timed", tiny_model, tmp_path_factory.mktemp("timed"))


def test_steps_that_waited_may_compute_longer_than_the_others(timed: tuple[Log, recorded.RunTimes]) -> None:
    record = replace(timed[1], steps=list(timed[1].steps))
    for number, step in enumerate(record.steps):
        times = {"wait_s": 5.0, "compute_s": 4.0} if number % 2 else {"wait_s": 0.0, "compute_s": 0.1}
        record.steps[number] = replace(step, time_ns=step.time_ns + 20 * 10**9, metrics={**step.metrics, **times})
    found = recorded.times_as_json(recorded.workload(record))
    assert min(found.values()) >= 0.0, found
    assert found["step_s"] > 2.05  # all computing begins with the last group
    assert recorded.compare(record, run="timed").variants


def _tokens(record: recorded.RunTimes, group: int) -> int:
    return sum(span.tokens for span in record.sample_spans if span.group == group)


def test_a_report_accounts_for_all_time_and_the_plan_tells_what_other_workers_and_schedules_would_give(
    timed: tuple[Log, recorded.RunTimes],
) -> None:
    (log, record), run_id = timed, "timed"
    report = collect(log, run_id)
    for role, seconds in report["time_spent"].items():
        uses = [value for name, value in seconds.items() if name.endswith("_s") and name != "total_s"]
        assert sum(uses) == pytest.approx(seconds["total_s"], rel=0.01), role
    assert report["time_spent"]["rollout"]["busy_s"] == pytest.approx(report["time"]["generate_s"], rel=1.0)
    assert report["bottleneck"]["who"] in (*report["time_spent"], "turns")
    assert len(report["rounds"]) == report["steps"]
    assert report["length_order_correlation"] == 0.0
    found = recorded.compare(record, run=run_id)
    assert {one.workers for one in found.variants} == {1, 2}
    assert {one.mode for one in found.variants} == {"synchronous", "pipelined", "one_step_off", "in_flight", "bounded"}
    own = next(one for one in found.variants if one.mode == "pipelined" and one.workers == 1)
    assert own.outcome.wall_s == found.outcome.wall_s
    assert run_id in recorded.as_text(found)
    assert recorded.as_json(found)["deviation"] == pytest.approx(found.deviation)


def test_a_run_without_enough_steps_is_refused(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    complete(log := MemoryLog(), run_id, config_of(tiny_model, tmp_path, run={"steps": 2}, rollout={"engine": "toy"}))
    with pytest.raises(ValueError, match=r"has 2 steps; .* needs at least 3"):
        recorded.read(log, run_id)
    with WorkerSet(log, "unknown") as worker_set, pytest.raises(ValueError, match="no run"):
        recorded.read(worker_set.log, "unknown")
