"""The trainer's writer on the in-memory log: entries in a row, versions with their manifests, what others wrote among the chunks."""

from pathlib import Path

import pytest

from penstock.infra.errors import Fenced, Unrecoverable
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.learner import policy_trainer
from penstock.pipeline.learner.ledger_history import read_past
from penstock.pipeline.learner.policy_trainer import PolicyTrainer
from penstock.pipeline.learner.run_writer import RunWriter
from penstock.pipeline.runtime.weights.read import fetch
from penstock.topics import dead_letters
from penstock.topics.wire.record import Outgoing
from tests.support.number_run import RUN, STEPS, NumberBackend, config_of, log_with, session_of

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def number_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_trainer, "make_backend", lambda *_, **__: NumberBackend())


@pytest.fixture
def log() -> MemoryLog:
    return log_with()


def writer_of(log: MemoryLog, checkpoints: Path | None = None) -> tuple[PolicyTrainer, RunWriter]:
    config = config_of(checkpoints)
    writer = RunWriter(session_of(log, config), log.transactions(f"{RUN}.trainer"), read_past(log, RUN).story)
    return PolicyTrainer.open(config, steps=STEPS), writer


def step(policy: PolicyTrainer, writer: RunWriter) -> None:
    """One step without groups, committed and followed up."""
    policy.backend.value += 1.0  # type: ignore[attr-defined]
    policy.backend.steps += 1
    policy.release_weights()
    writer.write("step", step=policy.steps_done, digest=writer.step_digest(policy), metrics={"dropped": 0.0})
    policy.steps_done += 1
    writer.after_step(policy)
    writer.finish_publishing()


def kinds(log: MemoryLog) -> list[str]:
    return [entry.kind for entry in read_past(log, RUN).entries]


def test_a_run_is_opened_with_version_0_and_each_step_is_followed_by_its_version_and_checkpoint(log: MemoryLog, tmp_path: Path) -> None:
    policy, writer = writer_of(log, tmp_path)
    writer.begin(policy)
    for _ in range(STEPS):
        step(policy, writer)
    writer.close_run(steps=STEPS, status="finished", reason="all steps done")
    assert kinds(log) == [
        "run-opened", "version", "step", "version", "step", "version", "checkpoint", "step", "version", "step", "version", "checkpoint",
        "run-closed",
    ]  # fmt: skip
    past = read_past(log, RUN)
    assert [entry.seq for entry in past.entries] == list(range(13))
    assert past.story.newest_version == STEPS
    assert past.entries[-1].digest == past.steps[-1].digest == past.story.manifests[STEPS].digest
    assert fetch(log, past.story.manifests, STEPS, run=RUN) == policy.backend.weights()


def test_a_version_that_is_published_is_not_sent_again_and_must_be_the_same(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.begin(policy)
    again, later = writer_of(log)
    later.begin(again)
    assert kinds(log) == ["run-opened", "version"]
    again.backend.value = 7.0  # type: ignore[attr-defined]
    again.release_weights()
    with pytest.raises(Unrecoverable, match=r"version 0: the recorded weights digest is .* the model directory holds"):
        later.begin(again)


def test_a_writer_that_was_replaced_commits_nothing_more(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.begin(policy)
    writer_of(log)
    with pytest.raises(Fenced):
        step(policy, writer)
    assert kinds(log) == ["run-opened", "version"]


def test_what_others_wrote_among_the_chunks_is_set_aside_once_or_counted_as_a_duplicate(log: MemoryLog) -> None:
    policy, writer = writer_of(log)
    writer.begin(policy)
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
    writer.begin(policy)
    own = log.tail({(f"{RUN}.weights", 0): "earliest"}).read_to_end()
    writer.check_manifest(own[0])
    assert "dead_letters" not in writer.session.reporter.values
    writer.state.manifests.clear()
    writer.check_manifest(own[0])
    assert writer.session.reporter.values["dead_letters"] == 1


def test_there_is_one_checkpoint_of_a_step(log: MemoryLog, tmp_path: Path) -> None:
    policy, writer = writer_of(log, tmp_path)
    writer.begin(policy)
    for _ in range(2):
        step(policy, writer)
    assert writer.saved_steps == 2
    writer.checkpoint(policy)
    assert kinds(log).count("checkpoint") == 1
