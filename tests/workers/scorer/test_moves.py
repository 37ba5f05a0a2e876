"""Scorers join, leave and are cut off while rewards are computed: every group ends once, and no scorer ends."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Log
from penstock.infra.memory.log import MemoryLog
from penstock.infra.sandbox.pool import ChildPool, Done
from penstock.pipeline.config.load import Config, from_table
from penstock.pipeline.envs.rewards import CHILD, spec
from penstock.pipeline.runtime.session import Session
from penstock.topics import groups
from penstock.topics.catalogue import topics_of
from penstock.topics.runs import RunRecord
from penstock.workers.scorer.worker import Scorer
from tests.support.a_run import Teller
from tests.support.crew import records_of

PARTITIONS, GROUPS = 4, 12


class Words:
    """Stands for a tokenizer."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def config_of(reward: str = "exact_match") -> Config:
    table: dict[str, Any] = {
        "run": {"steps": 1}, "model": {"path": "none"}, "data": {"source": "none.jsonl"}, "reward": {"functions": [reward]},
        "schedule": {"prompts_per_step": 2, "samples_per_prompt": 2}, "kafka": {"partitions": PARTITIONS},
        "algorithm": {"filter_zero_variance": False},
    }  # fmt: skip
    return from_table(table)


def filled(log: Log, run: str) -> None:
    """Prompts and samples of all groups, without outcomes."""
    log.create_topics(topics_of(run, partitions=PARTITIONS), **({} if isinstance(log, MemoryLog) else {"replication_factor": 1}))
    teller, producer = Teller(run), log.producer()
    for number in range(GROUPS):
        for record in teller.group([1.0, 0.0], version=0):
            if not record.topic.endswith(".groups"):
                assert record.partition == 0
                moved = type(record)(
                    topic=record.topic, partition=number % PARTITIONS, key=record.key, headers=record.headers, value=record.value
                )
                producer.send(moved)
    producer.flush(10.0)
    producer.close()


def scorer_of(log: Log, run: str, slot: int, pool: Any, config: Config) -> Scorer:
    record = RunRecord(run=run, status="running", config="{}", info="{}", created_ns=0, updated_ns=0)
    session = Session(
        run=run, role="scorer", worker=f"scorer-{slot}", log=log, config=config, info={}, stop=threading.Event(), record=record
    )  # fmt: skip
    member = log.member(f"{run}.scorer", [session.topic("prompts"), session.topic("rollouts")])
    decoder: Any = Words()
    return Scorer(session, member, log.transactions(f"{run}.scorer-{slot}"), pool, decoder)


def outcomes(log: Log, run: str) -> Counter[int]:
    """How many outcomes each group has."""
    found = (groups.check(record, run=run).group for record in records_of(log, f"{run}.groups"))
    return Counter(group for group in found if group is not None)


class HeldPool:
    """Ends calls when a test says so, in any order; a call that was cancelled may end all the same, as one whose answer was on its way."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.ended: list[Any] = []

    def submit(self, key: Any, _payload: object) -> None:
        self.held.append(key)

    def cancel(self, keys: Container[Any]) -> None:
        """Nothing: the worst that a pool may do."""

    def end(self, number: int) -> None:
        if self.held:
            self.ended.append(self.held.pop(number % len(self.held)))

    def poll(self, _timeout_s: float = 0.0) -> list[Any]:
        ended, self.ended = self.ended, []
        result = {"rewards": [1.0, 0.0], "components": [[1.0], [0.0]]}
        return [Done(key=key, result=result, seconds=0.0) for key in ended]


class Impatient:
    """A member whose user never waits."""

    def __init__(self, member: Any) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def take(self, _timeout_s: float) -> Any:
        return self._member.take(0.0)


MOVES = st.lists(st.tuples(st.sampled_from(["join", "leave", "evict", "turn", "turn", "end", "end"]), st.integers(0, 20)), max_size=40)


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


def scaled(log: Log, connect: Callable[[], Log], run: str, reward: str) -> None:
    """Score all groups with 4 scorers, then 5, then 3, each in a thread with children of its own."""
    filled(log, run)
    config, failures, stops, threads = config_of(reward), list[BaseException](), list[threading.Event](), list[threading.Thread]()

    def work(slot: int, stop: threading.Event) -> None:
        own = connect()
        pool: Any = ChildPool(CHILD, init=spec([reward]), size=1, timeout_s=60.0)
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

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 120
        while len(outcomes(log, run)) < count and not failures:
            assert time.monotonic() < deadline, outcomes(log, run)
            time.sleep(0.05)

    for slot in range(4):
        start(slot)
    wait_for(1)
    start(4)
    wait_for(5)
    for stop in stops[:2]:
        stop.set()
    wait_for(GROUPS)
    for stop, thread in zip(stops, threads, strict=True):
        stop.set()
        thread.join(30.0)
    assert failures == []
    assert outcomes(log, run) == Counter(range(GROUPS))


def slow_reward(directory: Path, seconds: float) -> str:
    file = directory / "slow.py"
    file.write_text(
        f"import time\ndef slowly(completions, **columns):\n    time.sleep({seconds})\n    return [1.0] + [0.0] * (len(completions) - 1)\n"
    )
    return f"{file}:slowly"


@pytest.mark.costly
def test_scaling_scorers_while_rewards_run_loses_and_ends_nothing(tmp_path: Path) -> None:
    log = MemoryLog()
    scaled(log, lambda: log, "scaled", slow_reward(tmp_path, 0.3))


@pytest.mark.slow
def test_scaling_scorers_whose_rewards_take_8_s_on_a_broker_loses_and_ends_nothing(broker: str, run_id: str, tmp_path: Path) -> None:
    log = KafkaLog(broker)
    scaled(log, lambda: KafkaLog(broker), run_id, slow_reward(tmp_path, 8.0))
    log.close()
