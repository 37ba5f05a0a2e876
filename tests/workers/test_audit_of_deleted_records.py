"""The audit of a run whose oldest records were deleted: it says what is gone, calls none of that lost, and still finds what is lost."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.inspect.audit.report import as_table, as_text, audit, summary
from penstock.pipeline.inspect.audit.source import Unreadable, plain
from penstock.topics.wire.record import Record
from tests.support.a_run import RUN as TOLD
from tests.support.a_run import RecordBuilder, as_records, with_group
from tests.support.edited_run import EditedRun
from tests.support.listed_records import Listed, broken
from tests.support.worker_set import complete, config_of, records_of

RUN, STEPS, U, K = "cut-run", 8, 2, 2
MAY_LOSE = ("prompts", "rollouts", "groups", "weights", "metrics")
KEPT_WHOLE = ("ledger", "dead-letters")
Begins = Mapping[tuple[str, int], int]


@pytest.fixture(
    scope="module", params=[{"mode": "pipelined"}, {"mode": "one_step_off", "order": "arrival"}], ids=["in order", "by arrival"]
)
def genuine(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a finished run, one that trains in the order of the prompts and one in that of scoring."""
    place = MemoryLog()
    config = config_of(
        tiny_model,
        tmp_path_factory.mktemp("cut"),
        run={"steps": STEPS, "seed": 7},
        schedule={**request.param, "prompts_per_step": U, "samples_per_prompt": K, "steps_per_version": 1},
        kafka={"partitions": 2},
        weights={"partitions": 2},
    )
    complete(place, RUN, config)
    return [record for topic in place.topics(f"{RUN}.") for record in records_of(place, topic)]


@pytest.fixture
def edited(genuine: list[Record]) -> EditedRun:
    return EditedRun(RUN, genuine)


def ends(records: list[Record]) -> dict[tuple[str, int], int]:
    """The offset behind the last record of each partition that may lose its beginning."""
    found: dict[tuple[str, int], int] = {}
    for record in records:
        if (topic := plain(record.topic, RUN)) in MAY_LOSE:
            found[topic, record.partition] = max(found.get((topic, record.partition), 0), record.offset + 1)
    return found


def record_id_of(edited: EditedRun, kind: str, number: int, **facts: int) -> tuple[str, int, int]:
    """Topic, partition and offset of a group's first record of a kind."""
    record = edited.records[edited.one(kind, group=number, **facts)[0]]
    return kind, record.partition, record.offset


def late(edited: EditedRun) -> int:
    """A group of one of the last steps, behind which others were admitted."""
    return sorted(edited.trained())[-U - 1]


def one_record_less(edited: EditedRun, kind: str, partition: int) -> Begins:
    """Only the first record of a partition was deleted."""
    return {(kind, partition): 1 + min(r.offset for r in edited.records if (edited.kind(r), r.partition) == (kind, partition))}


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40))])
def test_nobody_is_accused_of_what_was_deleted_whatever_that_was(edited: EditedRun, seed: int) -> None:
    chosen = random.Random(seed)
    begins = {place: chosen.randrange(end + 1) for place, end in ends(edited.records).items() if chosen.random() < 0.6}
    table = as_table(edited.clean(begins))
    assert table["statuses"]["trained"] == U * STEPS  # the ledger says so
    assert table["deleted_below"] == {f"{topic}/{partition}": begin for (topic, partition), begin in begins.items() if begin}


def test_a_run_without_any_prompt_sample_and_outcome_is_what_its_ledger_says(edited: EditedRun) -> None:
    found = edited.clean({place: end for place, end in ends(edited.records).items() if place[0] in ("prompts", "rollouts", "groups")})
    assert summary(found).startswith("audit: clean, ")
    known = as_table(found)["statuses"]
    assert known["trained"] == U * STEPS
    assert known["gone"] == sum(known.values()) - U * STEPS - known["stale"]  # the ledger says no more of any group


def test_what_is_gone_is_counted_and_named(edited: EditedRun) -> None:
    group = edited.trained()[0]
    topic, partition, offset = record_id_of(edited, "groups", group)
    whole = as_table(edited.audit({}))["statuses"]
    found = edited.audit({(topic, partition): offset + 1})
    note = f"retention has deleted records: groups/{partition} below {offset + 1}; promises that depend on these records are not checked"
    assert f"note: {note}" in as_text(found)
    fates = as_table(found)["statuses"]
    assert sum(fates.values()) == sum(whole.values()) and fates["trained"] == whole["trained"]
    assert "records were deleted" not in as_text(edited.audit({}))


def test_a_dropped_group_whose_outcome_is_gone_counts_as_gone_and_not_as_unused(edited: EditedRun) -> None:
    whole = as_table(edited.audit({}))["statuses"]
    assert whole["filtered"]
    found = as_table(edited.audit({place: end for place, end in ends(edited.records).items() if place[0] == "groups"}))
    assert found["statuses"]["filtered"] == 0
    assert found["statuses"]["gone"] >= whole["filtered"]
    assert f"the prompts of 0 groups were deleted, and the final status of {found['statuses']['gone']}" in found["notes"]


@pytest.mark.parametrize(("topic", "check"), [("prompts", "prompt-numbers"), ("groups", "plans")])
def test_a_prompt_or_a_planned_outcome_behind_the_first_that_is_kept_is_lost(edited: EditedRun, topic: str, check: str) -> None:
    group = late(edited)
    partition = record_id_of(edited, topic, group)[1]
    edited.drop(topic, group=group)
    assert {check, "one-status"} <= broken(edited.audit(one_record_less(edited, topic, partition)))


def test_a_sample_of_a_group_that_was_not_admitted_yet_when_the_first_one_kept_was_written_is_lost(edited: EditedRun) -> None:
    group = late(edited)
    partition = record_id_of(edited, "rollouts", group)[1]
    in_order = edited.all("ledger")[0][1].details.count('"pipelined"') > 0
    edited.drop("rollouts", group=group, sample=0)
    found = edited.audit(one_record_less(edited, "rollouts", partition))
    # By arrival any group may be older than the first one that is kept.
    assert broken(found) == ({"group-samples"} if in_order else set()), as_text(found)


def test_a_manifest_behind_the_first_that_is_kept_is_lost(edited: EditedRun) -> None:
    begin = 1 + edited.records[edited.one("manifests", version=2)[0]].offset
    assert broken(edited.audit({("weights", 0): begin})) == set()
    edited.drop("manifests", version=5)
    assert "version-numbers" in broken(edited.audit({("weights", 0): begin}))


def test_a_violation_in_what_is_kept_is_reported_as_ever(edited: EditedRun) -> None:
    first, last = edited.trained()[0], late(edited)
    topic, partition, offset = record_id_of(edited, "groups", first)
    at, held = edited.one("groups", group=last)
    edited.append(at, replace(held, reason="on second thoughts"))
    assert broken(edited.audit({(topic, partition): offset + 1})) == {"one-outcome"}


@pytest.mark.parametrize("topic", KEPT_WHOLE)
def test_a_ledger_or_dead_letters_without_their_beginning_cannot_be_judged(edited: EditedRun, topic: str) -> None:
    edited.records.append(replace(edited.records[edited.all("ledger")[0][0]], topic=f"{RUN}.dead-letters"))
    with pytest.raises(Unreadable, match=rf"^{RUN} cannot be audited: offsets 0 to 2 of {RUN}\.{topic}/0 were deleted, which had "):
        edited.audit({(topic, 0): 3})


def test_the_rest_of_a_group_whose_first_part_was_deleted_is_no_group_that_lost_parts() -> None:
    builder = RecordBuilder(config={"schedule": {**RecordBuilder().config["schedule"], "max_lag": None, "order": "submission"}})
    records = as_records([builder.record(), builder.made(), builder.opened(), *builder.group([0.0, 1.0, 0.0, 1.0], version=0)])
    edited = EditedRun(TOLD, records)
    at, held = edited.one("groups", group=0)
    parts = with_group(replace(records[at], offset=0), held, run=TOLD, max_bytes=1)
    others = [record for record in records if record is not records[at]]
    assert len(parts) > 2
    for kept, begins, lost in ((parts[1:], {("groups", 0): 1}, False), (parts[1:], {}, True), (parts[:-1], {}, True)):
        found = audit(Listed(TOLD, [*others, *kept], begins=begins))
        assert ("one-outcome" in broken(found)) is lost, as_text(found)
