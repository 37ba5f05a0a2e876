"""Weights are fetched by a thread of their own: the newest version counts, each is handed out once, a failure reaches the owner."""

import time
from collections.abc import Iterator
from functools import partial

import pytest

from penstock.infra.errors import LogError
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.learner.run_writer import RunWriter
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.workers.rollout import weight_prefetch
from penstock.workers.rollout.weight_prefetch import WeightPrefetch
from tests.support.number_run import RUN, config_of, log_with, session_of

pytest.importorskip("torch")
LIMIT_S = 10.0


def tensors_of(version: int) -> list[TensorBytes]:
    return [TensorBytes(name="number", dtype="int8", shape=(1,), data=bytes([version]))]


class Published:
    """A log to which a trainer publishes versions."""

    def __init__(self) -> None:
        self.log: MemoryLog = log_with()
        session = session_of(self.log, config_of())
        self.writer = RunWriter(session, self.log.transactions(f"{RUN}.trainer"), LedgerState(RUN))
        self.writer.write("run-opened", details="{}")

    def version(self, number: int) -> None:
        self.writer.publish(Weights(partial(tensors_of, number)), version=number, step=number)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[Published]:
    monkeypatch.setattr(weight_prefetch, "_POLL_S", 0.01)
    return Published()


def wait_for(prefetch: WeightPrefetch, version: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while prefetch.version < version:
        prefetch.wait(0.1)
        assert time.monotonic() < deadline, f"version {version} did not come"


def test_a_joiner_fetches_the_newest_version_and_none_before_it(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    fetch = weight_prefetch.fetch
    monkeypatch.setattr(
        weight_prefetch, "fetch", lambda log, manifest, *, run: fetched.append(manifest.version) or fetch(log, manifest, run=run)
    )
    for version in range(3):
        published.version(version)
    prefetch = WeightPrefetch(published.log, RUN)
    wait_for(prefetch, 2)
    version, tensors = prefetch.take()
    assert (version, bytes(tensors[0].data), fetched) == (2, b"\x02", [2])
    with pytest.raises(AssertionError, match="version 2 was taken already"):
        prefetch.take()
    published.version(3)
    wait_for(prefetch, 3)
    assert prefetch.take()[0] == 3
    prefetch.close()


def test_a_version_that_cannot_be_fetched_is_raised_where_the_weights_are_used(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> list[TensorBytes]:
        raise LogError("chunk 0 is gone")

    monkeypatch.setattr(weight_prefetch, "fetch", gone)
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN)
    with pytest.raises(LogError, match="chunk 0 is gone"):
        wait_for(prefetch, 0)
    with pytest.raises(LogError, match="chunk 0 is gone"):
        prefetch.check()
    prefetch.close()


def test_the_end_of_the_run_ends_the_thread(published: Published) -> None:
    published.version(0)
    prefetch = WeightPrefetch(published.log, RUN)
    wait_for(prefetch, 0)
    published.writer.close_run(steps=0, status="finished", reason="over")
    prefetch._thread.join(LIMIT_S)
    assert prefetch.state.closed is not None
    assert not prefetch._thread.is_alive()
