"""Versions of one tensor of 256 bytes, published to the in-memory log as a trainer does."""

from functools import partial
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.weights.read import ChunkReader
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.topics.weights import Manifest
from penstock.workers.trainer.run_writer import RunWriter
from tests.support.number_run import RUN, config_of, session_of
from tests.support.waiting import until


def content(version: int) -> bytes:
    return bytes([version]) + bytes(255)


def tensors_of(version: int) -> list[TensorBytes]:
    return [TensorBytes(name="number", dtype="int8", shape=(256,), data=content(version))]


def wait_for(worker: WeightPrefetch, version: int) -> None:
    """Until the worker has a version, which is what was published."""
    until(lambda: worker.wait(0.05) or worker.version >= version, f"version {version}", limit_s=60.0, every_s=0.0)
    with worker.taken() as (found, tensors):
        assert (found, b"".join(bytes(tensor.data) for tensor in tensors)) == (version, content(version))


def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions whose chunks will have been read from the log."""
    read, found = ChunkReader.read, list[int]()

    def noted(self: ChunkReader, manifest: Manifest) -> object:
        found.append(manifest.version)
        return read(self, manifest)

    monkeypatch.setattr(ChunkReader, "read", noted)
    return found


class Publishing:
    """A trainer that publishes a whole version and two deltas in turn; with a `state` it goes on where another one has ended."""

    def __init__(self, log: MemoryLog, state: LedgerState | None = None, **chosen: Any) -> None:
        self.log, session = log, session_of(log, config_of(weights={"anchor_every": 3, **chosen}))
        self.writer = RunWriter(session, log.transactions(f"{RUN}.trainer"), state or LedgerState(RUN))
        if state is None:
            self.writer.write("run-opened", details="{}")
        else:
            self.writer._read_newest()

    def version(self, number: int) -> None:
        self.writer.publish(Weights(partial(tensors_of, number)), version=number, step=number)
        self.writer.finish_publishing()


class NoNews:
    """Weights that stay as they are."""

    def __init__(self, run: str) -> None:
        self.state, self.version = LedgerState(run), 0

    def check(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass

    def published(self) -> int:
        return max(self.version, 0)
