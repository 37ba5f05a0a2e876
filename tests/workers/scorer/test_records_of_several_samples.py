"""A scorer takes of a record those samples that count: what is a duplicate, surplus or refused is the sample or the record it names."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.session import Session
from penstock.topics import dead_letters, rollouts
from penstock.topics.catalogue import topics_of
from penstock.topics.rollouts import Rollout
from penstock.topics.runs import RunRecord
from penstock.topics.wire.record import Record
from penstock.workers.scorer.group_buffer import PartitionGroups
from penstock.workers.scorer.worker import Scorer
from tests.support.a_run import outgoing, stored
from tests.support.least_config import least_config
from tests.support.strategies import a_rollout
from tests.support.worker_set import records_of

RUN, GROUP = "several", 3
UNUSED: Any = None


@pytest.fixture
def scorer() -> Scorer:
    """Owner of partition 0 of a run whose groups are begun as 3 + 1 samples."""
    config = least_config(schedule={"prompts_per_step": 2, "samples_per_prompt": 3, "oversample": 1})
    log = MemoryLog()
    log.create_topics(topics_of(RUN, partitions=1))
    session = Session(
        run=RUN, role="scorer", worker="scorer-0", log=log, config=config, info={}, stop=threading.Event(),
        record=RunRecord(run=RUN, status="running", config="{}", info="{}", created_ns=0, updated_ns=0),
    )  # fmt: skip
    return Scorer(session, UNUSED, UNUSED, UNUSED, UNUSED, owned={0: PartitionGroups(0)})


def take(scorer: Scorer, offset: int, *samples: Rollout) -> Record:
    record = stored(outgoing(rollouts, *samples, run=RUN, key=b"3"), offset)
    scorer._received(record)
    return record


def drawn(*numbers: int) -> list[Rollout]:
    return [a_rollout(group=GROUP, sample=number) for number in numbers]


def test_a_record_with_a_duplicate_gives_its_other_samples(scorer: Scorer) -> None:
    first = take(scorer, 0, *drawn(1))
    zero, again, two = drawn(0, 1, 2)
    second = take(scorer, 1, zero, replace(again, started_ns=99), two)
    group = scorer.owned[0].open[GROUP]
    assert group.ordered() == drawn(0, 1, 2)
    assert group.records == {0: second, 1: first, 2: second}
    assert scorer.session.reporter.values["duplicates"] == 1
    assert scorer.owned[0].offsets() == (0, 0)


def test_of_a_record_with_more_samples_than_the_group_needs_the_first_count(scorer: Scorer) -> None:
    take(scorer, 0, *drawn(1))
    take(scorer, 1, *drawn(0, 2, 3))
    assert scorer.owned[0].open[GROUP].ordered() == drawn(0, 1, 2)
    assert scorer.session.reporter.values["surplus_samples"] == 1


def test_a_record_with_a_sample_that_no_group_has_is_set_aside_whole_and_its_letter_names_the_samples(scorer: Scorer) -> None:
    record = take(scorer, 0, *drawn(0, 4))
    assert scorer.owned[0].open == {}
    scorer.session.producer.flush(5.0)
    (letter,) = (dead_letters.read(letter, run=RUN)[1] for letter in records_of(scorer.session.log, f"{RUN}.dead-letters"))
    assert (letter.kind, letter.reason) == ("mismatch", "sample 4 of group 3 is outside 0 to 3")
    assert (letter.headers, letter.value) == (record.headers, record.value)
    assert dict(letter.headers)["sample-tokens"] == b"0:20,4:20"
