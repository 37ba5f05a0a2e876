"""Versions that are adapters on version 0: what a reader reads of them, and what it does when something is wrong."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.infra.errors import LogError, RecordMissing
from penstock.infra.tensors.adapted import Adapted, Adapter
from penstock.infra.tensors.host_memory import NONE
from penstock.infra.tensors.stream import HASH, TensorBytes, digest
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.weights.read import BaseWeights, ChunkReader, bring, fetch
from penstock.pipeline.runtime.weights.receive import read_ends
from penstock.topics import weights
from penstock.topics.weights import Chunk
from penstock.topics.wire.record import Record
from penstock.workers.trainer.run_writer import RunWriter
from tests.support.a_run import with_chunk
from tests.support.log_helpers import EditedLog
from tests.support.number_run import RUN, config_of, log_with, session_of

ROWS, COLUMNS, RANK = 40, 30, 2
FIRST = [
    TensorBytes(name="adapted", dtype="float32", shape=(ROWS, COLUMNS), data=bytes(np.arange(ROWS * COLUMNS, dtype=np.float32))),
    TensorBytes(name="frozen", dtype="bfloat16", shape=(5,), data=bytes(range(10))),
]
ADAPTER_BYTES = 29 + 4 * RANK * (ROWS + COLUMNS)


def weights_of(version: int) -> Weights:
    rng = np.random.default_rng(version)
    a, b = (rng.standard_normal(size).astype(np.float32) for size in ((RANK, COLUMNS), (ROWS, RANK)))
    adapters = {"adapted": Adapter(a=a, b=b * np.float32(bool(version)), scale=0.5)}
    adapted = Adapted(below=lambda: iter(FIRST), below_digest=lambda name: digest(FIRST, name), adapters=adapters)
    return Weights(adapted.merged, HASH, adapted)


class Trainer:
    """Publishes versions of a model of two tensors, of which one has an adapter."""

    def __init__(self, versions: int, **chosen: Any) -> None:
        self.log = log_with()
        self.log.__class__ = EditedLog
        self.chosen = chosen
        self.begin().write("run-opened", details="{}")
        for version in range(versions):
            self.publish(version)

    def begin(self, state: LedgerState | None = None) -> RunWriter:
        session = session_of(self.log, config_of(weights=self.chosen, run={"steps": 100}))
        self.writer = RunWriter(session, self.log.transactions(f"{RUN}.trainer"), state or LedgerState(RUN))
        return self.writer

    def publish(self, version: int, content: Weights | None = None) -> None:
        self.writer.publish(content or weights_of(version), version=version, step=version)
        self.writer.finish_publishing()

    @property
    def manifests(self) -> dict[int, weights.Manifest]:
        return self.writer.state.manifests

    @property
    def encodings(self) -> list[str]:
        return [manifest.encoding for _, manifest in sorted(self.manifests.items())]

    def chunk(self, version: int) -> Record:
        partition, offset = weights.chunk_places(self.manifests[version])[0]
        return self.log.read(f"{RUN}.weights", partition, [offset])[0]

    def lose(self, version: int) -> None:
        partition, offset = weights.chunk_places(self.manifests[version])[0]
        self.log.delete_records({(f"{RUN}.weights", partition): offset + 1})


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(4)


@pytest.fixture
def reader(trainer: Trainer) -> Iterator[ChunkReader]:
    reader = ChunkReader(trainer.log, RUN)
    yield reader
    reader.close()


def test_a_version_is_its_adapters_and_has_the_digest_of_merged_weights(trainer: Trainer) -> None:
    assert trainer.encodings == ["full", "adapter", "adapter", "adapter"]
    merged = Trainer(4, encoding="merged")
    assert "adapter" not in merged.encodings
    for version, manifest in trainer.manifests.items():
        assert manifest.digest == merged.manifests[version].digest == weights_of(version).digest
        assert manifest.nbytes == (ADAPTER_BYTES if version else 4 * ROWS * COLUMNS + 10)
        assert fetch(trainer.log, trainer.manifests, version, run=RUN) == weights_of(version).tensors


def test_a_late_joiner_reads_version_0_and_the_newest_and_later_only_the_newest(trainer: Trainer, reader: ChunkReader) -> None:
    copy, below = WeightCopy(), BaseWeights()
    first = bring(copy, trainer.log, trainer.manifests, 2, run=RUN, reader=reader, below=below)
    assert first == trainer.manifests[0].nbytes + ADAPTER_BYTES
    assert bring(copy, trainer.log, trainer.manifests, 3, run=RUN, reader=reader, below=below) == ADAPTER_BYTES
    assert copy.tensors() == weights_of(3).tensors
    follower = LedgerFollower(trainer.log, RUN)
    follower.catch_up()
    assert sorted(follower.state.manifests) == [0, 2, 3]
    follower.close()


def test_a_joiner_finds_version_0_at_the_beginning_and_the_newest_at_the_end_of_many_manifests() -> None:
    trainer = Trainer(300)
    state = LedgerState(RUN, newest_only=True)
    read_ends(trainer.log, RUN, state)
    assert sorted(state.manifests) == [0, 298, 299]
    assert fetch(trainer.log, state.manifests, 299, run=RUN) == weights_of(299).tensors


@pytest.mark.parametrize("place", [0, 8, 20, 28, 29, 29 + 4 * RANK * COLUMNS, ADAPTER_BYTES - 1])
def test_a_wrong_byte_that_even_the_manifest_lists_is_found_out_and_the_next_version_is_right(
    trainer: Trainer, reader: ChunkReader, place: int
) -> None:
    copy, below = WeightCopy(), BaseWeights()
    bring(copy, trainer.log, trainer.manifests, 1, run=RUN, reader=reader, below=below)
    sound, record = trainer.manifests[2], trainer.chunk(2)
    data = bytearray(weights.read_chunk(record, run=RUN)[1].data)
    data[place] ^= 64
    wrong = Chunk(version=2, index=0, data=bytes(data))
    trainer.log.replace(with_chunk(record, wrong, run=RUN))  # type: ignore[attr-defined]
    with pytest.raises(LogError, match="is damaged: its SHA-256 differs from that in the manifest"):
        bring(copy, trainer.log, trainer.manifests, 2, run=RUN, below=below)
    assert copy.holds(1, trainer.manifests[1].digest)
    listed = trainer.manifests | {2: replace(sound, chunk_sha256=(hashlib.sha256(wrong.data).hexdigest(),))}
    with pytest.raises(LogError, match=r"weights of version 2: (LoRA adapter block|LoRA adapters|the LoRA adapters|digest)"):
        bring(copy, trainer.log, listed, 2, run=RUN, below=below)
    assert copy.version in (1, NONE)
    bring(copy, trainer.log, trainer.manifests, 3, run=RUN, below=below)
    assert copy.tensors() == weights_of(3).tensors


def test_what_is_kept_of_version_0_is_read_again_where_it_was_damaged_in_memory(trainer: Trainer, reader: ChunkReader) -> None:
    copy, below = WeightCopy(), BaseWeights()
    bring(copy, trainer.log, trainer.manifests, 1, run=RUN, reader=reader, below=below)
    below._data[3] ^= 64  # type: ignore[index]
    with pytest.raises(LogError, match=r"digest .*, expected "):
        bring(copy, trainer.log, trainer.manifests, 2, run=RUN, reader=reader, below=below)
    assert copy.version == NONE
    bring(copy, trainer.log, trainer.manifests, 2, run=RUN, below=below)
    assert copy.tensors() == weights_of(2).tensors


def test_a_version_whose_chunks_are_lost_is_sent_whole_and_what_follows_as_changes_to_it(trainer: Trainer) -> None:
    trainer.lose(0)
    with pytest.raises(RecordMissing):
        fetch(trainer.log, trainer.manifests, 3, run=RUN)
    trainer.writer.repair_newest()
    trainer.publish(4)
    assert trainer.encodings[3:] == ["full", "delta"]
    for version in (3, 4):
        assert fetch(trainer.log, trainer.manifests, version, run=RUN) == weights_of(version).tensors


def test_a_trainer_that_comes_back_goes_on_with_adapters(trainer: Trainer) -> None:
    trainer.begin(trainer.writer.state)._read_newest()
    trainer.publish(4)
    assert trainer.encodings == ["full"] + 4 * ["adapter"]
    assert fetch(trainer.log, trainer.manifests, 4, run=RUN) == weights_of(4).tensors


def test_merged_weights_are_sent_where_version_0_is_not_what_lies_below_the_adapters() -> None:
    trainer, content = Trainer(1), weights_of(1)
    assert content.adapted is not None
    other = replace(content.adapted, below_digest=lambda _: "of another model")
    trainer.publish(1, Weights(other.merged, HASH, other))
    trainer.publish(2)
    assert trainer.encodings == ["full", "full", "delta"]
    assert fetch(trainer.log, trainer.manifests, 2, run=RUN) == weights_of(2).tensors


def test_adapters_are_deleted_in_the_intervals_of_whole_versions() -> None:
    trainer = Trainer(24, keep="chain", anchor_every=5)
    kept = [number for number in range(24) if _is_there(trainer, number)]
    assert kept == [0, *range(15, 24)]


def _is_there(trainer: Trainer, version: int) -> bool:
    try:
        fetch(trainer.log, trainer.manifests, version, run=RUN)
    except RecordMissing:
        return False
    return True
