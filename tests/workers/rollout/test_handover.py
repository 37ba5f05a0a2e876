"""Partitions change hands while groups are in work and owners die: no sample is drawn that is there already, and none is lost.

Workers are driven turn by turn on the in-memory log, so that every order of events can be tried; the processes are in test_chaos.py.
"""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.infra.engines.base import GroupRequest
from penstock.infra.engines.toy import ToyEngine
from penstock.infra.memory.log import MemoryLog
from penstock.infra.memory.state import MemoryMember
from penstock.pipeline.config.load import from_table
from penstock.pipeline.runtime.session import Session
from penstock.topics import prompts, rollouts
from penstock.topics.catalogue import topics_of
from penstock.topics.runs import RunRecord
from penstock.workers.rollout.worker import GroupWorker
from tests.support import page_records
from tests.support.a_run import outgoing
from tests.support.examples import prompt_of
from tests.support.published_weights import NoNews

RUN = "handover"
PARTITIONS, SAMPLES = 4, 4
CONFIG = from_table(
    {
        "run": {"steps": 1, "seed": 5},
        "model": {"path": "none"},
        "data": {"source": "none.jsonl"},
        "schedule": {"prompts_per_step": 4, "samples_per_prompt": SAMPLES},
        "sampling": {"max_new_tokens": 6},
        "rollout": {"engine": "toy"},
        "kafka": {"partitions": PARTITIONS},
    }
)
RECORD = RunRecord(run=RUN, status="running", config="{}", info="{}", created_ns=0, updated_ns=0)


class Watched(ToyEngine):
    """Notes when it is asked for a sample that stands in the log."""

    def __init__(self, log: MemoryLog, needless: list[tuple[int, int]], *, capacity: int) -> None:
        super().__init__(capacity=capacity, parameters={})
        self.version = 0
        self._log, self._needless = log, needless

    def submit(self, request: GroupRequest) -> None:
        there = set(published(self._log))
        self._needless += [(request.group, sample) for sample in request.samples if (request.group, sample) in there]
        super().submit(request)


class Site:
    """A log with some prompts, and workers that are moved by hand."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.log.create_topics(topics_of(RUN, partitions=PARTITIONS))
        self.needless: list[tuple[int, int]] = []
        self.workers: list[GroupWorker] = []
        self.groups = 0
        self._started = 0

    def prompt(self, partition: int) -> None:
        group, self.groups = self.groups, self.groups + 1
        ids = np.array([5, 6, 7 + group], dtype=np.int32)
        prompt = prompt_of(group, samples_per_prompt=SAMPLES, token_ids=ids)
        self.log.transactions("feeder").commit([outgoing(prompts, prompt, run=RUN, partition=partition, key=b"")])

    def join(self, *, capacity: int = 1) -> GroupWorker:
        self._started += 1
        session = Session(
            run=RUN, role="rollout", worker=f"rollout-{self._started}", log=self.log, record=RECORD, config=CONFIG,
            info={"steps": 1, "digests": {"stop_ids": [2]}}, stop=threading.Event(),
        )  # fmt: skip
        engine = Watched(self.log, self.needless, capacity=capacity)
        found = GroupWorker.open(session, engine, NoNews(RUN))  # type: ignore[arg-type]
        self.workers.append(found)
        return found

    def evict(self, worker: GroupWorker) -> None:
        """What the broker does to a member that says nothing."""
        assert isinstance(worker.member, MemoryMember)
        self.log.evict(f"{RUN}.rollout", worker.member.member_id)

    def wake(self, worker: GroupWorker) -> None:
        """A stopped process goes on: it may publish before its client learns that it was evicted, and joins again."""
        worker._publish_completions(everything=True)

    def finish(self, *, commit: bool = True) -> None:
        """Let all workers work until nothing is left to do."""
        for _ in range(40 * (self.groups + 2)):
            for worker in self.workers:
                turn(worker, commit=commit)
            if self.whole() and all(worker.engine.idle for worker in self.workers):
                return
        raise AssertionError(f"of {self.groups} groups only these samples: {sorted(published(self.log))}")

    def arrives(self, sample: rollouts.Rollout) -> None:
        """A sample that an owner of long ago had sent, in partition 3."""
        page_records.write(self.log, [outgoing(rollouts, sample, run=RUN, partition=3, key=b"")])

    def whole(self) -> bool:
        return len(set(published(self.log))) == self.groups * SAMPLES


def turn(worker: GroupWorker, *, commit: bool = True) -> None:
    """One turn, without its waits; `commit` at its end, as it happens every half second."""
    worker._gathered = 0.0  # nothing waits for the rest of its group
    worker._committed = 0.0 if commit else float("inf")
    worker.turn()


def published(log: MemoryLog, partitions: Sequence[int] = range(PARTITIONS)) -> list[tuple[int, int]]:
    return [(sample.group, sample.sample) for sample in samples_of(log, partitions)]


def samples_of(log: MemoryLog, partitions: Sequence[int] = range(PARTITIONS)) -> list[rollouts.Rollout]:
    tail = log.tail({(f"{RUN}.rollouts", partition): "earliest" for partition in partitions})
    return [sample for record in tail.read_to_end() for sample in rollouts.read_all(record, run=RUN)[1]]


def test_samples_of_weights_that_the_log_does_not_have_stay_in_the_worker() -> None:
    site = Site()
    worker = site.join()
    site.prompt(0)
    worker.engine.version = 1  # loaded from the trainer's memory, before its manifest is in the log
    for _ in range(50):
        turn(worker)
    worker.drain_samples()
    assert worker.engine.idle
    assert not published(site.log)
    worker.weights.version = 1  # type: ignore[misc]
    turn(worker)
    assert [list(sample.span_versions) for sample in samples_of(site.log)] == [[1]] * SAMPLES


def test_a_worker_killed_with_them_is_followed_by_one_that_generates_them_again() -> None:
    site = Site()
    worker = site.join()
    site.prompt(0)
    worker.engine.version = 1
    for _ in range(50):
        turn(worker)
    site.evict(site.workers.pop(0))
    site.join()
    site.finish()
    assert [list(sample.span_versions) for sample in samples_of(site.log)] == [[0]] * SAMPLES


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.rollout.worker.IDLE_WAIT_S", 0.0)


def test_groups_in_hand_whose_partition_went_to_a_joiner_are_dropped_and_drawn_once() -> None:
    site = Site()
    for _ in range(4):
        site.prompt(3)
    old = site.join(capacity=3)
    turn(old)
    assert len(old.tasks.groups_in_flight()) == 3
    new = site.join()
    turn(new)  # begins the lowest of the four
    site.finish()
    assert site.needless == []
    assert len(published(site.log)) == 4 * SAMPLES  # nothing twice
    assert old.session.reporter.values["dropped_groups"] == 3


def test_a_new_owner_reads_samples_from_the_first_that_is_kept() -> None:
    site = Site()
    site.prompt(3)
    first = site.join()
    site.finish(commit=False)
    place = (f"{RUN}.rollouts", 3)
    site.log.delete_records(site.log.end_offsets([place]))
    site.prompt(3)
    site.evict(first)
    site.workers = [site.join()]  # nothing was committed: it would begin at offset 0
    site.finish(commit=False)
    assert len(published(site.log)) == 2 * SAMPLES


def test_samples_that_were_still_on_their_way_at_the_assignment_are_not_drawn_again() -> None:
    made = drawn_alone(groups=2)
    site = Site()
    for _ in range(2):
        site.prompt(3)
    new = site.join()
    turn(new, commit=False)
    assert [task.group for task in new.tasks.groups_in_flight()] == [0]
    for sample in made:
        if sample.group == 1:  # what an earlier owner sent arrives only now
            site.arrives(sample)
    site.finish(commit=False)
    assert site.needless == []
    assert len(published(site.log)) == 2 * SAMPLES


def test_a_commit_says_where_samples_begin_that_another_worker_wrote_in_between() -> None:
    last = drawn_alone(groups=1)[-1]  # the one that takes longest
    site = Site()
    site.prompt(3)
    first = site.join()
    turn(first)
    site.arrives(last)
    while len(published(site.log)) < 2:
        turn(first)
    turn(first)
    site.evict(first)
    site.workers = [site.join()]
    site.finish()
    assert site.needless == []


def test_a_worker_that_was_stopped_beyond_its_session_repeats_only_what_had_ended_before() -> None:
    site = Site()
    for partition in range(PARTITIONS):
        site.prompt(partition)
    zombie = site.join(capacity=4)
    turn(zombie)
    assert len(zombie.tasks.groups_in_flight()) == 4
    site.evict(zombie)
    new = site.join()
    site.workers = [new]
    site.finish()
    before = len(samples_of(site.log)) + sum(len(task.completed) for task in zombie.tasks.groups_in_flight())
    site.wake(zombie)
    site.workers = [zombie, new]
    site.prompt(0)
    site.finish()
    assert len(samples_of(site.log)) == before + SAMPLES
    assert site.needless == []


def test_a_commit_before_the_inherited_prompts_are_read_loses_no_sample_from_sight() -> None:
    site = Site()
    site.prompt(0)
    first = site.join()
    while not published(site.log):
        turn(first, commit=True)
    site.evict(first)
    second = site.join()
    second.member.take = lambda wait_s: [event for event in type(second.member).take(second.member, wait_s) if hasattr(event, "membership")]  # type: ignore[method-assign]
    turn(second)  # knows its partitions, and not one of their prompts yet
    site.evict(second)
    site.workers = [site.join()]
    site.finish()
    assert site.needless == []


def drawn_alone(*, groups: int) -> list[rollouts.Rollout]:
    """What one undisturbed worker draws, in the order of its writing."""
    site = Site()
    for _ in range(groups):
        site.prompt(3)
    site.join()
    site.finish()
    return samples_of(site.log)


def moves(*kinds: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    named = st.sampled_from(["turn", "turn", "turn", "quiet turn", "prompt", "join", "leave", "kill", *kinds])
    return st.lists(st.tuples(named, st.integers(0, 7)), max_size=60)


def play(moves: list[tuple[str, int]]) -> Site:
    """A site after these moves, once every group is drawn."""
    site, sleeping = Site(), []
    for partition in range(PARTITIONS):
        site.prompt(partition)
    for move, number in moves:
        worker = site.workers[number % len(site.workers)] if site.workers else None
        match move:
            case "prompt":
                site.prompt(number % PARTITIONS)
            case "join":
                site.join(capacity=1 + number % 2)
            case "continue" if sleeping:
                site.workers.append(sleeping.pop())
                site.wake(site.workers[-1])
        if worker is None:
            continue
        match move:
            case "turn" | "quiet turn":
                turn(worker, commit=move == "turn")
            case "leave":
                worker.drain_samples()
                worker.close()
                site.workers.remove(worker)
            case "kill" | "stop":
                site.evict(worker)
                site.workers.remove(worker)
                sleeping += [worker] if move == "stop" else []
    site.join()
    site.finish()
    return site


@pytest.mark.costly  # ten runs of several workers
@settings(max_examples=10)
@given(moves=moves())
def test_whatever_joins_leaves_and_dies_every_sample_is_drawn_once(moves: list[tuple[str, int]]) -> None:
    site = play(moves)
    assert site.needless == []
    assert_as_drawn_by_one(site)


@pytest.mark.costly
@settings(max_examples=10)
@given(moves=moves("stop", "continue"))
def test_whatever_is_stopped_and_goes_on_no_sample_is_lost_and_repeated_ones_are_equal(moves: list[tuple[str, int]]) -> None:
    assert_as_drawn_by_one(play(moves))


def assert_as_drawn_by_one(site: Site) -> None:
    """Every record of a sample is bit by bit what one undisturbed worker draws."""
    expected = {(sample.group, sample.sample): sample for sample in drawn_alone(groups=site.groups)}
    drawn = [((sample.group, sample.sample), sample) for sample in samples_of(site.log)]
    assert {key for key, _ in drawn} == expected.keys()
    for key, sample in drawn:
        assert sample.token_ids.tolist() == expected[key].token_ids.tolist()
        assert sample.behaviour_logprobs.tobytes() == expected[key].behaviour_logprobs.tobytes()
