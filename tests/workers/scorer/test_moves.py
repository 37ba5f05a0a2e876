"""Scorers join, leave and are cut off while rewards are computed: every group ends once, and no scorer ends."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.infra.sandbox.timed_pool import ChildPool
from penstock.pipeline.rewards.scoring import CHILD, spec
from penstock.workers.scorer import group_buffer, worker
from penstock.workers.scorer.worker import Scorer
from tests.support.scorers import GROUPS, HeldPool, Impatient, config_of, filled, outcomes, scorer_of
from tests.support.waiting import until

MOVES = st.lists(st.tuples(st.sampled_from(["join", "leave", "evict", "turn", "turn", "end", "end"]), st.integers(0, 20)), max_size=40)


@pytest.mark.costly  # a run of several workers in each example
@settings(max_examples=15)
@given(MOVES)
def test_wherever_scorers_move_while_rewards_run_every_group_ends_once(moves: list[tuple[str, int]]) -> None:
    log, run, at_work = MemoryLog(), "moves", list[tuple[Scorer, HeldPool]]()
    filled(log, run)

    def join() -> None:
        pool = HeldPool()
        scorer = scorer_of(log, run, len(at_work), pool, config_of())
        scorer.member = Impatient(scorer.member)  # type: ignore[assignment]
        at_work.append((scorer, pool))

    join()
    left = 0
    for move, number in moves:
        scorer, pool = at_work[left + number % (len(at_work) - left)]
        match move:
            case "join" if len(at_work) < 6:
                join()
            case "leave" if left < len(at_work) - 1:
                at_work[left][0].member.close()
                left += 1
            case "evict":
                log.evict(f"{run}.scorer", scorer.member.member_id)  # type: ignore[attr-defined]
            case "turn":
                scorer.turn()
            case "end":
                pool.end(number)
    for _ in range(4 * GROUPS):
        for scorer, pool in at_work[left:]:
            scorer.turn()
            pool.end(0)
    assert outcomes(log, run) == Counter(range(GROUPS))


def counting(log: Log, run: str, pool: HeldPool, written: list[int], monkeypatch: pytest.MonkeyPatch) -> Scorer:
    """A scorer that never waits for records; `written` gets the number of groups of each of its transactions."""
    scorer = scorer_of(log, run, 0, pool, config_of())
    scorer.member = Impatient(scorer.member)  # type: ignore[assignment]
    commit = scorer.transactions.commit

    def noted(records: Any, **more: Any) -> Any:
        written.append(len({record.key for record in records}))
        return commit(records, **more)

    monkeypatch.setattr(scorer.transactions, "commit", noted)
    return scorer


@pytest.mark.parametrize(("limit", "value", "sizes"), [("WRITE_GROUPS", 2, [2] * 5), ("WRITE_BYTES", 1, [1] * 10)])
def test_groups_that_ended_together_are_written_in_transactions_of_limited_size(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, sizes: list[int]
) -> None:
    log, run, pool, written = MemoryLog(), "many", HeldPool(), list[int]()
    monkeypatch.setattr(group_buffer, limit, value)
    filled(log, run, count=10)
    scorer = counting(log, run, pool, written, monkeypatch)
    scorer.turn()
    for _ in range(10):
        pool.end(0)
    scorer.turn()
    assert written == sizes
    assert outcomes(log, run) == Counter(range(10))


@pytest.mark.parametrize(("gathered_s", "sizes"), [(60.0, [10]), (0.0, [1] * 10)])
def test_rewards_that_follow_one_another_closely_are_written_in_one_transaction(
    monkeypatch: pytest.MonkeyPatch, gathered_s: float, sizes: list[int]
) -> None:
    class OneByOne(HeldPool):
        def poll(self, _timeout_s: float = 0.0) -> list[Any]:
            self.end(0)
            return super().poll()

    log, run, written = MemoryLog(), "closely", list[int]()
    monkeypatch.setattr(worker, "GATHERED_S", gathered_s)
    filled(log, run, count=10)
    scorer = counting(log, run, OneByOne(), written, monkeypatch)
    for _ in range(10):
        scorer.turn()
    assert written == sizes
    assert outcomes(log, run) == Counter(range(10))


def test_a_new_owner_begins_with_the_outcomes_that_are_kept() -> None:
    log, run, old_pool, new_pool = MemoryLog(), "deleted", HeldPool(), HeldPool()
    filled(log, run)
    old = scorer_of(log, run, 0, old_pool, config_of())
    old.turn()
    for group in (8, 0):  # its note says that outcomes are to be read from that of group 8 on
        old_pool.end([number for _, _, number in old_pool.held].index(group))
        old.turn()
    old.member.close()
    place = (f"{run}.groups", 0)
    log.delete_records({place: log.end_offsets([place])[place]})
    new = scorer_of(log, run, 1, new_pool, config_of())
    for _ in range(2 * GROUPS):
        new.turn()
        new_pool.end(0)
    assert outcomes(log, run) == Counter(range(1, GROUPS))


def scaled(log: Log, connect: Callable[[], Log], run: str, reward: str) -> None:
    """Score all groups with 4 scorers, then 5, then 3, each in a thread with children of its own."""
    filled(log, run)
    config, failures, stops, threads = config_of(reward), list[BaseException](), list[threading.Event](), list[threading.Thread]()

    def work(slot: int, stop: threading.Event) -> None:
        own = connect()
        pool: Any = ChildPool(CHILD, init=spec([reward], concurrency=8), size=1, timeout_s=60.0)
        try:
            scorer = scorer_of(own, run, slot, pool, config)
            while not stop.is_set():
                scorer.turn()
            scorer.member.close(5.0)
        except BaseException as error:
            failures.append(error)
        finally:
            pool.close()

    def start(slot: int) -> None:
        stops.append(threading.Event())
        threads.append(threading.Thread(target=work, args=(slot, stops[-1]), daemon=True))
        threads[-1].start()

    for slot in range(4):
        start(slot)
    until(lambda: len(outcomes(log, run)) >= 1 or failures, lambda: outcomes(log, run), limit_s=400.0, every_s=0.05)
    start(4)
    until(lambda: len(outcomes(log, run)) >= 5 or failures, lambda: outcomes(log, run), limit_s=400.0, every_s=0.05)
    for stop in stops[:2]:
        stop.set()
    until(lambda: len(outcomes(log, run)) >= GROUPS or failures, lambda: outcomes(log, run), limit_s=400.0, every_s=0.05)
    for stop, thread in zip(stops, threads, strict=True):
        stop.set()
        thread.join(200.0)
    assert failures == []
    assert outcomes(log, run) == Counter(range(GROUPS))


SLOW = """
import asyncio, time

def blocking(completions, **columns):
    time.sleep({seconds})
    return [1.0] + [0.0] * (len(completions) - 1)

async def waiting(completions, **columns):
    await asyncio.sleep({seconds})
    return [1.0] + [0.0] * (len(completions) - 1)
"""


def slow_reward(directory: Path, kind: str, seconds: float) -> str:
    file = directory / "slow.py"
    file.write_text(SLOW.format(seconds=seconds))
    return f"{file}:{kind}"


@pytest.mark.parametrize("kind", ["blocking", pytest.param("waiting", marks=pytest.mark.slow)])
@pytest.mark.costly
def test_scaling_scorers_while_rewards_run_loses_and_ends_nothing(tmp_path: Path, kind: str) -> None:
    log = MemoryLog()
    scaled(log, lambda: log, "scaled", slow_reward(tmp_path, kind, 0.3))


@pytest.mark.parametrize("kind", ["blocking", "waiting"])
@pytest.mark.slow
def test_scaling_scorers_whose_rewards_take_8_s_on_a_broker_loses_and_ends_nothing(
    broker: str, run_id: str, tmp_path: Path, kind: str
) -> None:
    log = KafkaLog(broker)
    scaled(log, lambda: KafkaLog(broker), run_id, slow_reward(tmp_path, kind, 8.0))
    log.close()
