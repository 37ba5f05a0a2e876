"""A scorer's partition through any number of restarts: each group ends once, and no restart reads the past again."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.topics.wire.record import Record
from penstock.workers.scorer.group_buffer import ORPHAN_AFTER_S, PartitionGroups
from tests.support.examples import prompt_of, sample_of

SAMPLES = 2


def record_at(offset: int) -> Record:
    return Record(topic="t", partition=0, offset=offset, timestamp_ms=0, key=None, headers=(), value=b"")


@dataclass
class Owners:
    """One partition's three logs, and scorers that own it one after the other."""

    prompts: list[int] = field(default_factory=list)
    rollouts: list[tuple[int, int]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    committed: tuple[int, int, str] = (0, 0, "")
    now_s: float = 0.0
    read: int = 0
    """Records of `groups` read at assignments."""
    orphans: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.assign()

    def assign(self) -> None:
        prompts, rollouts, metadata = self.committed
        self.owner = PartitionGroups(0, rollouts_position=rollouts)
        self.owner.start(prompts=prompts, metadata=metadata)
        self._read_groups()

    def _read_groups(self) -> None:
        for offset in range(self.owner.groups_position, len(self.groups)):
            self.read += 1
            self.owner.finish(self.groups[offset], offset=offset)

    def prompt(self) -> None:
        """The owner takes the next prompt, if there is one."""
        at = self.owner.prompts_position
        if at < len(self.prompts):
            if self.owner.out_of_order(self.prompts[at]):
                self.owner.distrust()
                self._read_groups()
            if self.owner.add_prompt(record_at(at), prompt_of(self.prompts[at]), now_s=self.now_s):
                self._end(self.prompts[at])

    def sample(self) -> None:
        """The owner takes the next sample, if there is one."""
        at = self.owner.rollouts_position
        if at < len(self.rollouts):
            self.owner.rollouts_position += 1
            group, number = self.rollouts[at]
            if not self.owner.has(group, number):
                self.owner.add_sample(record_at(at), sample_of(group, number), now_s=self.now_s)
                self._end(group)

    def _end(self, number: int) -> None:
        """Commit a complete group's outcome and offsets in one transaction."""
        if self.owner.open[number].complete:
            held = self.owner.open.pop(number)
            self.committed = (*self.owner.offsets(), self.owner.note())
            self.owner.open[number] = held
            self.groups.append(number)
            self.owner.finish(number, offset=len(self.groups) - 1)

    def wait(self) -> None:
        """So long that samples without a prompt are given up."""
        self.now_s += ORPHAN_AFTER_S + 1
        for group in self.owner.orphans(now_s=self.now_s):
            del self.owner.open[group.group]
            if group.group >= self.owner.below:
                self.orphans.append(group.group)

    def finish(self) -> None:
        while self.owner.prompts_position < len(self.prompts) or self.owner.rollouts_position < len(self.rollouts):
            self.prompt()
            self.sample()


MOVES = st.lists(st.sampled_from(["prompt", "sample", "sample", "assign"]), max_size=60)


@given(
    groups=st.lists(st.integers(0, 40), unique=True, max_size=10).map(sorted),
    order=st.randoms(use_true_random=False),
    copies=st.integers(0, 5),
    moves=MOVES,
)
def test_each_group_ends_once_whatever_is_lost_between_and_however_often_samples_come(groups, order, copies, moves) -> None:
    samples = [(group, number) for group in groups for number in range(SAMPLES)]
    samples += [order.choice(samples) for _ in range(copies if samples else 0)]
    order.shuffle(samples)
    owners = Owners(prompts=groups, rollouts=samples)
    for move in moves:
        getattr(owners, move)()
    owners.finish()
    owners.assign()
    owners.finish()
    owners.wait()
    assert sorted(owners.groups) == groups
    assert owners.orphans == []  # samples of groups that ended long ago are nobody's dead letters


@given(
    groups=st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=8).map(sorted),
    strange=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 60)), max_size=3),
    order=st.randoms(use_true_random=False),
    moves=MOVES,
)
def test_prompts_that_somebody_else_wrote_out_of_order_cost_no_group(groups, strange, order, moves) -> None:
    prompts = list(groups)
    for place, number in strange:
        prompts.insert(min(place, len(prompts)), number)
    samples = [(group, number) for group in set(prompts) for number in range(SAMPLES)]
    order.shuffle(samples)
    owners = Owners(prompts=prompts, rollouts=samples)
    for move in moves:
        getattr(owners, move)()
    owners.finish()
    owners.assign()
    owners.finish()
    assert sorted(owners.groups) == sorted(set(prompts))


def test_a_new_owner_reads_only_the_outcomes_above_the_oldest_unfinished_group() -> None:
    owners = Owners()
    for group in range(1000):
        owners.prompts.append(group)
        owners.rollouts += [(group, number) for number in range(SAMPLES)]
    owners.finish()
    owners.prompts += [1000, 1001]
    owners.rollouts += [(1001, 0), (1001, 1)]  # 1000 is still being drawn
    owners.finish()
    owners.read = 0
    owners.assign()
    assert owners.read == 1
    assert len(owners.owner.outcomes) == 1
    owners.rollouts += [(1000, 0), (1000, 1)]
    owners.finish()
    assert len(owners.groups) == len(set(owners.groups)) == 1002


@pytest.mark.parametrize("text", ["", "{}", "not json", "[1]", json.dumps({"below": "x", "groups": None}), json.dumps({"below": 3})])
def test_what_an_owner_noted_in_another_way_means_that_all_is_read(text: str) -> None:
    state = PartitionGroups(0)
    state.start(prompts=7, metadata=text)
    assert (state.prompts_position, state.groups_position, state.below) == (7, 0, 0)
