"""Workers on the trainer's machine load from its memory, and read the log when it is not there."""

from collections.abc import Iterator
from functools import partial
from threading import Event

import pytest

from penstock.infra.errors import LogError
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.weights import direct
from penstock.pipeline.runtime.weights import receive as weight_prefetch
from penstock.pipeline.runtime.weights.publish import ChunkWriter
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from tests.support.number_run import RUN, log_with
from tests.support.published_weights import Publishing, chunks_read, content, tensors_of, wait_for
from tests.support.waiting import until

pytest.importorskip("torch")
LIMIT_S = 60.0


class Trainer(Publishing):
    """Also shows the newest version to this machine's workers."""

    def __init__(self, log: MemoryLog, state: LedgerState | None = None) -> None:
        super().__init__(log, state, transport="ipc")

    def die(self) -> LedgerState:
        """End as a killed process does: the kernel frees its socket; returns what the log knows."""
        self.writer._publisher.close()
        return self.writer.state


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr(weight_prefetch, "_POLL_S", 0.01)
    monkeypatch.setattr(direct, "REQUEST_EVERY_S", 0.02)
    return log_with()


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return chunks_read(monkeypatch)


def test_workers_on_the_trainers_machine_read_no_chunk_and_a_late_one_neither(log: MemoryLog, chunks: list[int]) -> None:
    trainer = Trainer(log)
    trainer.version(0)
    workers = [WeightPrefetch(log, RUN, shared=True, direct=True), WeightPrefetch(log, RUN, direct=True)]
    for version in range(1, 6):
        for worker in workers:
            wait_for(worker, version - 1)
        trainer.version(version)
    workers.append(WeightPrefetch(log, RUN, direct=True))
    for worker in workers:
        wait_for(worker, 5)
        worker.close()
    assert chunks == []
    assert [manifest.encoding for _, manifest in sorted(trainer.writer.state.manifests.items())] == ["full", "delta", "delta"] * 2
    trainer.die()


def test_without_a_trainer_they_read_the_log_and_see_the_memory_of_the_next_one(log: MemoryLog, chunks: list[int]) -> None:
    trainer = Trainer(log)
    for version in range(3):
        trainer.version(version)
    worker = WeightPrefetch(log, RUN, direct=True)
    wait_for(worker, 2)
    assert chunks == []
    state = trainer.die()
    late = WeightPrefetch(log, RUN, shared=True, direct=True)
    wait_for(late, 2)
    assert chunks == [0, 1, 2]
    chunks.clear()
    after = Trainer(log, state)  # reads what it goes on from
    assert chunks == [0, 1, 2]
    chunks.clear()
    for version in (3, 4):
        after.version(version)
        for one in (worker, late):
            wait_for(one, version)
    assert chunks == []
    for one in (worker, late):
        one.close()
    after.die()


@pytest.fixture
def ahead(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Trainer, list[WeightPrefetch], Event]]:
    """A trainer whose version 1 is held up on its way to the log, an early and a late worker with that version, and what ends the wait."""
    finish, may_go_on = ChunkWriter.finish, Event()

    def held_up(self: ChunkWriter) -> None:
        assert not self.version or may_go_on.wait(LIMIT_S)
        finish(self)

    monkeypatch.setattr(ChunkWriter, "finish", held_up)
    trainer = Trainer(log)
    trainer.version(0)
    workers = [WeightPrefetch(log, RUN, direct=True)]
    wait_for(workers[0], 0)
    trainer.writer.publish(Weights(partial(tensors_of, 1)), version=1, step=1)
    wait_for(workers[0], 1)
    workers.append(WeightPrefetch(log, RUN, direct=True))
    wait_for(workers[1], 1)
    assert not trainer.writer._publication.sent  # type: ignore[union-attr]
    yield trainer, workers, may_go_on
    may_go_on.set()
    for worker in workers:
        worker.close()
    trainer.die()


def test_workers_load_a_version_whose_chunks_are_not_sent_and_publish_nothing_of_it_until_the_log_has_it(
    chunks: list[int], ahead: tuple[Trainer, list[WeightPrefetch], Event]
) -> None:
    trainer, workers, may_go_on = ahead
    assert [worker.published() for worker in workers] == [0, 0]
    may_go_on.set()
    trainer.writer.finish_publishing()
    for version in range(1, 8):  # the second worker looks again only after the last
        until(lambda version=version: workers[0].published() == version)  # type: ignore[misc]
        trainer.version(version + 1)
    until(lambda: workers[1].version == 8)
    if 1 in workers[1].state.manifests:
        assert workers[1].published() == 8
    else:
        with pytest.raises(LogError, match="version 1 was loaded before its publication"):
            workers[1].published()
    assert chunks == []


@pytest.mark.parametrize("same", [True, False], ids=["the same weights", "other weights"])
def test_a_trainer_killed_before_its_manifest_is_followed_by_one_whose_version_counts(
    ahead: tuple[Trainer, list[WeightPrefetch], Event], log: MemoryLog, same: bool
) -> None:
    trainer, workers, may_go_on = ahead
    after = Trainer(log, trainer.die())
    assert [worker.published() for worker in workers] == [0, 0]
    may_go_on.set()
    after.writer.publish(Weights(partial(tensors_of, 1 if same else 2)), version=1, step=1)
    after.writer.finish_publishing()
    for worker in workers:
        until(lambda worker=worker: worker.state.newest_version == 1)  # type: ignore[misc]
        if same:
            assert worker.published() == 1
        else:
            with pytest.raises(LogError, match="version 1 was loaded before its publication"):
                worker.published()
    after.die()


def test_a_worker_that_does_not_end_loading_keeps_its_memory_and_holds_up_nobody(log: MemoryLog, chunks: list[int]) -> None:
    trainer = Trainer(log)
    trainer.version(0)
    frozen, worker = WeightPrefetch(log, RUN, direct=True), WeightPrefetch(log, RUN, direct=True)
    wait_for(frozen, 0)
    with frozen.taken() as (found, tensors):
        for version in range(1, 5):
            trainer.version(version)
            wait_for(worker, version)
        assert (found, bytes(tensors[0].data)) == (0, content(0))
    wait_for(frozen, 4)
    assert chunks == []
    for one in (frozen, worker):
        one.close()
    trainer.die()
