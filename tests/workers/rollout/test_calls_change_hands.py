"""Calls change hands while turns are drawn and owners die: none that is answered is drawn again, and none is lost."""

import hashlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.engines.base import GroupRequest
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.memory.log import MemoryLog
from penstock.infra.memory.state import MemoryMember
from penstock.pipeline.agents.engine import turn_of
from penstock.pipeline.config.load import from_table
from penstock.pipeline.runtime.session import Session
from penstock.topics.catalogue import topics_of
from penstock.topics.runs import RunRecord
from penstock.topics.turns import calls, replies
from penstock.topics.turns.calls import Call, TurnKey
from penstock.workers.rollout import call_worker
from penstock.workers.rollout.call_worker import CallWorker
from tests.support import page_records
from tests.support.a_run import outgoing
from tests.support.published_weights import NoNews
from tests.support.worker_set import records_of

RUN = "calls"
PARTITIONS = 3
CONFIG = from_table(
    {
        "run": {"steps": 1, "seed": 5},
        "model": {"path": "none"},
        "data": {"source": "none.jsonl"},
        "environment": {"source": "tiny:lake", "carrier": "log"},
        "schedule": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"engine": "toy"},
        "kafka": {"partitions": PARTITIONS},
    }
)
RECORD = RunRecord(run=RUN, status="running", config="{}", info="{}", created_ns=0, updated_ns=0)


class Watched(ToyEngine):
    """Notes when it is asked for a turn whose reply stands in the log."""

    def __init__(self, site: "Site") -> None:
        super().__init__(capacity=2, parameters={})
        self.version, self._site = 0, site

    def submit(self, request: GroupRequest) -> None:
        sha256 = hashlib.sha256(np.ascontiguousarray(request.prompt_ids, "<i4").tobytes()).hexdigest()
        if any((key[:3], key.sha256) == (turn_of(request.group), sha256) for key in self._site.answered()):
            self._site.needless.append(turn_of(request.group))
        super().submit(request)


class Site:
    """A log with calls, and workers that are moved by hand."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.log.create_topics(topics_of(RUN, partitions=PARTITIONS, turns=True))
        self.asked: list[TurnKey] = []
        self.needless: list[tuple[int, int, int]] = []
        self.workers: list[CallWorker] = []
        self._started = 0

    def ask(self, group: int, turn: int = 0, *, context: int = 0) -> None:
        """A turn of a group is asked for, perhaps not for the first time."""
        call = Call(
            group=group, sample=0, turn=turn, attempt=0, min_version=0, token_ids=np.array([5, 6 + turn, 7 + context], np.int32),
            stream=group, max_new_tokens=5, temperature=1.0, top_p=1.0, top_k=0, seeded=1, asked_ns=1, worker="environment-0",
        )  # fmt: skip
        self.asked.append(call.key)
        page_records.write(self.log, [outgoing(calls, call, run=RUN, partition=group % PARTITIONS, key=str(group).encode())])

    def answered(self) -> list[TurnKey]:
        return [replies.read(record, run=RUN)[1].key for record in records_of(self.log, f"{RUN}.replies")]

    def join(self) -> None:
        self._started += 1
        session = Session(
            run=RUN, role="rollout", worker=f"rollout-{self._started}", log=self.log, record=RECORD, config=CONFIG,
            info={"steps": 1, "digests": {"stop_ids": [2]}}, stop=threading.Event(),
        )  # fmt: skip
        self.workers.append(CallWorker.open(session, Watched(self), NoNews(RUN)))  # type: ignore[arg-type]

    def die(self, number: int) -> None:
        """A worker is killed, and the broker notices."""
        worker = self.workers.pop(number % len(self.workers))
        assert isinstance(worker.member, MemoryMember)
        self.log.evict(f"{RUN}.rollout", worker.member.member_id)

    def ahead(self) -> None:
        """Workers have loaded a version that the log does not have yet; they generate, and answer once it is there."""
        for worker in self.workers:
            worker.engine.version = 1
            for _ in range(60):
                worker.turn()
        assert not self.answered()
        for worker in self.workers:
            worker.weights.version = 1  # type: ignore[misc]

    def finish(self) -> None:
        """Let all workers work until every call is answered."""
        for _ in range(60 * (len(self.asked) + 2)):
            for worker in self.workers:
                worker.turn()
                worker._commit()
            if set(self.asked) <= set(self.answered()):
                return
        raise AssertionError(f"without a reply: {set(self.asked) - set(self.answered())}")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rollout.call_worker.IDLE_WAIT_S", 0.0)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 5), st.integers(0, 2)),
        st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("commit"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("join"), st.just(0), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 3), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(OPERATIONS)
def test_every_call_is_answered_and_none_is_drawn_although_its_reply_is_there(operations: list[tuple[str, int, int]]) -> None:
    site = Site()
    site.join()
    for what, number, size in operations:
        match what:
            case "ask":
                site.ask(number, size)
            case "join":
                site.join()
            case "die" if len(site.workers) > 1:
                site.die(number)
            case "turn":
                for _ in range(size):
                    site.workers[number % len(site.workers)].turn()
            case "commit":
                site.workers[number % len(site.workers)]._commit()
    site.finish()
    assert site.needless == []


def test_two_calls_for_one_turn_after_different_words_are_both_answered() -> None:
    site = Site()
    site.join()
    site.ask(1, context=0)
    site.ask(1, context=9)
    site.finish()
    assert len(set(site.answered())) == 2


def test_a_new_owner_reads_replies_from_the_first_that_is_kept() -> None:
    site = Site()
    site.join()
    site.workers[0]._committed = float("inf")
    site.ask(1)
    while not site.answered():
        site.workers[0].turn()
    place = (f"{RUN}.replies", 1)
    site.log.delete_records(site.log.end_offsets([place]))
    site.die(0)
    site.ask(1, 1)
    site.join()  # nothing was committed: it would begin at offset 0
    site.finish()
    assert len(site.answered()) == 2


def test_answered_calls_are_forgotten_once_the_offset_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_worker, "MAX_REPLIED", 2)
    site = Site()
    site.join()
    (worker,) = site.workers
    for turn in range(6):
        site.ask(0, turn)
        site.finish()
    worker.turn()
    worker._commit()
    assert len(worker.tasks.partitions[0].replied) == 2
    assert worker.tasks.partitions[0].committed == (6, '{"replies": 4}')


def test_a_call_waits_for_the_weights_that_it_needs() -> None:
    site = Site()
    site.join()
    (worker,) = site.workers
    site.ask(0)
    worker.weights.version = -1  # type: ignore[misc]
    worker.engine.version = -1  # type: ignore[misc]
    for _ in range(5):
        worker.turn()
    assert site.answered() == []
    worker.engine.version = 0  # type: ignore[misc]
    site.finish()


def test_turns_of_weights_that_the_log_does_not_have_stay_in_the_worker_until_it_has_them() -> None:
    site = Site()
    site.join()
    for group in range(4):
        site.ask(group)
    site.ahead()
    site.finish()
    found = [list(replies.read(record, run=RUN)[1].span_versions) for record in records_of(site.log, f"{RUN}.replies")]
    assert found == [[1]] * 4
