"""The feeder's knowledge through restarts: the same as if it had never died, and read from where it matters."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.log import Committed, Partition
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.scheduling.resume_point import ResumePoint
from penstock.pipeline.scheduling.rules import DROPPED
from penstock.topics import groups, prompts
from penstock.topics.wire.headers import Headers
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.feeder.worker import Admission
from tests.support.strategies import a_prompt

RUN = "demo"
PARTITIONS = 2
NAMES: list[Partition] = [(f"{RUN}.{topic}", p) for topic in ("prompts", "groups") for p in range(PARTITIONS)]


def headers_of(topic: str, group: int, outcome: str | None) -> Headers:
    schema = prompts.SCHEMA if topic == "prompts" else groups.SCHEMA
    if topic == "prompts":
        return Headers(run=RUN, schema=schema, group=group, policy_version_min=4)
    numbers = {"part": 0, "parts": 1, "samples": 4, "tokens": 9, "policy_version_min": 0, "policy_version_max": 0}
    return Headers(run=RUN, schema=schema, group=group, outcome=outcome, worker="w", sha256="0" * 64, reward_mean=0.5, **numbers)


@dataclass
class Feeders:
    """The logs of a run and its feeders, one after the other; `whole` has been there from the beginning."""

    logs: dict[Partition, list[Record]] = field(default_factory=lambda: {name: [] for name in NAMES})
    committed: dict[Partition, Committed] = field(default_factory=lambda: {name: Committed(offset=None) for name in NAMES})
    read: int = 0

    def __post_init__(self) -> None:
        self.whole = Admission(RUN, PARTITIONS, LedgerState(RUN))
        self.restart()

    def restart(self) -> None:
        self.now = Admission(RUN, PARTITIONS, LedgerState(RUN))
        self.now.ledger.stale |= self.whole.ledger.stale  # the ledger is read from its beginning
        starts = self.now.start_offsets(self.committed)
        for name in NAMES:
            for record in self.logs[name][starts.get(name, 0) :]:
                self.read += 1
                self.now.apply(record)

    def note(self) -> None:
        self.committed = {name: Committed(offset=offset, metadata=text) for name, (offset, text) in self.now.commits().items()}

    def admit(self, partition: int) -> None:
        number = self.now.admitted
        choice = self.now.choices.next()
        assert choice is not None
        prompt = replace(a_prompt(group=number), place=choice.position, epoch=choice.turn.epoch, row=0, again=choice.again)
        record = self._record("prompts", partition, number, None, prompts.encode(prompt))
        self.now.admit(number, partition, choice=choice)
        self.now.written([Outgoing(topic=record.topic, partition=partition, key=b"%d" % number, headers=(), value=b"")], [record.offset])
        self.whole.apply(record)

    def end(self, choice: int, outcome: str) -> None:
        live = sorted(set(self.whole.partition_of) - self.whole.ended)
        if live:
            group = live[choice % len(live)]
            record = self._record("groups", self.whole.partition_of[group], group, outcome)
            self.now.apply(record)
            self.whole.apply(record)
            if outcome == "scored" and choice % 3 == 0:
                self.now.ledger.stale.add(group)
                self.whole.ledger.stale.add(group)

    def _record(self, topic: str, partition: int, group: int, outcome: str | None, value: bytes = b"") -> Record:
        log = self.logs[f"{RUN}.{topic}", partition]
        headers = headers_of(topic, group, outcome).encode(value)
        name = f"{RUN}.{topic}"
        log.append(Record(topic=name, partition=partition, offset=len(log), timestamp_ms=0, key=None, headers=headers, value=value))
        return log[-1]


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(["scored", "scored", "filtered", "failed", "abandoned"])),
        st.tuples(st.just("note")),
        st.tuples(st.just("restart")),
    ),
    max_size=60,
)


@given(moves=MOVES)
def test_a_restarted_feeder_knows_what_one_that_never_died_knows(moves) -> None:
    feeders = Feeders()
    for name, *arguments in moves:
        getattr(feeders, name)(*arguments)
        assert (feeders.now.admitted, feeders.now.dropped) == (feeders.whole.admitted, feeders.whole.dropped)
        assert feeders.now.unfinished == feeders.whole.unfinished
        assert feeders.now.choices.next() == feeders.whole.choices.next()


@given(moves=MOVES, kept=st.integers(0, 3))
def test_a_feeder_without_a_note_counts_on_from_the_ledger_where_records_were_deleted(moves, kept: int) -> None:
    feeders = Feeders()
    for name, *arguments in moves:
        getattr(feeders, name)(*arguments)
    whole, run = feeders.whole, feeders.whole.admitted
    below = next((group for group in range(run) if group in whole.partition_of and group not in whole.ended), run)
    ended = [record for partition in range(PARTITIONS) for record in feeders.logs[f"{RUN}.groups", partition]]
    dropped = sum(groups.check(one, run=RUN).outcome in DROPPED for one in ended if (groups.check(one, run=RUN).group or 0) < below)
    again = Admission(RUN, PARTITIONS, LedgerState(RUN))
    again.ledger.stale |= whole.ledger.stale
    mark = ResumePoint(
        below=below, settled=(), drops=dropped + len(whole.ledger.stale), dropped=0, positions={}, checkpoints=(), manifests=0, version=0,
        rebased=None,
    )  # fmt: skip
    again.count_on(mark, stale=len(whole.ledger.stale))
    first = max(0, below - kept - 1)  # what was deleted: everything of groups below this number
    for name in NAMES:
        for record in feeders.logs[name]:
            headers = (prompts if "prompts" in name[0] else groups).check(record, run=RUN)
            if (headers.group or 0) >= first:
                again.apply(record)
    assert (again.admitted, again.dropped, again.unfinished) == (whole.admitted, whole.dropped, whole.unfinished)


def test_a_restart_reads_what_is_unfinished_and_not_the_whole_run() -> None:
    feeders = Feeders()
    for number in range(500):
        feeders.admit(number % PARTITIONS)
        if number >= 3:
            feeders.end(0, "filtered" if number % 10 == 0 else "scored")
    feeders.note()
    feeders.restart()
    assert feeders.read <= 2 * 3
    assert feeders.now.choices.next_position == feeders.whole.choices.next_position == 500
    assert len(feeders.now.partition_of) == 3
    assert feeders.now.dropped == feeders.whole.dropped > 0


@pytest.mark.parametrize("damage", ["", "{}", "what?", '{"ended": null, "dropped": 1}'])
def test_notes_that_are_not_of_one_piece_mean_that_everything_is_read(damage: str) -> None:
    feeders = Feeders()
    for number in range(10):
        feeders.admit(number % PARTITIONS)
        feeders.end(0, "filtered")
    feeders.note()
    feeders.committed[NAMES[1]] = Committed(offset=5, metadata=damage)
    feeders.restart()
    assert feeders.read == 20
    assert feeders.now.dropped == 10


@pytest.mark.parametrize(("no_reward", "next_epoch_has_it"), [(None, False), (2, False), (3, True)])
def test_a_row_is_left_out_as_solved_only_if_two_of_its_samples_have_a_reward(no_reward: int | None, next_epoch_has_it: bool) -> None:
    feeders = Feeders()
    feeders.now.choices.solved = 0.5
    feeders.admit(0)
    headers = replace(headers_of("groups", 0, "filtered"), no_reward=no_reward)
    feeders.now.apply(
        Record(topic=f"{RUN}.groups", partition=0, offset=0, timestamp_ms=0, key=b"0", headers=headers.encode(b""), value=b"")
    )
    choice = feeders.now.choices.next()
    assert choice is not None and (choice.turn.epoch == 1) == next_epoch_has_it


def test_what_waits_for_room_is_counted_until_nothing_more_may_come() -> None:
    feeders = Feeders()
    assert feeders.now.admissible(4) == 4
    feeders.admit(0)
    assert feeders.now.admissible(4) == 3
    assert feeders.now.admissible(1) == 0
    feeders.now.choices.limit = 1
    assert feeders.now.admissible(5) == 0, "the epochs are over"
