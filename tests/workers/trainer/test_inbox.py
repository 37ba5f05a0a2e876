"""The trainer's inbox by itself: whole groups in plan order, the rest to its two callbacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.scheduling.rules import preset
from penstock.topics import groups
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Outgoing, Record
from penstock.workers.trainer.inbox import GroupInbox
from tests.support.a_run import stored, with_group
from tests.support.number_run import RUN, scored


def records_of(count: int, *, outcome: str = "scored", max_bytes: int = groups.MAX_PART_BYTES) -> list[list[Record]]:
    """The records of each group, as a log with one partition has them."""
    parts: list[list[Record]] = []
    for group in scored(count, outcome=outcome):
        empty = Outgoing(topic=f"{RUN}.groups", partition=0, key=None, headers=(), value=b"")
        parts.append(with_group(stored(empty, sum(map(len, parts))), group, run=RUN, max_bytes=max_bytes))
    return parts


class Inbox(GroupInbox):
    """An inbox that keeps what it hands to its callbacks."""

    def __init__(self, **more: Any) -> None:
        self.letters: list[tuple[int, str]] = []
        self.duplicates: list[str] = []
        schedule = preset("pipelined", prompts_per_step=2, samples_per_prompt=4, steps_per_version=1)
        letter = lambda record, error: self.letters.append((record.offset, error.kind))  # noqa: E731
        super().__init__(run=RUN, schedule=schedule, dead_letter=letter, duplicate=self.duplicates.append, **more)

    def numbers(self, *, learner_version: int = 0) -> list[int]:
        return [group.group for _, group in iter(lambda: self.take(learner_version=learner_version), None)]


def test_groups_are_handed_out_in_order_of_their_numbers_whenever_they_arrive() -> None:
    inbox, parts = Inbox(), records_of(3)
    inbox.receive(parts[1][0])
    assert inbox.take(learner_version=0) is None
    inbox.receive(parts[0][0])
    inbox.receive(parts[2][0])
    assert inbox.numbers() == [0, 1, 2]


def test_a_group_in_parts_counts_when_the_last_one_is_here() -> None:
    inbox, (parts,) = Inbox(), records_of(1, max_bytes=1)
    assert len(parts) == 4
    for part in parts:
        assert inbox.numbers() == []
        inbox.receive(part)
    taken = inbox.take(learner_version=0)
    assert taken is not None
    assert (taken[0].offset, len(taken[1].samples)) == (0, 4)


def test_a_part_that_does_not_follow_is_a_dead_letter_and_a_whole_group_that_repeats_a_duplicate() -> None:
    inbox, (parts,) = Inbox(), records_of(1, max_bytes=1)
    inbox.receive(parts[1])
    for part in parts:
        inbox.receive(part)
    inbox.receive(parts[0])
    assert inbox.letters == [(1, "mismatch")]
    assert inbox.duplicates == [f"group 0 at {RUN}.groups/0/0"]
    assert inbox.numbers() == [0]


def test_a_payload_that_is_not_what_its_headers_say_is_a_dead_letter_and_the_real_group_still_counts() -> None:
    inbox, parts = Inbox(), records_of(2)
    inbox.receive(replace(parts[0][0], value=parts[1][0].value))
    assert [kind for _, kind in inbox.letters] != []
    inbox.receive(parts[0][0])
    assert inbox.numbers() == [0]


def test_dropped_groups_are_counted_by_their_cause_and_passed_over() -> None:
    inbox = Inbox()
    for (record,) in records_of(2, outcome="filtered"):
        inbox.receive(record)
    assert inbox.selector.drops == inbox.drop_causes.total() == 2
    assert all(cause.startswith("filtered at reward ") for cause in inbox.drop_causes)
    assert inbox.numbers() == []


def test_a_group_that_is_too_old_is_left_to_its_caller_to_record_and_its_payload_is_dropped() -> None:
    inbox, parts = Inbox(), records_of(1)
    inbox.receive(parts[0][0])
    assert inbox.numbers(learner_version=1) == []
    assert [candidate.group for candidate in inbox.selector.newly_stale] == [0]
    assert inbox._groups == {}


@pytest.mark.parametrize("settled", [False, True])
def test_a_group_whose_payload_must_not_be_decoded_is_refused_once(*, settled: bool) -> None:
    @contextmanager
    def deadly(_: Record) -> Iterator[None]:
        raise Unusable("3 processes of this worker crashed while decoding the record", kind="poison")
        yield

    inbox, parts = Inbox(decoding=deadly), records_of(1)
    if settled:
        inbox.selector.settle([0])
    inbox.receive(parts[0][0])
    assert inbox.letters == ([] if settled else [(0, "poison")])  # what is not trained again is not decoded
    assert [candidate.group for candidate in inbox.selector.newly_stale] == ([] if settled else [0])
    assert inbox.numbers() == []


SPOILT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"token_ids": [512]}),
    ({}, {"token_ids": [2**31 - 1]}),
    ({}, {"temperature": 0.0}),
    ({}, {"temperature": float("inf")}),
    ({}, {"temperature": float("nan")}),
    ({}, {"support": [3, 512]}),
    ({"prompt_ids": [1, 70_000]}, {}),
    ({"prompt_ids": []}, {}),
]


@pytest.mark.parametrize(("whole", "one"), SPOILT)
def test_a_group_that_would_end_the_trainer_is_set_aside_and_the_next_one_is_trained(whole: dict[str, Any], one: dict[str, Any]) -> None:
    inbox, parts = Inbox(vocabulary=512), records_of(2)
    group = groups.read(parts[0], run=RUN)[1]
    first = group.samples[0].rollout
    arrays = {name: np.array(ids, np.int32) if isinstance(ids, list) else ids for name, ids in (whole | one).items()}
    rollout = replace(first, **{name: arrays[name] for name in one})
    rollout = rollout if "token_ids" not in one else replace(rollout, token_ids=np.resize(arrays["token_ids"], len(first.token_ids)))
    if "support" in one:
        support = np.stack([first.token_ids, np.full_like(first.token_ids, 512)], axis=1).ravel()
        rollout = replace(rollout, support=support)
    samples = (replace(group.samples[0], rollout=rollout), *group.samples[1:])
    spoilt = replace(group, samples=samples, **{name: arrays[name] for name in whole})
    inbox.receive(*with_group(parts[0][0], spoilt, run=RUN))
    inbox.receive(parts[1][0])
    assert inbox.letters == [(0, "poison")]
    assert inbox.numbers() == [1]
