"""The trainer dies at every named point between two lines that matter, is started again, and the run ends as if nothing had been."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.faults import POINTS, VARIABLE
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from tests.support.processes import Processes
from tests.support.trainer_alone import config_for, group_of, outcome_of, trained, written

LATER = {"ledger.step.before": 3, "ledger.step.after": 3, "ledger.version.before": 4, "ledger.version.after": 4, "chunk.sent": 4}
"""At which passing the process dies, where the first is not the one that tells most."""
TRANSACTIONS = {"run-opened": 1, "version 0": 2, "step": 5, "version": 6, "checkpoint": 7, "stale": 11, "run-closed": 19}
"""What the n-th transaction of the run commits."""
ALWAYS = "ledger.step.after"
"""The point at which the default suite kills a process; at all points a thread ends there."""
REACHED = [point for point in POINTS if ".rebased." not in point and not point.startswith(("rank.", "snapshot."))]
"""Those that a trainer of one process passes whose repeated steps give the same bits, and whose versions are no small deltas."""
CASES = [(point, LATER.get(point, 1)) for point in REACHED if point != "transaction.sent"]
CASES += [("transaction.sent", number) for number in TRANSACTIONS.values()]
AS_BEFORE = {
    "ledger.version.before", "ledger.step.before", "ledger.stale.before", "checkpoint.before", "checkpoint.renamed", "recovery.loaded",
    "ledger.run-closed.before",
}  # fmt: skip
"""Points at which a trainer leaves what it leaves at the point before: the threads of the slow tests end there."""
IN_THREADS = [
    pytest.param(*case, marks=pytest.mark.slow) if case[0] in AS_BEFORE else case for case in CASES if case[0] != "transaction.sent"
]
MARKED = [case if case[0] == ALWAYS else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Log, str], None]:
    """Creates runs of 12 groups to train, one that is filtered and one that becomes stale; keeps one checkpoint."""
    config = config_for(tiny_model, tmp_path_factory.mktemp("data"), trainer={"checkpoint_keep_last": 1})
    groups = [group_of(number, version=0 if number == 7 else max(0, (number - 1) // 2 - 1)) for number in range(14)]
    groups[3] = group_of(3, version=0, outcome="filtered")
    return lambda log, name: written(log, name, config, groups)


@pytest.fixture(scope="module")
def undisturbed(run: Callable[[Log, str], None]) -> dict[str, Any]:
    log = MemoryLog()
    run(log, "undisturbed-alone")
    return trained(log, "undisturbed-alone")


def test_the_undisturbed_run_is_what_the_cases_count_on(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["stale"] == [7]
    assert undisturbed["forward"].startswith("shared rows")
    assert undisturbed["groups"] == undisturbed["groups"] | {"trained": 12, "stale": 1, "filtered": 1}
    assert [version for version, _ in undisturbed["versions"]] == list(range(7))
    assert undisturbed["kinds"] == {"run-opened": 1, "step": 6, "version": 7, "stale": 1, "run-closed": 1}
    assert sum(undisturbed["kinds"].values()) + 3 == TRANSACTIONS["run-closed"]


def deaths_at(point: str, passing: int) -> list[str]:
    """Recovery has its own points: to get there a trainer must have died before."""
    return (["ledger.step.after:4"] if point.startswith("recovery.") else []) + [f"{point}:{passing}"]


@pytest.mark.parametrize(("point", "passing"), IN_THREADS)
def test_a_trainer_that_goes_no_further_there_is_followed_by_one_that_ends_in_the_same_run(
    run: Callable[[Log, str], None], run_id: str, undisturbed: dict[str, Any], point: str, passing: int
) -> None:
    log = MemoryLog()
    run(log, run_id)
    assert trained(log, run_id, *deaths_at(point, passing)) == undisturbed


@pytest.mark.parametrize(("point", "passing"), MARKED)
def test_a_trainer_process_killed_there_is_followed_by_one_that_ends_in_the_same_run(
    broker: str, run: Callable[[Log, str], None], run_id: str, undisturbed: dict[str, Any], tmp_path: Path, point: str, passing: int
) -> None:
    log = KafkaLog(broker, client_id="tests")
    run(log, run_id)
    with Processes(broker, run_id, tmp_path) as trainer:
        for fault in deaths_at(point, passing):
            trainer.start("trainer", environment={VARIABLE: fault})
            assert trainer.ended("trainer", limit_s=400.0) == -9, trainer.text("trainer")
            assert f"fault point {fault.split(':')[0]}: killing" in trainer.text("trainer")
        trainer.start("trainer")
        assert trainer.ended("trainer", limit_s=400.0) == 0, trainer.text("trainer")
    assert outcome_of(log, run_id) == undisturbed
    log.close()
