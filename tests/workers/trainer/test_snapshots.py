"""A long chain of deltas ends in a full snapshot that is sent while later versions are: none waits for it, and no reader misses it."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.errors import LogError
from penstock.infra.faults import VARIABLE
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.weights.publish import snapshot_partition
from penstock.pipeline.runtime.weights.read import fetch
from penstock.pipeline.runtime.weights.receive import WeightPrefetch
from penstock.topics import weights
from penstock.topics.catalogue import topics_of
from penstock.workers.trainer import weight_publisher
from penstock.workers.trainer.resuming import ResumeOffsets
from penstock.workers.trainer.weight_publisher import Snapshot
from tests.support.listed_records import broken
from tests.support.number_run import RUN
from tests.support.processes import Processes
from tests.support.published_weights import Publishing, chunks_read, tensors_of, wait_for
from tests.support.trainer_alone import config_for, group_of, outcome_of, trained, written
from tests.support.waiting import until
from tests.support.worker_set import LogLocation, audited, records_of

pytest.importorskip("torch")
PARTITIONS = 6
LIMIT_S = 60.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Chunks of snapshots are sent while this is set, or once they are abandoned."""
    gate, send = threading.Event(), Snapshot.send

    def waiting(self: Snapshot, outgoing: Any) -> Any:
        until(lambda: gate.is_set() or self.abandoned.is_set(), "an open gate", limit_s=LIMIT_S)
        return send(self, outgoing)

    monkeypatch.setattr(Snapshot, "send", waiting)
    return gate


def log_of(partitions: int = PARTITIONS) -> MemoryLog:
    log = MemoryLog()
    log.create_topics(topics_of(RUN, partitions=1, weight_partitions=partitions))
    return log


def encodings(published: Publishing) -> list[str]:
    return [manifest.encoding for _, manifest in sorted(published.writer.state.manifests.items())]


def state_of(log: MemoryLog) -> Any:
    return read_ledger_history(log, RUN).ledger_state


def snapshot_ended(published: Publishing) -> bool:
    snapshot = published.writer._publisher.snapshot
    return snapshot is None or snapshot.ended.is_set()


def settled(published: Publishing) -> None:
    """Until the snapshot, if any, is committed."""
    until(lambda: snapshot_ended(published), "the snapshot", limit_s=LIMIT_S)
    published.writer.finish_publishing(wait=False)


def test_versions_are_published_while_a_snapshot_is_sent_and_a_joiner_then_reads_it_and_the_deltas_after_it(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Publishing(log_of())
    for version in range(6):
        published.version(version)
    assert encodings(published) == ["full", *["delta"] * 5]
    gate.set()
    settled(published)
    assert encodings(published) == ["full", "delta", "delta", "full", "delta", "delta"]
    state = state_of(published.log)
    assert state.manifests == published.writer.state.manifests
    assert {partition for partition, _ in weights.chunk_places(state.manifests[3])} == {PARTITIONS - 1}
    for version in range(6):
        assert fetch(published.log, state.manifests, version, run=RUN) == tensors_of(version)
    chunks, joiner = chunks_read(monkeypatch), WeightPrefetch(published.log, RUN)
    wait_for(joiner, 5)
    assert chunks == [3, 4, 5]
    joiner.close()
    published.version(6)
    settled(published)
    assert encodings(published)[6:] == ["full"]  # the chain was 3 deltas long again


def test_a_reader_that_holds_deltas_is_not_disturbed_by_a_later_snapshot(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    published, chunks = Publishing(log_of()), chunks_read(monkeypatch)
    reader = WeightPrefetch(published.log, RUN)
    for version in range(5):
        published.version(version)
        wait_for(reader, version)
    gate.set()
    settled(published)
    for version in (5, 6, 7):
        published.version(version)
        settled(published)
        wait_for(reader, version)
    assert chunks == list(range(8))
    reader.close()


def test_what_a_trainer_left_of_a_snapshot_counts_as_a_duplicate_and_its_successor_sends_another(monkeypatch: pytest.MonkeyPatch) -> None:
    send = weight_publisher.send_version
    monkeypatch.setattr(weight_publisher, "send_version", lambda *args, **named: send(*args, **{**named, "max_bytes": 100}))
    published, passes = Publishing(log_of()), Snapshot.send

    def dies(self: Snapshot, outgoing: Any) -> Any:
        passes(self, outgoing)
        raise LogError("the trainer dies")

    def versions_until_the_snapshot_ends() -> None:
        for version in range(4):
            published.version(version)
        settled(published)

    monkeypatch.setattr(Snapshot, "send", dies)
    with pytest.raises(LogError, match="the trainer dies"):
        versions_until_the_snapshot_ends()
    monkeypatch.setattr(Snapshot, "send", passes)
    successor = Publishing(published.log, state_of(published.log))
    successor.version(4)
    settled(successor)
    successor.version(5)
    assert encodings(successor) == ["full", "delta", "delta", "delta", "full", "delta"]
    values = successor.writer.session.reporter.values
    assert (values["duplicates"], values.get("dead_letters")) == (1, None)
    assert fetch(successor.log, state_of(successor.log).manifests, 5, run=RUN) == tensors_of(5)


def test_a_trainer_that_stops_gives_a_snapshot_up_and_one_that_closes_its_run_waits_for_it(gate: threading.Event) -> None:
    published = Publishing(log_of())
    for version in range(4):
        published.version(version)
    published.writer.stop()
    assert encodings(published) == ["full", "delta", "delta", "delta"]
    gate.set()
    published.version(4)
    published.writer.close_run(steps=4, status="finished", reason="over")
    assert encodings(published) == ["full", "delta", "delta", "delta", "full"]


def test_old_chunks_are_deleted_up_to_the_last_but_one_snapshot_and_no_chunk_that_a_reader_needs() -> None:
    published = Publishing(log_of(), keep="chain")
    for version in range(14):
        published.version(version)
        settled(published)
    manifests = published.writer.state.manifests
    snapshots = [version for version, manifest in manifests.items() if manifest.encoding == "full"]
    assert snapshots == [0, 3, 6, 9, 12]
    published.version(14)
    for version in (0, *range(9, 15)):
        assert fetch(published.log, manifests, version, run=RUN) == tensors_of(version)
    for version in (3, 4, 6, 7):
        with pytest.raises(LogError, match="no chunk"):
            fetch(published.log, manifests, version, run=RUN)


@pytest.mark.parametrize(("keep", "since"), [("all", 0), ("chain", 0), ("chain", 9)])
def test_a_successor_that_knows_the_versions_since_a_snapshot_reads_no_chunk_again_that_its_predecessor_sent(keep: str, since: int) -> None:
    published = Publishing(log_of(12), keep=keep)
    for version in range(14):
        published.version(version)
        settled(published)
    state = LedgerState(RUN)
    for record in records_of(published.log, f"{RUN}.weights"):
        if not record.partition and (manifest := weights.read(record, run=RUN)[1]).version in (0, *range(since, 14)):
            state.newest_version = max(state.newest_version, manifest.version - 1)
            state.take(manifest)
    successor = Publishing(published.log, state, keep=keep)
    successor.writer.state.last_seq = published.writer.state.last_seq
    for version in range(14, 26):
        successor.version(version)
        settled(successor)
    values = successor.writer.session.reporter.values
    assert (values.get("dead_letters"), values.get("duplicates")) == (None, None)
    assert fetch(successor.log, successor.writer.state.manifests, 25, run=RUN) == tensors_of(25)


def test_a_trainer_resumes_at_the_first_manifest_of_a_snapshots_version_after_which_no_manifest_is_missing(gate: threading.Event) -> None:
    published, offsets = Publishing(log_of()), ResumeOffsets()
    for version in range(6):
        published.version(version)
    gate.set()
    settled(published)
    records = [record for record in records_of(published.log, f"{RUN}.weights") if not record.partition]
    manifests = [weights.read(record, run=RUN)[1] for record in records]
    assert [manifest.version for manifest in manifests] == [0, 1, 2, 3, 4, 5, 3]
    for record, manifest in zip(records, manifests, strict=True):
        offsets.note_manifest(manifest, record.offset)
    assert offsets.anchors == {0: records[0].offset, 3: records[3].offset}
    assert offsets.anchor(5) == (0, records[0].offset)
    assert offsets.manifests == {number: records[number].offset for number in range(6)}


def test_deltas_as_large_as_snapshots_are_not_followed_by_one() -> None:
    def dense(version: int) -> Sequence[TensorBytes]:
        return [TensorBytes(name="number", dtype="int8", shape=(256,), data=bytes((number * 7 + version) % 256 for number in range(256)))]

    published = Publishing(log_of())
    for version in range(6):
        published.writer.publish(Weights(partial(dense, version)), version=version, step=version)
        published.writer.finish_publishing()
    assert encodings(published) == ["full", "delta"] * 3
    assert snapshot_ended(published)


@pytest.mark.parametrize(("partitions", "expected"), [(2, None), (3, None), (4, 3), (11, 10)])
def test_without_a_partition_for_snapshots_every_nth_version_is_sent_as_one(partitions: int, expected: int | None) -> None:
    assert snapshot_partition(count=partitions) == expected
    if expected is None:
        published = Publishing(log_of(partitions))
        for version in range(7):
            published.version(version)
        assert encodings(published) == ["full", "delta", "delta"] * 2 + ["full"]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Log, str], None]:
    """Creates runs of 12 small steps in bfloat16, of which few change many weights, with a snapshot after every second version."""
    trainer = {"dtype": "bfloat16", "lr": 1e-5, "checkpoint_keep_last": 1}
    sections = {"run": {"steps": 12, "seed": 7}, "trainer": trainer, "weights": {"anchor_every": 2}, "rollout": {"dtype": "bfloat16"}}
    config = config_for(tiny_model, tmp_path_factory.mktemp("data"), **sections)
    groups = [group_of(number, version=max(0, number // 2 - 1)) for number in range(24)]
    return lambda log, name: written(log, name, config, groups)


def distinct(outcome: dict[str, Any]) -> dict[str, Any]:
    """An outcome without the number of manifests of a version, as a snapshot may be abandoned."""
    return {**outcome, "versions": sorted(set(outcome["versions"]))}


def sound(place: LogLocation, run: str) -> bool:
    """True if the audit finds nothing about versions, chunks and ledger; the groups here have no samples."""
    return not {"version-numbers", "chunks", "digests", "last-digests", "ledger-order", "accounted"} & set(broken(audited(place, run)))


@pytest.fixture(scope="module")
def undisturbed(run: Callable[[Log, str], None]) -> dict[str, Any]:
    log = MemoryLog()
    run(log, "undisturbed")
    outcome = trained(log, "undisturbed")
    manifests = [weights.read(record, run="undisturbed")[1] for record in records_of(log, "undisturbed.weights") if not record.partition]
    again = [manifest for manifest in manifests if manifest.version and manifest.encoding == "full"]
    assert len(manifests) == 13 + len(again)
    assert len(again) >= 3, "deltas are small enough for snapshots"
    assert distinct(outcome) != outcome
    assert sound(log, "undisturbed")
    return outcome


DEATHS = [
    "snapshot.before:1",
    "snapshot.before:2",
    "snapshot.after:1",
    "snapshot.after:3",
    "chunk.sent:5",
    "ledger.version.after:5",
    "ledger.step.after:7",
]


@pytest.mark.usefixtures("checkpoints_at_once")
@pytest.mark.parametrize("death", DEATHS)
def test_a_trainer_that_goes_no_further_there_is_followed_by_one_that_ends_in_the_same_run_and_a_clean_audit(
    run: Callable[[Log, str], None], run_id: str, undisturbed: dict[str, Any], death: str
) -> None:
    log = MemoryLog()
    run(log, run_id)
    assert distinct(trained(log, run_id, death)) == distinct(undisturbed)
    assert sound(log, run_id)


@pytest.mark.slow
@pytest.mark.parametrize("death", DEATHS)
def test_a_trainer_process_killed_there_is_followed_by_one_that_ends_in_the_same_run(
    broker: str, run: Callable[[Log, str], None], run_id: str, undisturbed: dict[str, Any], tmp_path: Path, death: str
) -> None:
    log = KafkaLog(broker, client_id="tests")
    run(log, run_id)
    with Processes(broker, run_id, tmp_path) as trainer:
        trainer.start("trainer", environment={VARIABLE: death})
        assert trainer.ended("trainer", limit_s=400.0) == -9, trainer.text("trainer")
        trainer.start("trainer")
        assert trainer.ended("trainer", limit_s=400.0) == 0, trainer.text("trainer")
    assert distinct(outcome_of(log, run_id)) == distinct(undisturbed)
    assert sound(broker, run_id)
    log.close()
