"""Weights are fetched by a thread of their own: the newest version counts, and one that cannot be read is waited for."""

import threading
from collections.abc import Iterator

import pytest

from penstock.infra.tensors.machine_memory import MachineMemory
from penstock.pipeline.runtime.weights import receive as weight_prefetch
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.topics import weights
from tests.support.number_run import RUN, log_with
from tests.support.published_weights import Publishing, chunks_read, wait_for
from tests.support.waiting import until

pytest.importorskip("torch")
LIMIT_S = 60.0


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publishing]:
    monkeypatch.setattr(weight_prefetch, "_POLL_S", 0.01)
    return Publishing(log_with())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Versions are brought while this is set."""
    gate, bring = threading.Event(), weight_prefetch.bring
    monkeypatch.setattr(weight_prefetch, "bring", lambda *given, **named: gate.wait(LIMIT_S) and bring(*given, **named))
    gate.set()
    return gate


def lose_chunks(published: Publishing, version: int) -> None:
    """Cut off the partitions of a version's chunks before them."""
    for partition, offset in weights.chunk_places(published.writer.state.manifests[version]):
        published.log.truncate((f"{RUN}.weights", partition), offset)


def test_a_joiner_reads_the_newest_anchor_and_the_deltas_after_it_and_nothing_older(
    published: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = chunks_read(monkeypatch)
    for version in range(7):  # anchors are 0, 3 and 6
        published.version(version)
    prefetch = WeightPrefetch(published.log, RUN)
    wait_for(prefetch, 6)
    assert chunks == [6]
    for version in (7, 8):
        published.version(version)
        wait_for(prefetch, version)
    assert chunks == [6, 7, 8]
    prefetch.close()
    joiner = WeightPrefetch(published.log, RUN)
    wait_for(joiner, 8)
    assert chunks[3:] == [6, 7, 8]
    assert sorted(joiner.state.manifests) == [0, 3, 4, 5, 6, 7, 8]
    joiner.close()


def test_who_waits_for_a_version_hears_of_it_as_soon_as_it_is_here(published: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN)
    wait_for(prefetch, 0)
    monkeypatch.setattr(weight_prefetch, "_POLL_S", 2 * LIMIT_S)
    published.version(1)
    wait_for(prefetch, 1)  # from here on it polls for longer than this test waits
    published.version(2)
    while prefetch.version < 2:
        assert prefetch._changed.wait(LIMIT_S)
        prefetch._changed.clear()
    published.writer.write("run-closed", step=0, details='{"status": "stopped", "reason": ""}')
    prefetch.close()


def test_a_version_that_is_lost_leaves_the_worker_with_the_one_it_has_until_it_is_published_again(
    published: Publishing, gate: threading.Event
) -> None:
    said = list[str]()
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN, notify=said.append)
    wait_for(prefetch, 0)
    gate.clear()
    published.version(1)
    lose_chunks(published, 1)
    gate.set()
    until(lambda: said)
    assert said[0].startswith(f"weight version 1 cannot be read: weights of version 1: no chunk at {RUN}.weights/")
    wait_for(prefetch, 0)
    published.writer.repair_newest()
    wait_for(prefetch, 1)
    assert said[1:] == ["weight version 1 was read"]
    prefetch.close()


def test_a_worker_whose_place_in_a_partition_was_deleted_meanwhile_connects_anew(published: Publishing, gate: threading.Event) -> None:
    said = list[str]()
    for version in (0, 1):
        published.version(version)
    prefetch = WeightPrefetch(published.log, RUN, notify=said.append)
    wait_for(prefetch, 1)
    gate.clear()
    for version in range(2, 10):  # 3, 6 and 9 are whole
        published.version(version)
    kept = dict[int, int]()
    for partition, offset in weights.chunk_places(published.writer.state.manifests[9]):
        kept[partition] = min(offset, kept.get(partition, offset))
    places = [(f"{RUN}.weights", p) for p in range(2, published.log.partitions(f"{RUN}.weights") or 0)]
    published.log.delete_records({at: kept.get(at[1], end) for at, end in published.log.end_offsets(places).items()})
    gate.set()
    wait_for(prefetch, 9)
    assert not [line for line in said if line.startswith("version 9 cannot")]
    prefetch.close()


def test_the_end_of_the_run_ends_the_thread(published: Publishing) -> None:
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN)
    wait_for(prefetch, 0)
    published.writer.close_run(steps=0, status="finished", reason="over")
    prefetch._thread.join(LIMIT_S)
    assert prefetch.state.closed is not None
    assert not prefetch._thread.is_alive()


def test_workers_of_one_machine_read_each_version_once_and_another_goes_on_when_the_one_that_read_ends(
    published: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = chunks_read(monkeypatch)
    monkeypatch.setattr(weight_prefetch, "REQUEST_EVERY_S", 0.05)
    published.version(0)
    workers = [WeightPrefetch(published.log, RUN, shared=True) for _ in range(4)]
    for version in range(1, 6):
        for worker in workers:
            wait_for(worker, version - 1)
        published.version(version)
    for worker in workers:
        wait_for(worker, 5)
    assert chunks == [0, 1, 2, 3, 4, 5]
    for left in (3, 2, 1):
        workers.pop(0).close()
        published.version(9 - left)
        for worker in workers:
            wait_for(worker, 9 - left)
    assert chunks == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    workers.pop().close()


@pytest.mark.parametrize("forbidden", [False, True], ids=["the reading one is frozen", "sockets are forbidden"])
def test_a_worker_that_cannot_share_reads_for_itself(published: Publishing, monkeypatch: pytest.MonkeyPatch, forbidden: bool) -> None:
    said = list[str]()

    def silent(_: object) -> None:
        raise TimeoutError("timed out")

    def refused(_: object) -> bool:
        if forbidden:
            raise PermissionError("not permitted")
        return False

    monkeypatch.setattr(MachineMemory, "request_file", silent)
    monkeypatch.setattr(MachineMemory, "claim", refused)
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN, notify=said.append, shared=True)
    wait_for(prefetch, 0)
    reason = "not permitted" if forbidden else "timed out"
    assert said == [f"weights cannot be shared with other workers on this machine ({reason}): this worker reads its own copy"]
    prefetch.close()
