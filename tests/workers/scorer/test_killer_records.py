"""A record whose reader dies while it decodes it: read again twice, then set aside; the run goes on in any case."""

import signal
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.topics import metrics
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.metrics import Measurement
from tests.support import deadly_payloads, page_records
from tests.support.a_run import outgoing
from tests.support.deaths import dying_of
from tests.support.foreign_records import letters
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, complete, config_of

GROUP = b"7+8="
"""Stands in the prompt of group 7 alone, where the data is not shuffled."""
BOOM = b"boom!"
LIMIT_S = 400.0
Killers = Mapping[str, Mapping[str, str]]


def a_run_with(
    killers: Killers, broker: str, run: str, config: Any, directory: Path, *, before: Callable[[WorkerSet], None] | None = None
) -> Any:
    """A run of real processes; each one that is killed is started again. Gives the report, the dead letters and the deaths by worker."""
    deaths: Counter[str] = Counter()
    with WorkerSet(broker, run) as worker_set, Processes(broker, run, directory) as workers:
        worker_set.create(config)
        if before is not None:
            before(worker_set)

        def start(name: str) -> None:
            environment = killers.get(name)
            workers.start(name.partition("-")[0], environment=environment, before=deadly_payloads.install if environment else None)

        def ended() -> bool:
            for name, process in list(workers.running.items()):
                if process.exitcode == -signal.SIGKILL:
                    deaths[name] += 1
                    start(name)
            return all(process.exitcode == 0 for process in workers.running.values())

        for name in ("trainer", "rollout-0", "scorer-0", "feeder", "tracker"):
            start(name)
        worker_set.wait(ended, limit_s=LIMIT_S)
        return worker_set.report(), letters(worker_set, run), deaths


def boom(worker_set: WorkerSet) -> None:
    """A measurement that nobody would miss."""
    found = Measurement(worker="rollout-9", role="rollout", incarnation="x", seq=0, kind="progress", time_ns=1, labels={"x": BOOM.decode()})
    page_records.write(worker_set.log, [outgoing(metrics, found, run=worker_set.run)])


def a_config(tiny_model: Path, directory: Path, **sections: Any) -> Any:
    table = {"run": {"steps": 4, "seed": 7}, "rollout": {"workers": 1}, "scorer": {"group_deadline_s": 20.0}, **sections}
    return config_of(tiny_model, directory, **{**table, "data": {"source": str(directory / "data.jsonl"), "shuffle": False}})


@pytest.mark.parametrize("times", [2, 3])
def test_a_trainer_skips_what_has_killed_it_three_times_and_uses_what_killed_it_twice(run_id: str, tiny_model, tmp_path: Path, times: int):
    config, log = a_config(tiny_model, tmp_path), MemoryLog()
    with WorkerSet(log, run_id) as worker_set, dying_of({"trainer": ("groups/1", GROUP)}, times=times) as deaths:
        worker_set.create(config)
        worker_set.start_all(config)
        for death in range(1, times + 1):
            worker_set.wait(lambda death=death: len(deaths) >= death)
            worker_set.abandon("trainer")
            worker_set.start("trainer")
        worker_set.wait()
        report, found = worker_set.report(), letters(worker_set, run_id)
    judge(report, found, plain=lambda: complete(MemoryLog(), run_id, config), skipped={"groups"} if times == 3 else set())


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 3])
def test_processes_skip_what_has_killed_them_three_times_and_use_what_killed_them_twice(
    broker: str, run_id: str, tiny_model, tmp_path: Path, times: int
):
    config = a_config(tiny_model, tmp_path)
    killers = {
        "trainer": deadly_payloads.settings("groups/1", GROUP, deaths=tmp_path / "trainer", times=99 if times == 3 else times),
        "tracker": deadly_payloads.settings("metrics/1", BOOM, deaths=tmp_path / "tracker", times=99 if times == 3 else times),
    }
    report, found, deaths = a_run_with(killers, broker, run_id, config, tmp_path, before=boom)
    assert deaths == {"trainer": times, "tracker": times}
    skipped = {"groups", "metrics"} if times == 3 else set()
    judge(report, found, plain=lambda: complete(broker, f"{run_id}-plain", config), skipped=skipped)


def judge(report: Any, found: list[DeadLetter], *, plain: Callable[[], Any], skipped: set[str]) -> None:
    """What kills twice is used; one record of each of these topics is a dead letter, and the run goes on without it."""
    assert report["status"] == "finished"
    if not skipped:
        assert not found
        assert report["groups"]["stale"] == 0
        assert report["weights"]["digest"] == plain()["weights"]["digest"]
        return
    assert sorted((letter.topic.rpartition(".")[2], letter.kind) for letter in found) == [(topic, "poison") for topic in sorted(skipped)]
    assert all("3 processes of this worker crashed" in letter.reason for letter in found)
    assert report["groups"]["stale"] == 1
    assert report["groups"]["trained"] == 16


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rollout_worker_and_scorer_skip_what_has_killed_them_three_times(broker, run_id, tiny_model, tmp_path: Path):
    config = a_config(tiny_model, tmp_path)
    sample = struct.pack("<2q", 5, 0)  # the payload's body begins with the groups and the samples of its rows: group 5, from sample 0 on
    killers = {
        "rollout-0": deadly_payloads.settings("prompts/1", GROUP, deaths=tmp_path / "rollout", times=99),
        "scorer-0": deadly_payloads.settings("rollouts/1", sample, deaths=tmp_path / "scorer", times=99),
    }
    report, found, deaths = a_run_with(killers, broker, run_id, config, tmp_path)
    assert deaths == {"rollout-0": 6, "scorer-0": 3}  # the prompt of an abandoned group is asked once more, and kills again
    assert report["status"] == "finished"
    assert {(letter.topic.rpartition(".")[2], letter.kind) for letter in found} == {("prompts", "poison"), ("rollouts", "poison")}
    assert report["groups"]["trained"] == 16
    assert report["groups"]["abandoned"] == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_whose_prompt_kills_the_scorer_has_failed_and_another_takes_its_place(broker, run_id, tiny_model, tmp_path: Path):
    killers = {"scorer-0": deadly_payloads.settings("prompts/1", GROUP, deaths=tmp_path / "scorer", times=99)}
    report, found, deaths = a_run_with(killers, broker, run_id, a_config(tiny_model, tmp_path), tmp_path)
    assert deaths == {"scorer-0": 3}
    assert report["status"] == "finished"
    assert [(letter.topic.rpartition(".")[2], letter.kind) for letter in found] == [("prompts", "poison")]
    assert (report["groups"]["trained"], report["groups"]["failed"], report["groups"]["abandoned"]) == (16, 1, 0)
