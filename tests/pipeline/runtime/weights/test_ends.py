"""A worker that joins late reads no more of ledger and manifests than one that joins early, and nothing foreign moves where it begins."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.infra.tensors.stream import TensorBytes
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.ledger_follower import LedgerFollower, LedgerState
from penstock.pipeline.runtime.weights import receive
from penstock.pipeline.runtime.weights.receive import read_ends
from penstock.topics import ledger, weights
from penstock.topics.ledger import Entry
from penstock.workers.trainer.run_writer import RunWriter
from tests.support import page_records
from tests.support.a_run import outgoing
from tests.support.number_run import RUN, config_of, log_with, session_of

pytest.importorskip("torch")
ANCHOR_EVERY = 5


def tensors_of(version: int) -> list[TensorBytes]:
    return [TensorBytes(name="number", dtype="int8", shape=(256,), data=version.to_bytes(2, "big") + bytes(254))]


class Published:
    """A log to which a trainer publishes versions."""

    def __init__(self) -> None:
        self.log: MemoryLog = log_with()
        session = session_of(self.log, config_of(weights={"anchor_every": ANCHOR_EVERY}))
        self.writer = RunWriter(session, self.log.transactions(f"{RUN}.trainer"), LedgerState(RUN))
        self.writer.write("run-opened", details="{}")

    def up_to(self, version: int) -> None:
        for number in range(self.writer.state.newest_version + 1, version + 1):
            self.writer.publish(Weights(partial(tensors_of, number)), version=number, step=number)
            self.writer.finish_publishing()

    def send(self, codec: Any, found: Any) -> None:
        """A foreign record: nobody else writes to these partitions."""
        page_records.write(self.log, [outgoing(codec, found, run=RUN, key=b"?")])


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setattr(receive, "NEAR", 30)
    return Published()


def joined(log: MemoryLog) -> LedgerState:
    state = LedgerState(RUN, newest_only=True)
    follower = LedgerFollower(log, RUN, state, read_ends(log, RUN, state))
    follower.catch_up()
    follower.close()
    return state


def test_a_late_joiner_decodes_as_many_records_as_an_early_one_and_knows_the_same(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = {"ledger": 0, "weights": 0}
    for name, module in (("ledger", ledger), ("weights", weights)):

        def counted(*given: Any, _read: Any = module.read, _name: str = name, **named: Any) -> Any:
            decoded[_name] += 1
            return _read(*given, **named)

        monkeypatch.setattr(module, "read", counted)
    counts = []
    for version in (43, 143):
        published.up_to(version)
        decoded.update(ledger=0, weights=0)
        state = joined(published.log)
        counts.append(dict(decoded))
        assert state.newest_version == version
        everything = published.writer.state.manifests
        assert weights.chain(state.manifests, version) == weights.chain(everything, version)
        assert state.manifests[0] == everything[0]
        assert state.closed is None
    assert counts[0] == counts[1]
    assert counts[1]["weights"] < 60
    published.writer.close_run(steps=143, status="finished", reason="over")
    assert joined(published.log).closed is not None


def test_who_follows_a_run_keeps_the_manifests_of_two_anchors_however_many_versions_there_are(published: Published) -> None:
    follower = LedgerFollower(published.log, RUN)
    for version in (100, 200):
        published.up_to(version)
        follower.catch_up()
        assert follower.state.newest_version == version
        assert len(follower.state.manifests) <= 1 + 2 * ANCHOR_EVERY
    follower.close()


def test_foreign_records_at_the_end_are_not_taken_for_the_run(published: Published) -> None:
    published.up_to(60)
    manifest = published.writer.state.manifests[60]
    for version in (7_000, 8_000):
        foreign = replace(manifest, version=version)
        published.send(weights, foreign)
        entry = Entry(seq=version, kind="run-closed", time_ns=1)
        published.send(ledger, entry)
        published.up_to(published.writer.state.newest_version + 2)
        state = joined(published.log)
        assert state.newest_version == published.writer.state.newest_version
        assert state.closed is None
        assert weights.chain(state.manifests, state.newest_version)


def test_where_the_end_does_not_hold_a_whole_version_more_is_read(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    published.up_to(64)
    for near in (2, 4, 8, 1_000):
        monkeypatch.setattr(receive, "NEAR", near)
        state = joined(published.log)
        assert weights.chain(state.manifests, 64) == weights.chain(published.writer.state.manifests, 64)
