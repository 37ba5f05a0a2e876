"""What an environment worker knows of replies: an answered call is never asked again, whoever had asked it."""

import numpy as np
import pytest

from penstock.infra.engines.base import GroupRequest, Sampling
from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.agents.engine import turn_number
from penstock.topics.catalogue import topics_of
from penstock.topics.turns import calls, replies
from penstock.topics.turns.replies import Reply
from penstock.workers.environment.worker import LogEngine
from tests.support import page_records
from tests.support.a_run import outgoing
from tests.support.worker_set import records_of

RUN = "known"


class Site:
    """A log with one partition, and an engine that asks through it."""

    def __init__(self, *, replay: bool) -> None:
        self.log = MemoryLog()
        self.log.create_topics(topics_of(RUN, partitions=1, turns=True))
        self.replay, self.read = replay, 0
        self.engine = self.successor()

    def successor(self) -> LogEngine:
        """Another process that begins at the first reply."""
        engine = LogEngine(
            run=RUN, worker="environment-0", topic=f"{RUN}.calls", producer=self.log.producer(), replay=self.replay,
            placed=lambda _: (0, 3),
        )  # fmt: skip
        self.read, self.engine = 0, engine
        engine.recorded.assign({0: 0}, self.ends())
        self.deliver()
        return engine

    def ends(self) -> dict[int, int]:
        return {0: self.log.end_offsets([(f"{RUN}.replies", 0)])[f"{RUN}.replies", 0]}

    def asks(self, *, turn: int = 0, context: int = 7) -> None:
        sampling = Sampling(max_new_tokens=4, stop_ids=(2,))
        ids = np.array([5, context], np.int32)
        self.engine.submit(
            GroupRequest(group=turn_number(1, 0, turn), prompt_ids=ids, samples=(0,), rows=1, seed=0, sampling=sampling, stream=4)
        )

    def asked(self) -> list[calls.Call]:
        return [calls.read(record, run=RUN)[1] for record in records_of(self.log, f"{RUN}.calls")]

    def answer(self, call: calls.Call, token: int = 9) -> None:
        reply = Reply(
            **call.key._asdict(), token_ids=np.array([token, 2], np.int32), behaviour_logprobs=np.zeros(2, np.float32),
            span_versions=np.array([3], np.int32), span_starts=np.array([0], np.int32), finish="stop", started_ns=1, ended_ns=2,
            worker="rollout-0",
        )  # fmt: skip
        page_records.write(self.log, [outgoing(replies, reply, run=RUN, key=b"1")])
        self.deliver()

    def deliver(self) -> None:
        for record in records_of(self.log, f"{RUN}.replies")[self.read :]:
            self.read += 1
            self.engine.take(record)

    def drawn(self) -> list[tuple[int, list[int]]]:
        return [(completion.group, completion.token_ids.tolist()) for completion in self.engine.step()]


def test_a_turn_is_asked_once_and_its_first_reply_counts() -> None:
    site = Site(replay=True)
    site.asks()
    (call,) = site.asked()
    assert (call.group, call.sample, call.turn, call.attempt, call.min_version, call.stream) == (1, 0, 0, 0, 3, 4)
    site.answer(call)
    site.answer(call, token=8)
    assert site.drawn() == [(turn_number(1, 0, 0), [9, 2])]
    assert site.drawn() == []


@pytest.mark.parametrize("replay", [True, False])
def test_under_replay_a_successor_takes_what_was_drawn_and_under_restart_it_asks_anew(replay: bool) -> None:
    site = Site(replay=replay)
    site.asks()
    site.answer(site.asked()[0])
    site.successor()
    site.asks()
    assert [call.attempt for call in site.asked()] == ([0] if replay else [0, 1])
    assert site.drawn() == ([(turn_number(1, 0, 0), [9, 2])] if replay else [])
    if not replay:
        site.answer(site.asked()[1], token=8)
        assert site.drawn() == [(turn_number(1, 0, 0), [8, 2])]


def test_a_reply_that_comes_after_a_kill_answers_the_successor() -> None:
    site = Site(replay=True)
    site.asks()
    site.successor()
    site.asks()
    first, again = site.asked()
    assert first.key == again.key
    site.answer(first)
    assert site.drawn() == [(turn_number(1, 0, 0), [9, 2])]


def test_another_context_is_another_call() -> None:
    site = Site(replay=True)
    site.asks(context=7)
    site.answer(site.asked()[0])
    site.drawn()
    site.asks(context=8)
    assert site.drawn() == [] and len(site.asked()) == 2


def test_the_committed_offset_waits_for_groups_that_are_not_done() -> None:
    site = Site(replay=True)
    site.asks()
    site.answer(site.asked()[0])
    assert list(site.engine.recorded.offsets()) == [(0, 0)]
    site.engine.recorded.forget(lambda *where: where == (0, 1))
    assert list(site.engine.recorded.offsets()) == [(0, 1)]
    assert list(site.engine.recorded.offsets()) == []


def test_nothing_starts_before_the_replies_are_known_that_were_there() -> None:
    site = Site(replay=True)
    site.asks()
    (call,) = site.asked()
    site.answer(call)
    recorded = site.engine.recorded
    recorded.assign({0: 0}, site.ends())
    assert not recorded.caught_up
    recorded.passes(0, 0)
    assert recorded.caught_up
