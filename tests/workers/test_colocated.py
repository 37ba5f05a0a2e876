"""Trainer and rollout worker on one device by turns: the same run, never both awake, and no kill of one holds up the other."""

import itertools
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.engines.shared_device import SharedDevice
from penstock.infra.engines.transformers.engine import TransformersEngine
from penstock.infra.faults import VARIABLE
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.launch.create import create
from penstock.pipeline.runtime import factories
from tests.support.counting_run import counting_run
from tests.support.in_flight import TOY, config_in_flight
from tests.support.processes import Processes
from tests.support.signals import signal_self
from tests.support.trainer_alone import config_for as alone
from tests.support.trainer_alone import group_of, write_groups, written
from tests.support.worker_set import PIPELINE, WorkerSet, clean, complete, config_of, records_of, same_run

COLOCATED: dict[str, Any] = {"launch": {"placement": "colocated"}, "rollout": {"workers": 1}}
Intervals = dict[str, list[tuple[float, float]]]


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Intervals]:
    """Worker -> the intervals in which it had the device, from before its model wakes to after it sleeps."""
    intervals: Intervals = defaultdict(list)

    class Watched(SharedDevice):
        _began: float | None = None

        @property
        def owned(self) -> bool:
            return self._began is not None

        @owned.setter
        def owned(self, owned: bool) -> None:
            if owned:
                self._began = time.monotonic()
            elif self._began is not None:
                intervals[threading.current_thread().name].append((self._began, time.monotonic()))
                self._began = None

    monkeypatch.setattr(factories, "SharedDevice", Watched)
    yield intervals
    ordered = sorted((interval, name) for name, of in intervals.items() for interval in of)
    assert all(before[1] <= after[0] for (before, _), (after, _) in itertools.pairwise(ordered)), ordered


def config_for(model: Path, directory: Path, *, placement: str = "colocated", **sections: Any) -> Any:
    return config_of(model, directory, **{"launch": {"placement": placement}, "rollout": {"workers": 1}} | sections)


def sound(log: MemoryLog, run: str, report: dict[str, Any]) -> None:
    clean(log, run)
    assert report["status"] == "finished"


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param({"mode": "synchronous"}, id="synchronous"),
        pytest.param({"mode": "pipelined", "steps_per_version": 2}, id="pipelined", marks=pytest.mark.slow),
    ],
)
def test_a_run_on_a_shared_device_ends_in_the_weights_of_one_where_each_has_its_own(
    tiny_model: Path, tmp_path: Path, awake: Intervals, schedule: dict[str, Any]
) -> None:
    held_out = {"source": str(tmp_path / "data.jsonl"), "limit": 4, "every": 2, "samples": 2, "engine": "rollout", "threshold": 0.2}
    reports = {}
    for placement in ("separate", "colocated"):
        log = MemoryLog()
        config = config_for(tiny_model, tmp_path, placement=placement, schedule=schedule, eval=held_out, trainer={"checkpoint_every": 2})
        reports[placement] = complete(log, placement, config)
        sound(log, placement, reports[placement])
    shared, own = reports["colocated"], reports["separate"]
    assert shared["weights"]["digest"] == own["weights"]["digest"]
    measured = [{found["version"]: found["greedy_reward"] for found in report["eval"]} for report in (shared, own)]
    assert measured[0][0] == measured[1][0] and max(measured[0]) == max(measured[1])
    assert set(awake) == {"trainer", "rollout-0"}
    assert min(map(len, awake.values())) >= 4 // schedule.get("steps_per_version", 1)
    assert shared["time_spent"]["trainer"]["no_device_s"] > 0


@pytest.mark.parametrize("mode", ["in_flight", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("one_step_off", "bounded"))])
def test_a_trainer_and_a_worker_that_draws_ahead_hand_the_device_to_each_other(
    run_id: str, tiny_model: Path, tmp_path: Path, awake: Intervals, mode: str
) -> None:
    schedule = {"mode": mode, "prompts_per_step": 1, "samples_per_prompt": 2, "max_drops_per_step": 100}
    rollout = TOY | {"workers": 1, "toy_delay_s": 0.002, "concurrency": 2}
    config, log = config_in_flight(tiny_model, tmp_path, **COLOCATED | {"schedule": schedule, "rollout": rollout}), MemoryLog()
    report = complete(log, run_id, config)
    sound(log, run_id, report)
    assert report["groups"]["trained"] == 16
    assert min(len(of) for of in awake.values()) >= 3


def test_a_trainer_wants_the_device_for_whole_steps_alone_and_keeps_it_while_there_are_some(
    run_id: str, tiny_model: Path, tmp_path: Path
) -> None:
    found, log = [group_of(number, version=0) for number in range(8)], MemoryLog()
    config = alone(tiny_model, tmp_path, schedule={"max_lag": 4}, run={"steps": 4}, **COLOCATED)
    written(log, run_id, config, found[:1])
    drawing = SharedDevice(factories.run_directory(run_id) / "device")
    with WorkerSet(log, run_id) as worker_set:
        worker_set.start("trainer")
        worker_set.wait(lambda: any(record.partition == 0 for record in records_of(log, f"{run_id}.weights")))
        worker_set.wait(drawing.acquire)  # half a step is there: the trainer has nothing to do
        time.sleep(0.5)
        assert not drawing.contended
        write_groups(log, run_id, found[1:6], partitions=config.partitions)
        worker_set.wait(lambda: drawing.contended)
        assert worker_set.report()["steps"] == 0
        drawing.release()
        worker_set.wait(drawing.acquire)  # asked at once, and given once nothing is left to train
        assert worker_set.report()["steps"] == 3
        write_groups(log, run_id, found[6:], partitions=config.partitions)
        drawing.close()
        worker_set.wait()


@pytest.mark.slow
def test_a_worker_that_answers_turns_shares_its_device_too(run_id: str, tiny_model: Path, tmp_path: Path, awake: Intervals) -> None:
    config = counting_run(
        tiny_model, tmp_path, environment={"carrier": "log"}, sampling={"max_new_tokens": 12},
        launch={"environments": 1, "placement": "colocated"},
    )  # fmt: skip
    log = MemoryLog()
    sound(log, run_id, complete(log, run_id, config, roles=(*PIPELINE, "environment")))
    assert set(awake) == {"trainer", "rollout-0"}


def test_a_worker_that_is_stopped_while_it_waits_for_the_device_ends(run_id: str, tiny_model: Path, tmp_path: Path) -> None:
    other = SharedDevice(factories.run_directory(run_id) / "device")
    assert other.acquire()
    with WorkerSet(MemoryLog(), run_id) as worker_set:
        create(config_for(tiny_model, tmp_path), log=worker_set.log, run_id=run_id, notify=lambda _: None)
        worker_set.start("rollout")
        worker_set.start("trainer")
        worker_set.wait(lambda: other.contended)
        worker_set.stop("rollout-0")
        worker_set.stop("trainer")
        assert not worker_set.failures
    other.close()


def die_in_the_third_group() -> None:
    """Let this process kill itself while it draws: it has the device then."""
    begin, left = TransformersEngine._group_of, [3]

    def deadly(engine: TransformersEngine, request: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            signal_self(signal.SIGKILL)
        return begin(engine, request)

    TransformersEngine._group_of = deadly  # type: ignore[method-assign, assignment]


@pytest.mark.slow
def test_a_run_goes_on_after_the_kill_of_either_process_that_has_the_device(broker, run_id, tiny_model, tmp_path):
    config = config_for(tiny_model, tmp_path, schedule={"mode": "synchronous"}, trainer={"checkpoint_every": 2})
    plain = complete(MemoryLog(), f"{run_id}-plain", config)
    run = f"{run_id}-killed"
    with WorkerSet(broker, run) as worker_set, Processes(broker, run, tmp_path) as workers:
        worker_set.create(config)
        for role in ("feeder", "scorer"):
            workers.start(role)
        workers.start("trainer", environment={VARIABLE: "ledger.step.before:2"})
        workers.start("rollout", before=die_in_the_third_group)
        assert workers.ended("rollout-0") == -signal.SIGKILL, workers.text("rollout-0")
        workers.start("rollout")
        assert workers.ended("trainer") == -signal.SIGKILL, workers.text("trainer")
        workers.start("trainer")
        killed = workers.finish(worker_set)
    same_run(killed, plain)
