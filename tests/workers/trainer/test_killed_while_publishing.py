"""The trainer dies between any two chunks of a version, and the broker while one is sent: nobody sees half of one, the end is the same."""

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.infra import faults
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.topics import weights
from penstock.workers.trainer import weight_publisher
from tests.support import listed_records, small_chunks
from tests.support.own_broker import OwnBroker
from tests.support.trainer_alone import config_for, group_of, trained, written
from tests.support.worker_set import PIPELINE, WorkerSet, audited, clean, complete, config_of, records_of, same_run

VERSIONS, CHUNKS = 3, 5
"""Versions at each of whose chunks the trainer dies, one of them whole, and the chunks of each."""
POINTS = range(1, VERSIONS * CHUNKS + 1)
ALWAYS = {CHUNKS, CHUNKS + 2}
"""The last chunk of version 0, and one in the middle of a delta."""
MARKED = [point if point in ALWAYS else pytest.param(point, marks=pytest.mark.slow) for point in POINTS]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of five chunks each, published by threads of this process."""
    monkeypatch.setattr(weight_publisher, "send_version", small_chunks.sent_small)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Log, str], None]:
    """Creates runs whose groups are there already: eight of them, in four steps."""
    config = config_for(tiny_model, tmp_path_factory.mktemp("data"), run={"steps": 4, "seed": 7})
    groups = [group_of(number, version=max(0, number // 2 - 1)) for number in range(8)]
    return lambda log, name: written(log, name, config, groups)


def chunk_counts(log: Log, run: str) -> list[tuple[str, int]]:
    """Encoding and number of chunks of each version."""
    manifests = [weights.read(record, run=run)[1] for record in records_of(log, f"{run}.weights") if record.partition == weights.MANIFESTS]
    return [(manifest.encoding, len(manifest.chunk_sizes)) for manifest in manifests]


def broken_promises(log: MemoryLog, run: str) -> set[str]:
    """What the audit finds broken; groups that no worker has drawn are among it."""
    return listed_records.broken(audited(log, run))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("point", MARKED)
def test_a_trainer_that_dies_after_any_chunk_is_followed_by_one_that_publishes_the_same_versions(
    alone: Callable[[Log, str], None], run_id: str, point: int
) -> None:
    logs = MemoryLog(), MemoryLog()
    for log in logs:
        alone(log, run_id)
    plain, killed = trained(logs[0], run_id), trained(logs[1], run_id, f"chunk.sent:{point}")
    assert chunk_counts(logs[0], run_id)[:VERSIONS] == [("full", CHUNKS), ("delta", CHUNKS), ("full", CHUNKS)]
    assert killed == plain
    broken = broken_promises(logs[1], run_id)
    assert broken == broken_promises(logs[0], run_id)
    assert not broken & {"version-numbers", "chunks", "digests", "last-digests"}


@pytest.fixture(scope="module")
def whole(broker: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of an undisturbed run with all its workers, and its configuration."""
    config = config_of(tiny_model, tmp_path_factory.mktemp("worker_set"), run={"steps": 4, "seed": 7}, rollout={"workers": 1})
    return complete(broker, f"published-in-peace-{uuid.uuid4().hex[:6]}", config), config  # several processes may test on one broker


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("point", "passing"), [("chunk.sent", CHUNKS + 2), ("chunk.sent", 2 * CHUNKS), ("ledger.version.before", 2)])
def test_a_broker_killed_while_a_version_is_sent_comes_back_to_the_same_weights(
    own_broker: OwnBroker, whole: Any, run_id: str, monkeypatch: pytest.MonkeyPatch, point: str, passing: int
) -> None:
    plain, config = whole
    left, back = [passing], threading.Timer(1.0, own_broker.start)

    def reach(name: str) -> None:
        left[0] -= name == point
        if name == point and not left[0]:
            own_broker.kill()
            back.start()

    monkeypatch.setattr(faults, "reach", reach)
    bootstrap = own_broker.start()
    with WorkerSet(bootstrap, run_id) as worker_set:
        worker_set.create(config)
        worker_set.start_all(config, PIPELINE)
        worker_set.wait()
        report = worker_set.report()
    back.join()
    assert left[0] <= 0
    clean(bootstrap, run_id)
    same_run(report, plain)
