"""The trainer's writer on the in-memory log: entries in a row, versions with their manifests, what others wrote among the chunks."""

import shutil
import struct
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.infra.errors import CheckpointError, Fenced, RecordMissing, Unrecoverable
from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.ledger_history import read_ledger_history
from penstock.pipeline.learner.policy_trainer import PolicyTrainer, Weights
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import dead_letters, weights
from penstock.topics.catalogue import topics_of
from penstock.topics.wire.record import Outgoing
from penstock.workers.trainer import weight_publisher
from penstock.workers.trainer.run_writer import RunWriter
from tests.support.number_run import RUN, STEPS, NumberBackend, config_of, log_with, session_of
from tests.support.waiting import until

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def number_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_trainer, "make_backend", lambda *_, **__: NumberBackend())


@pytest.fixture
def log() -> MemoryLog:
    return log_with()


def writer_of(log: MemoryLog, checkpoints: Path | None = None, **sections: dict[str, Any]) -> tuple[PolicyTrainer, RunWriter]:
    config = config_of(checkpoints, **sections)
    writer = RunWriter(session_of(log, config), log.transactions(f"{RUN}.trainer"), read_ledger_history(log, RUN).ledger_state)
    return PolicyTrainer.open(config, steps=STEPS), writer


def step(policy: PolicyTrainer, writer: RunWriter) -> None:
    """One step without groups, committed and followed up."""
    policy.backend.value += 1.0  # type: ignore[attr-defined]
    policy.backend.steps += 1
    policy.release_weights()
    writer.write("step", step=policy.steps_done, digest=writer.step_digest(policy), metrics={"dropped": 0.0})
    policy.steps_done += 1
    writer.after_step(policy)
    writer.finish_pending()


def kinds(log: MemoryLog) -> list[str]:
    return [entry.kind for entry in read_ledger_history(log, RUN).entries]


def test_a_run_is_opened_with_version_0_and_each_step_is_followed_by_its_version_and_checkpoint(log: MemoryLog, tmp_path: Path) -> None:
    policy, writer = writer_of(log, tmp_path)
    writer.open_run(policy)
    for _ in range(STEPS):
        step(policy, writer)
    writer.close_run(steps=STEPS, status="finished", reason="all steps done")
    assert kinds(log) == [
        "run-opened", "version", "step", "version", "step", "version", "checkpoint", "step", "version", "step", "version", "checkpoint",
        "run-closed",
    ]  # fmt: skip
    past = read_ledger_history(log, RUN)
    assert [entry.seq for entry in past.entries] == list(range(13))
    assert past.ledger_state.newest_version == STEPS
    assert past.entries[-1].digest == past.steps[-1].digest == past.ledger_state.manifests[STEPS].digest
    assert fetch(log, past.ledger_state.manifests, STEPS, run=RUN) == policy.backend.weights()


def test_a_version_that_is_published_is_not_sent_again_and_must_be_the_same(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    again, later = writer_of(log)
    later.open_run(again)
    assert kinds(log) == ["run-opened", "version"]
    again.backend.value = 7.0  # type: ignore[attr-defined]
    again.release_weights()
    with pytest.raises(Unrecoverable, match=r"version 0 has digest .* the model directory has"):
        later.open_run(again)


def test_a_writer_that_was_replaced_commits_nothing_more(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    writer_of(log)
    with pytest.raises(Fenced):
        step(policy, writer)
    assert kinds(log) == ["run-opened", "version"]


def test_what_others_wrote_among_the_chunks_is_set_aside_once_or_counted_as_a_duplicate(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    chunk = log.read(f"{RUN}.weights", 1, [0])[0]
    producer = log.producer()
    step(policy, writer)
    for value, headers in ((b"noise", ()), (chunk.value, chunk.headers)):
        producer.send(Outgoing(topic=f"{RUN}.weights", partition=2, key=b"", headers=tuple(headers), value=value))
    step(policy, writer)
    step(policy, writer)
    letters = [dead_letters.read(record, run=RUN)[1] for record in log.tail({(f"{RUN}.dead-letters", 0): "earliest"}).read_to_end()]
    assert [(letter.topic, letter.partition, letter.value) for letter in letters] == [(f"{RUN}.weights", 2, b"noise")]
    assert writer.session.reporter.values["duplicates"] == 1


def test_a_manifest_of_a_version_that_was_not_published_is_a_dead_letter(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    own = log.tail({(f"{RUN}.weights", 0): "earliest"}).read_to_end()
    writer.check_manifest(own[0])
    assert "dead_letters" not in writer.session.reporter.values
    writer.state.manifests.clear()
    writer.check_manifest(own[0])
    assert writer.session.reporter.values["dead_letters"] == 1


def test_there_is_one_checkpoint_of_a_step(log: MemoryLog, tmp_path: Path) -> None:
    policy, writer = writer_of(log, tmp_path)
    writer.open_run(policy)
    for _ in range(2):
        step(policy, writer)
    assert writer.checkpoints.saved_steps == 2
    writer.checkpoint(policy)
    assert kinds(log).count("checkpoint") == 1


@pytest.mark.parametrize(("lease_lost", "error"), [(True, "must stop"), (False, "cannot write the checkpoint of step 1 .* No such file")])
def test_a_checkpoint_whose_folder_vanishes_is_one_clear_error_and_that_of_the_lease_if_it_was_lost(
    log: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_lost: bool, error: str
) -> None:
    def require_lease(_: Session) -> None:
        if lease_lost:
            raise Fenced("another process now writes: this process must stop")

    policy, writer = writer_of(log, tmp_path)
    writer.open_run(policy)
    step(policy, writer)
    writer.checkpoint(policy)
    saving = writer.checkpoints._saving
    assert saving is not None and saving._thread is not None
    saving._thread.join(20)
    shutil.rmtree(saving.temporary)
    monkeypatch.setattr(Session, "require_lease", require_lease)
    with pytest.raises(Fenced if lease_lost else CheckpointError, match=error):
        writer.finish_pending()


def test_old_versions_are_deleted_except_the_first_and_the_newest_two_whole_ones_with_what_follows(log: MemoryLog) -> None:
    policy, writer = writer_of(log, weights={"keep": "chain"}, run={"steps": 200})
    writer.open_run(policy)
    kept: list[int] = []
    for _ in range(60):
        step(policy, writer)
        kept.append(sum(len(log.tail({(f"{RUN}.weights", p): "earliest"}).read_to_end()) for p in (1, 2)))
    assert max(kept[20:]) == max(kept[40:]) <= 5
    manifests = read_ledger_history(log, RUN).ledger_state.manifests
    assert fetch(log, manifests, 60, run=RUN) == policy.backend.weights()
    assert fetch(log, manifests, 0, run=RUN)
    with pytest.raises(RecordMissing, match=r"weights of version \d+: no chunk at numbers.weights/2 offset 0"):
        fetch(log, manifests, 1, run=RUN)


@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_the_chunks_of_a_version_are_spread_evenly_over_the_partitions_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    chunks, send = 2 * partitions + 1, weight_publisher.send_version
    monkeypatch.setattr(weight_publisher, "send_version", lambda *given, **named: send(*given, **{**named, "max_bytes": 8}))
    config, log = config_of(weights={"partitions": partitions, "anchor_every": 1}), MemoryLog()
    log.create_topics(topics_of(RUN, partitions=1, weight_partitions=config.weight_partitions))
    writer = RunWriter(session_of(log, config), log.transactions(f"{RUN}.trainer"), read_ledger_history(log, RUN).ledger_state)
    tensor = TensorBytes(name="number", dtype="int8", shape=(8 * chunks,), data=bytes(8 * chunks))
    writer.write("run-opened", details="{}")
    for version in range(partitions + 1):
        writer.publish(Weights(lambda: [tensor]), version=version, step=version)
        writer.finish_publishing()
    lying: dict[int, Counter[int]] = {version: Counter() for version in range(partitions + 1)}
    first: dict[int, int] = {}
    tail = log.tail({(f"{RUN}.weights", partition): "earliest" for partition in range(1, config.weight_partitions)})
    for record in tail.read_to_end():
        _, chunk = weights.read_chunk(record, run=RUN)
        lying[chunk.version][record.partition] += 1
        if chunk.index == 0:
            first[chunk.version] = record.partition
    assert lying.pop(0) == {weights.ORIGIN: chunks}  # it stays for ever, the others are deleted
    for places in lying.values():
        assert set(places) == set(range(weights.FIRST, weights.FIRST + partitions))
        assert sorted(places.values()) == [2] * (partitions - 1) + [3]
    assert len({first[version] for version in lying}) == partitions  # no partition gets the larger share of every version


def test_a_restarted_trainer_sends_a_newest_version_that_is_lost_again_with_the_same_digest(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    step(policy, writer)
    lost = writer.state.manifests[1]
    log.truncate((f"{RUN}.weights", 2), 0)
    past = read_ledger_history(log, RUN)
    with pytest.raises(RecordMissing):
        fetch(log, past.ledger_state.manifests, 1, run=RUN)
    again, later = writer_of(log)
    later.open_run(again)
    assert later.lost == lost
    again.backend.value, again.steps_done = policy.backend.value, 1  # type: ignore[attr-defined]
    again.release_weights()
    later.publish(again.weights(), version=1, step=1)
    found = read_ledger_history(log, RUN)
    assert (later.lost, found.ledger_state.manifests[1].digest) == (None, lost.digest)
    assert fetch(log, found.ledger_state.manifests, 1, run=RUN) == policy.backend.weights()
    assert [entry.seq for entry in found.entries] == [entry.seq for entry in past.entries]


def test_the_next_step_goes_on_while_a_version_is_sent_and_the_ledger_keeps_their_order(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    gate, send = threading.Event(), weight_publisher.send_version
    monkeypatch.setattr(weight_publisher, "send_version", lambda *given, **named: gate.wait(60.0) and send(*given, **named))
    writer.write("step", step=0, digest=None, metrics={"dropped": 0.0})
    policy.steps_done = 1
    writer.after_step(policy)
    before = policy.backend.value  # type: ignore[attr-defined]
    policy.backend.value = 5.0  # type: ignore[attr-defined]
    writer.finish_publishing(wait=False)
    assert (writer.publishing, kinds(log)[-1]) == (True, "step")
    gate.set()
    until(lambda: kinds(log)[-2:] == ["step", "version"], "the version is committed while the trainer computes", limit_s=60.0)
    writer.finish_publishing()
    assert (writer.publishing, kinds(log)[-2:]) == (False, ["step", "version"])
    (number,) = fetch(log, read_ledger_history(log, RUN).ledger_state.manifests, 1, run=RUN)
    assert struct.unpack("<d", bytes(number.data)) == (before,)


def test_a_manifest_that_is_read_before_its_commit_has_returned_is_not_taken_for_a_foreign_one(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, writer = writer_of(log)
    writer.open_run(policy)
    commit, written, returns = writer.transactions.commit, threading.Event(), threading.Event()

    def slow(records: list[Outgoing]) -> list[int]:
        offsets = commit(records)
        if records[0].topic == f"{RUN}.weights":
            written.set()
            assert returns.wait(60.0)
        return offsets

    monkeypatch.setattr(writer, "transactions", SimpleNamespace(commit=slow))
    writer.write("step", step=0, digest=None, metrics={"dropped": 0.0})
    policy.steps_done = 1
    writer.after_step(policy)
    assert written.wait(60.0)
    manifest = list(log.tail({(f"{RUN}.weights", 0): "earliest"}).read_to_end())[-1]
    checking = threading.Thread(target=writer.check_manifest, args=(manifest,))
    checking.start()
    checking.join(0.2)
    assert checking.is_alive()
    returns.set()
    checking.join(60.0)
    writer.finish_publishing()
    assert list(log.tail({(f"{RUN}.dead-letters", 0): "earliest"}).read_to_end()) == []
