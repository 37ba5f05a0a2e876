"""The machine loses its power in mid-run: what is on its disk is enough to go on to the same weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.infra.kafka.log import KafkaLog
from tests.support import power_loss
from tests.support.processes import Processes
from tests.support.worker_set import WorkerSet, complete, config_of, same_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(power_loss.COMPILER is None, reason="needs a C compiler: a library in Java notes what was synced"),
]


def committed(log: KafkaLog, run: str, partitions: int) -> dict[tuple[str, int], list[bytes]]:
    """Everything that readers can see of a run, by partition."""
    places = [(f"{run}.{name}", p) for name in ("prompts", "rollouts", "groups") for p in range(partitions)] + [(f"{run}.ledger", 0)]
    places += [(f"{run}.weights", p) for p in range(log.partitions(f"{run}.weights") or 0)]
    tail = log.tail(dict.fromkeys(places, "earliest"))
    found: dict[tuple[str, int], list[bytes]] = {place: [] for place in places}
    for record in tail.read_to_end(60.0):
        found[record.topic, record.partition].append(record.value)
    tail.close()
    return found


def test_a_run_goes_on_after_a_power_loss_and_nothing_committed_is_missing(
    new_home: Callable[[], Path], run_id: str, tiny_model: Path, tmp_path: Path
):
    broker = power_loss.PowerBroker(new_home(), tmp_path)
    config = config_of(tiny_model, tmp_path, run={"steps": 12, "seed": 7}, rollout={"workers": 1})
    bootstrap = broker.start()
    plain = complete(bootstrap, f"{run_id}-plain", config)
    run = f"{run_id}-power"
    roles = ("trainer", "rollout", "scorer", "feeder", "tracker")
    with WorkerSet(bootstrap, run) as watching, Processes(bootstrap, run, tmp_path) as workers:
        watching.create(config)
        for role in roles:
            workers.start(role)
        for steps in (3, 7):
            watching.wait(lambda steps=steps: watching.report()["steps"] >= steps)
            before = committed(watching.log, run, 8)
            for name in workers.running:
                workers.kill(name)
            broker.kill()
            assert broker.cut()[".index"] > 0
            broker.start()
            after = committed(watching.log, run, 8)
            assert {place: values[: len(before[place])] for place, values in after.items()} == before
            for role in roles:
                workers.start(role)
        report = workers.finish(watching)
    broker.kill()
    same_run(report, plain)
