"""The audit of a real run: it is clean, and every promise that is broken on purpose is reported by its name and by no other."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.pipeline import cli
from penstock.pipeline.inspect.audit.kafka_reader import ORDER, KafkaSource
from penstock.pipeline.inspect.audit.report import Audit, as_table, as_text, audit, summary
from penstock.topics import dead_letters, weights
from penstock.topics.wire.record import Record
from tests.support.bare_clients import c_client
from tests.support.edited_run import EditedRun
from tests.support.listed_records import broken
from tests.support.violations import (
    FOREIGN,
    MS,
    PLANTED,
    RUN,
    STEPS,
    K,
    S,
    U,
    admission_before_its_version,
    first_in,
    stale_although_fresh,
    two_outcomes,
)
from tests.support.worker_set import WorkerSet, config_of

APART = 6
"""Offsets of the ledger between two audits of the run under way."""
ROLES = (("trainer", 0), ("rollout", 0), ("scorer", 0), ("feeder", 0), ("tracker", 0))


@pytest.fixture(scope="module")
def under_way() -> list[Audit]:
    """Audits made while the run went on."""
    return []


@pytest.fixture(scope="module")
def genuine(broker: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, under_way: list[Audit]) -> Iterator[list[Record]]:
    """The records of a finished run with filtered groups, into whose topics a stranger had written one record each."""
    config = config_of(
        tiny_model,
        tmp_path_factory.mktemp("audited"),
        run={"steps": STEPS, "seed": 7},
        schedule={"prompts_per_step": U, "samples_per_prompt": K, "steps_per_version": S},
        kafka={"partitions": 4},
        weights={"partitions": 1},
    )
    with WorkerSet(broker, RUN) as worker_set:
        worker_set.create(config)
        stranger = Producer(c_client(broker))
        for topic in FOREIGN:
            stranger.produce(f"{RUN}.{topic}", b"hello", partition=int(topic == "weights"), headers=[("run", b"another")])
        assert stranger.flush(30) == 0
        del stranger
        ledger = (f"{RUN}.ledger", 0)
        seen = [worker_set.log.end_offsets([ledger])[ledger]]  # behind the stranger's record
        for role, slot in ROLES:
            worker_set.start(role, slot)

        def look() -> bool:
            """Whether the run is closed; each time the story has gone on by a few entries, and at its end, it is audited."""
            end = worker_set.log.end_offsets([ledger])[ledger]
            if end - seen[-1] >= (APART if under_way else 1) or (
                end != seen[-1] and not any(thread.is_alive() for thread in worker_set.threads.values())
            ):
                seen.append(end)
                under_way.append(audit(KafkaSource(broker, RUN, settings=c_client(broker))))
            return bool(under_way) and under_way[-1].facts.closed is not None

        worker_set.wait(look)
        worker_set.wait()
    source = KafkaSource(broker, RUN, settings=c_client(broker))
    yield [record for topic in ORDER for record in source.read(topic)]
    with WorkerSet(broker, RUN) as worker_set:
        worker_set.log.delete_topics(worker_set.log.topics(f"{RUN}."))


@pytest.fixture
def edited(genuine: list[Record]) -> EditedRun:
    return EditedRun(RUN, genuine)


THROUGH_THE_LOG = {"turns-answered", "replies-asked"}
"""Checks of runs whose turns travel through the log; `tests/workers/environment/test_through_the_log.py` plants what they report."""


def test_a_real_run_is_clean_and_every_check_has_examined_something(edited: EditedRun) -> None:
    found = edited.clean()
    assert {result.check.name for result in found.results if not result.examined} == {*THROUGH_THE_LOG, "evaluations", "regraded"}
    table = as_table(found)
    assert table["statuses"]["trained"] == U * STEPS
    assert table["statuses"]["filtered"] > 0
    assert sum(table["statuses"].values()) == len(edited.all("prompts"))
    assert table["versions"] == STEPS // S + 1
    assert table["dead_letters"] == {"foreign-run": len(FOREIGN) - 1}
    assert summary(found).startswith(f"audit: clean, {len(edited.all('prompts'))} groups, {STEPS} steps, {STEPS // S + 1} versions, 0 dup")


@pytest.mark.usefixtures("genuine")
def test_a_run_that_is_under_way_is_clean_at_any_instant_and_says_which_groups_are_open(under_way: list[Audit]) -> None:
    for found in under_way:
        assert broken(found) == set(), as_text(found)
    going_on = [found for found in under_way if found.facts.closed is None and found.facts.entries]
    assert going_on
    assert any("groups open, the run is active" in summary(found) for found in going_on)
    assert all("unused" not in as_table(found)["statuses"] for found in going_on)


@pytest.mark.parametrize(("plant", "names"), PLANTED, ids=[f"{number}-{plant.__name__}" for number, (plant, _) in enumerate(PLANTED)])
def test_a_planted_violation_is_reported_by_its_check_alone(edited: EditedRun, plant: Callable[[EditedRun], None], names: set[str]) -> None:
    plant(edited)
    found = edited.audit()
    assert broken(found) == names, as_text(found)
    for result in found.results:
        for violation in result.violations:
            assert violation.text
            assert any(value is not None for value in (violation.group, violation.step, violation.version, violation.where))


def test_every_check_has_a_violation_that_was_planted(edited: EditedRun) -> None:
    planted = {name for _, names in PLANTED for name in names}
    assert {result.check.name for result in edited.audit().results} == planted | THROUGH_THE_LOG


# --- what is told and breaks nothing -----------------------------------------------------------------------------------------------


def test_records_that_come_twice_are_counted_by_kind_and_are_no_violation(edited: EditedRun) -> None:
    group = first_in(edited, 1)
    index, rollout = edited.one("rollouts", group=group, sample=0)
    edited.append(index, rollout)
    for kind, facts in (("prompts", {"group": 0}), ("groups", {"group": 0}), ("ledger", {"seq": 2}), ("manifests", {"version": 1})):
        edited.append(*edited.one(kind, **facts))
    for kind, facts in (("metrics", {"role": "trainer"}), ("chunks", {"version": 1})):
        edited.append(*edited.one(kind, **facts))
    again = replace(rollout, started_ns=rollout.started_ns + 1, worker="rollout-0")
    edited.append(index, again)
    found = edited.clean()
    twice = ("samples sent twice", "samples generated twice", "chunks of no manifest")
    assert as_table(found)["duplicates"] == dict.fromkeys(("prompts", "groups", "ledger", "manifests", "metrics", *twice), 1)
    assert "8 duplicates" in summary(found)
    assert as_table(found)["resampled"] == []  # it was begun before the first one was sent


def test_a_sample_begun_after_its_first_record_was_sent_is_listed_with_its_worker_and_time(edited: EditedRun) -> None:
    index, rollout = edited.one("rollouts", group=first_in(edited, 1), sample=0)
    sent_ms = edited.records[index].timestamp_ms
    edited.append(index, replace(rollout, started_ns=(sent_ms + 2000) * MS, worker="rollout-7"))
    found = edited.clean()
    (again,) = as_table(found)["resampled"]
    assert (again["group"], again["sample"], again["again"]["worker"]) == (rollout.group, 0, "rollout-7")
    assert again["after_s"] == pytest.approx(2.0)
    assert again["first"]["sent_s"] == sent_ms / 1000
    assert "1 samples were generated again after their first record had been sent (rollout-7 1)" in as_text(found)


def test_a_broken_record_behind_everything_that_was_read_is_told_and_no_violation(edited: EditedRun) -> None:
    index, rollout = edited.one("rollouts", group=0, sample=0)
    edited.append(index, rollout)
    edited.records[-1] = replace(edited.records[-1], value=edited.records[-1].value[:-9])
    found = edited.clean()
    assert "1 records are unusable and have no dead letter" in as_text(found)


def test_a_second_letter_by_a_process_that_took_over_is_a_duplicate(edited: EditedRun) -> None:
    index, held = edited.one("dead-letters", topic=f"{RUN}.rollouts")
    edited.append(index, replace(held, worker="scorer-1"))
    edited.clean()
    at, measured = edited.one("metrics", worker="scorer-0")
    edited.append(at, replace(measured, incarnation="another", seq=0))
    edited.append(index, replace(held, time_ns=measured.time_ns + 1))
    found = edited.clean()
    assert as_table(found)["duplicates"] == {"dead letters": 2}


def test_a_sound_group_that_killed_its_reader_may_be_called_stale(edited: EditedRun) -> None:
    stale_although_fresh(edited)
    group = edited.all("ledger")[-2][1].groups[0]
    index = edited.one("groups", group=group)[0]
    letter = dead_letters.from_record(edited.records[index], kind="poison", reason="3 deaths", worker="trainer", time_ns=1)
    edited.append(edited.all("dead-letters")[0][0], letter)
    found = edited.clean()
    assert as_table(found)["dead_letters"]["poison"] == 1


def test_an_entry_beyond_a_gap_that_was_set_aside_is_not_of_the_story(edited: EditedRun) -> None:
    index, held = edited.one("ledger", kind="step", step=0)
    edited.append(index, replace(held, seq=10**6, step=10**6))
    assert "ledger-order" in broken(edited.audit())
    letter = dead_letters.from_record(edited.records[-1], kind="mismatch", reason="beyond a gap", worker="tracker", time_ns=1)
    edited.append(edited.all("dead-letters")[0][0], letter)
    edited.clean()


def test_a_missing_measurement_and_a_role_without_any_are_told(edited: EditedRun) -> None:
    measured = edited.all("metrics")
    gone = {index for index, found in measured if found.role == "tracker"}
    gone.add([index for index, found in measured if found.role == "feeder"][2])
    edited.records = [record for index, record in enumerate(edited.records) if index not in gone]
    found = edited.clean()
    notes = as_table(found)["notes"]
    assert "no worker of these roles has reported: tracker" in notes
    assert "1 measurements are missing between measurements of the same process" in notes


def test_chunks_that_retention_released_are_told(edited: EditedRun) -> None:
    ((partition, released),) = weights.chunk_places(edited.one("manifests", version=1)[1])
    found = edited.clean({("weights", partition): released + 1})
    assert "retention has deleted chunks of 1 versions, whose digests cannot be recomputed" in as_table(found)["notes"]


def test_times_of_two_machines_are_not_compared(edited: EditedRun) -> None:
    admission_before_its_version(edited)
    for at, measured in edited.all("metrics"):
        if measured.role == "feeder":
            edited.put(at, replace(measured, labels={**measured.labels, "host": "elsewhere"}))
    found = edited.clean()
    assert any("not on one machine" in note for note in as_table(found)["notes"])


def test_one_bit_turned_in_any_record_that_was_used_is_noticed(edited: EditedRun) -> None:
    genuine, chosen = edited.records, random.Random(5)
    used = [index for kind in ("prompts", "rollouts", "groups", "ledger", "manifests", "chunks") for index, _ in edited.all(kind)]
    for index in chosen.sample(used, 12):
        record = genuine[index]
        at = chosen.randrange(len(record.value))
        turned = record.value[:at] + bytes([record.value[at] ^ 1 << chosen.randrange(8)]) + record.value[at + 1 :]
        edited.records = [*genuine[:index], replace(record, value=turned), *genuine[index + 1 :]]
        found = edited.audit()
        unread = any("have no dead letter" in note for note in as_table(found)["notes"])
        assert broken(found) or unread, f"{record.topic}/{record.partition}/{record.offset}, byte {at}"


# --- on the broker -----------------------------------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command line; returns the exit status and what it printed."""
    status = cli.main(["audit", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_command_ends_with_0_for_a_clean_run_1_for_a_broken_one_and_2_for_an_unknown_one(
    broker: str, genuine: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = command(capsys, RUN[:6], "--bootstrap", broker)
    assert status == 0, said
    assert said.splitlines()[-1].startswith("audit: clean, ")
    status, said = command(capsys, "no-such-run", "--bootstrap", broker)
    assert (status, len(said.splitlines())) == (2, 1)
    edited = EditedRun(RUN, genuine)
    two_outcomes(edited)
    planted = edited.records[-1]
    stranger = Producer(c_client(broker))
    stranger.produce(planted.topic, planted.value, key=planted.key, partition=planted.partition, headers=list(planted.headers))
    assert stranger.flush(30) == 0
    del stranger
    status, said = command(capsys, RUN, "--bootstrap", broker, "--json")
    assert status == 1, said
    table = json.loads(said)
    assert {check["check"]: len(check["violations"]) for check in table["checks"] if check["violations"]} == {"one-outcome": 1}
    assert table["summary"].startswith("audit: 1 violation, ")
