"""Scorers without models, on prompts and samples of a fixed number of groups; what computes rewards is the test's choice."""

import threading
from collections import Counter
from collections.abc import Collection, Container
from dataclasses import replace
from typing import Any

from penstock.infra.log import Log
from penstock.infra.sandbox.timed_pool import Done
from penstock.pipeline.config.load import Config
from penstock.pipeline.runtime.session import Session
from penstock.topics import groups
from penstock.topics.catalogue import topics_of
from penstock.topics.runs import RunRecord
from penstock.workers.scorer.worker import Scorer
from tests.support.a_run import RecordBuilder
from tests.support.least_config import least_config
from tests.support.page_records import write
from tests.support.worker_set import records_of

PARTITIONS, GROUPS = 4, 12


class Words:
    """Stands for a tokenizer."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def config_of(reward: str = "exact_match") -> Config:
    return least_config(
        reward={"functions": [reward]}, schedule={"prompts_per_step": 2, "samples_per_prompt": 2}, kafka={"partitions": PARTITIONS},
        algorithm={"filter_zero_variance": False},
    )  # fmt: skip


def filled(log: Log, run: str, *, topics: Collection[str] = ("prompts", "rollouts"), count: int = GROUPS) -> None:
    """Prompts and samples of all groups, or one of both, without outcomes."""
    log.create_topics(topics_of(run, partitions=PARTITIONS))
    builder = RecordBuilder(run)
    built = [(number % PARTITIONS, record) for number in range(count) for record in builder.group([1.0, 0.0], version=0)]
    write(log, [replace(record, partition=at) for at, record in built if record.topic.rpartition(".")[2] in topics])


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

    busy_s = 0.0

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
