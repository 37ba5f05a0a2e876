"""The audit of a real run: it is clean, and every promise that is broken on purpose is reported by its name and by no other."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Producer
from crew import Crew, config_of
from planting import Told, with_sample
from processes import Processes
from test_foreign_records import OWNED, bad_records, repeat

from pipeline import cli
from pipeline.audit.findings import Audit, as_table, as_text, audit, audit_kafka, summary
from pipeline.audit.kafka_source import ORDER, KafkaSource
from pipeline.audit.source import Listed
from pipeline.runs import create
from topics import dead_letters
from topics.groups import encode_parts
from topics.ledger import Entry
from topics.record import Record

U, K, S, STEPS = 2, 2, 2, 6
RUN = "audited-run"
ROLES = (("trainer", 0), ("rollout", 0), ("scorer", 0), ("feeder", 0), ("tracker", 0))
FOREIGN = ("prompts", "rollouts", "groups", "weights", "ledger", "metrics", "dead-letters")
MS = 1_000_000


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
    )
    with Crew(broker, RUN) as crew:
        create(config, log=crew.log, run_id=RUN, say=lambda _: None)
        stranger = Producer({"bootstrap.servers": broker})
        for topic in FOREIGN:
            stranger.produce(f"{RUN}.{topic}", b"hello", partition=int(topic == "weights"), headers=[("run", b"another")])
        assert stranger.flush(30) == 0
        del stranger
        for role, slot in ROLES:
            crew.start(role, slot)
        seen = [0]

        def look() -> bool:
            """Whether the run is closed; each time the story has gone on, it is audited."""
            ledger = (f"{RUN}.ledger", 0)
            end = crew.log.end_offsets([ledger])[ledger]
            if end != seen[-1]:
                seen.append(end)
                under_way.append(audit_kafka(broker, RUN))
            return bool(under_way) and under_way[-1].facts.closed is not None

        crew.wait(look)
        crew.wait()
    source = KafkaSource(broker, RUN)
    yield [record for topic in ORDER for record in source.read(topic)]
    with Crew(broker, RUN) as crew:
        crew.log.delete_topics(crew.log.topics(f"{RUN}."))


@pytest.fixture
def told(genuine: list[Record]) -> Told:
    """The same records, to be changed."""
    return Told(RUN, genuine)


def judged(told: Told) -> Audit:
    return audit(Listed(RUN, told.records))


def broken(found: Audit) -> set[str]:
    """The names of the checks that report something."""
    return {result.check.name for result in found.results if result.violations}


def test_a_real_run_is_clean_and_every_check_has_examined_something(told: Told) -> None:
    found = judged(told)
    assert broken(found) == set(), as_text(found)
    assert [result.check.name for result in found.results if not result.examined] == []
    table = as_table(found)
    assert table["fates"]["trained"] == U * STEPS
    assert table["fates"]["filtered"] > 0
    assert sum(table["fates"].values()) == len(told.all("prompts"))
    assert table["versions"] == STEPS // S + 1
    assert table["dead_letters"] == {"foreign-run": len(FOREIGN) - 1}
    assert summary(found).startswith(f"audit: clean, {len(told.all('prompts'))} groups, {STEPS} steps, {STEPS // S + 1} versions, 0 dup")


@pytest.mark.usefixtures("genuine")
def test_a_run_that_is_under_way_is_clean_at_any_instant_and_says_which_groups_are_open(under_way: list[Audit]) -> None:
    for found in under_way:
        assert broken(found) == set(), as_text(found)
    going_on = [found for found in under_way if found.facts.closed is None and found.facts.entries]
    assert going_on
    assert any("groups open, the run is under way" in summary(found) for found in going_on)
    assert all("unused" not in as_table(found)["fates"] for found in going_on)


# --- what is planted -------------------------------------------------------------------------------------------------------------


def first_in(told: Told, round_number: int) -> int:
    """A trained group of a round."""
    return next(group for group in told.trained() if told.one("prompts", group=group)[1].slot >= round_number * U * S)


def filtered(told: Told, *, from_round: int = 0) -> int:
    return told.ended("filtered", from_round=from_round, round_groups=U * S)


def another(told: Told, *, beyond: int = 0) -> int:
    """Admit one more group in a run that was to go on for two steps more; returns its number."""
    told.registered("info", steps=STEPS + 2)
    count = len(told.all("prompts"))
    dropped = count - U * STEPS
    index, last = told.one("prompts", group=count - 1)
    slot = count + beyond - dropped
    made = {"group": count + beyond, "slot": slot, "min_version": slot // (U * S), "created_ns": last.created_ns + 10**12}
    told.append(index, replace(last, **made))
    return count + beyond


def outcome_of(told: Told, number: int, *, like: str) -> tuple[int, Any]:
    """An outcome for a group that has none, as another group's: its index is where that one stands."""
    index, held = told.one("groups", outcome=like)
    prompt = told.one("prompts", group=number)[1]
    facts = {name: getattr(prompt, name) for name in ("group", "slot", "min_version", "samples_per_prompt", "epoch", "row", "created_ns")}
    samples = tuple(replace(sample, rollout=replace(sample.rollout, group=number)) for sample in held.samples)
    texts = {"prompt": prompt.prompt, "prompt_ids": prompt.token_ids, "columns": prompt.columns}
    return index, replace(held, **facts, **texts, samples=samples)


def a_gap_in_the_numbers(told: Told) -> None:
    another(told, beyond=1)


def a_second_prompt(told: Told) -> None:
    index, held = told.one("prompts", group=0)
    told.append(index, replace(held, row=held.row + 1))


def a_prompt_copied_into_another_partition(told: Told) -> None:
    index, held = told.one("prompts", group=0)
    told.append(index, held, partition=(told.records[index].partition + 1) % 4)


def a_slot_beyond_its_number(told: Told) -> None:
    told.prompt(0, slot=1)


def a_slot_that_counts_drops_that_were_not(told: Told) -> None:
    group = first_in(told, 1)
    slot = told.one("prompts", group=group)[1].slot
    dropped = sum(held.outcome == "filtered" and held.group < group for _, held in told.all("groups"))
    low = group - dropped - 1
    assert low < slot
    told.prompt(group, slot=low, min_version=low // (U * S))


def an_oldest_version_that_is_too_old(told: Told) -> None:
    told.prompt(first_in(told, 1), min_version=0)


def a_prompt_for_more_samples(told: Told) -> None:
    told.prompt(0, samples_per_prompt=K + 1)


def admission_before_its_version(told: Told) -> None:
    manifest = told.one("manifests", version=1)[1]
    told.prompt(first_in(told, 1), created_ns=manifest.created_ns - MS)


def admission_beyond_the_run(told: Told) -> None:
    another(told)
    told.registered("info", steps=STEPS)


def a_sample_of_older_weights(told: Told) -> None:
    told.sample(filtered(told, from_round=1), 0, span_versions=np.array([0], np.int32))


def a_sample_of_weights_that_never_were(told: Told) -> None:
    told.sample(filtered(told), 0, span_versions=np.array([9], np.int32))


def two_outcomes(told: Told) -> None:
    index, held = told.one("groups", outcome="filtered")
    told.append(index, replace(held, reason="on second thoughts"))


def a_part_without_the_other(told: Told) -> None:
    index, held = outcome_of(told, another(told), like="scored")
    (headers, value), _ = encode_parts(held, run=RUN, worker="scorer-0", max_bytes=1)
    told.append(index, held)
    told.records[-1] = replace(told.records[-1], headers=headers.encode(value), value=value)


def an_outcome_in_another_partition(told: Told) -> None:
    index, held = told.one("groups", outcome="filtered")
    partition = told.records[index].partition
    del told.records[index]
    like = told.one("groups", outcome="scored")[0]
    told.append(like, held, partition=(partition + 1) % 4)


def an_outcome_of_another_row(told: Told) -> None:
    told.group(first_in(told, 0), lambda held: replace(held, row=held.row + 1))


def a_token_that_was_not_drawn(told: Told) -> None:
    def change(held: Any) -> Any:
        tokens = held.samples[1].rollout.token_ids.copy()
        tokens[0] += 1
        return with_sample(held, 1, token_ids=tokens)

    told.group(first_in(told, 1), change)


def a_logprob_that_was_not_drawn(told: Told) -> None:
    def change(held: Any) -> Any:
        logprobs = held.samples[0].rollout.behaviour_logprobs.copy()
        logprobs[-1] = np.nextafter(logprobs[-1], np.float32(0))
        return with_sample(held, 0, behaviour_logprobs=logprobs)

    told.group(first_in(told, 0), change)


def a_sample_too_few(told: Told) -> None:
    told.group(first_in(told, 1), lambda held: replace(held, samples=held.samples[:-1]))


def the_second_record_of_a_sample(told: Told) -> None:
    group = first_in(told, 0)
    index, held = told.one("rollouts", group=group, sample=0)
    told.append(index, held)  # what was first is second now
    told.put(index, replace(held, started_ns=held.started_ns - 1))


def a_sample_from_nowhere(told: Told) -> None:
    told.drop("rollouts", group=first_in(told, 0), sample=1)


def stale_and_filtered(told: Told) -> None:
    group = filtered(told)
    told.ledger(lambda entries: entries.insert(-1, Entry(seq=0, kind="stale", time_ns=1, step=STEPS - 1, groups=(group,))))


def trained_and_filtered(told: Told) -> None:
    told.group(first_in(told, 1), lambda held: replace(held, outcome="filtered", reason="why not"))


def an_outcome_of_nobody(told: Told) -> None:
    index, held = told.one("groups", outcome="filtered")
    told.append(index, replace(held, group=10**12, outcome="failed", samples=()))


def a_gap_in_the_ledger(told: Told) -> None:
    told.alter("ledger", where={"kind": "run-closed"}, change=lambda entry: replace(entry, seq=entry.seq + 1))


def a_number_twice_in_the_ledger(told: Told) -> None:
    index = told.one("ledger", kind="run-opened")[0]
    last = told.all("ledger")[-1][1]
    closed = told.one("ledger", kind="run-closed")[0]
    told.put(closed, Entry(seq=last.seq, kind="stale", time_ns=1))
    told.append(index, last)


def a_story_that_goes_on_after_its_end(told: Told) -> None:
    told.ledger(lambda entries: entries.append(Entry(seq=0, kind="stale", time_ns=1)))


def a_story_without_a_beginning(told: Told) -> None:
    told.ledger(lambda entries: entries.pop(0))


def an_end_that_only_the_register_knows(told: Told) -> None:
    told.drop("ledger", kind="run-closed")


def another_schedule_than_agreed(told: Told) -> None:
    told.registered("schedule", max_drops_per_step=9)


def altered_step(number: int, **fields: Any) -> Callable[[Told], None]:
    def plant(told: Told) -> None:
        told.alter("ledger", where={"kind": "step", "step": number}, **fields)

    return plant


def a_step_that_trained_too_little(told: Told) -> None:
    told.alter("ledger", lambda entry: replace(entry, plan=entry.plan[:-1]), where={"kind": "step", "step": STEPS - 1})


def closed_after_another_step(told: Told) -> None:
    told.alter("ledger", where={"kind": "run-closed"}, step=STEPS - 1)


def trained_twice(told: Told) -> None:
    again = told.one("ledger", kind="step", step=STEPS - 2)[1].plan[0]
    told.alter("ledger", lambda entry: replace(entry, plan=(entry.plan[0], again)), where={"kind": "step", "step": STEPS - 1})


def trained_in_another_order(told: Told) -> None:
    told.alter("ledger", lambda entry: replace(entry, plan=entry.plan[::-1]), where={"kind": "step", "step": 2})


def planned(step: int, **fields: Any) -> Callable[[Told], None]:
    def plant(told: Told) -> None:
        told.alter(
            "ledger",
            lambda entry: replace(entry, plan=(*entry.plan[:-1], replace(entry.plan[-1], **fields))),
            where={"kind": "step", "step": step},
        )

    return plant


def planned_where_nothing_lies(told: Told) -> None:
    offset = told.one("ledger", kind="step", step=1)[1].plan[-1].offset
    planned(1, offset=offset + 1)(told)


def planned_where_another_lies(told: Told) -> None:
    other = told.one("ledger", kind="step", step=0)[1].plan[0]
    planned(1, partition=other.partition, offset=other.offset)(told)


def trained_too_old(told: Told) -> None:
    told.sample(first_in(told, 1), 1, span_versions=np.array([0], np.int32))


def stale_although_fresh(told: Told) -> None:
    group = another(told)
    index, held = outcome_of(told, group, like="scored")
    version = held.min_version
    partition = told.records[told.one("prompts", group=group)[0]].partition
    span = np.array([version], np.int32)
    for sample in held.samples:
        rollout = replace(sample.rollout, span_versions=span)
        told.append(told.one("rollouts", sample=0)[0], rollout, partition=partition)
        held = with_sample(held, rollout.sample, span_versions=span)
    told.append(index, held, partition=partition)
    told.ledger(lambda entries: entries.insert(-1, Entry(seq=0, kind="stale", time_ns=1, step=version * S, groups=(group,))))


def two_manifests(told: Told) -> None:
    index, held = told.one("manifests", version=1)
    told.append(index, replace(held, created_ns=held.created_ns + 1))


def a_version_without_manifest(told: Told) -> None:
    told.drop("manifests", version=STEPS // S)


def a_version_without_entry(told: Told) -> None:
    told.ledger(lambda entries: entries.remove(next(entry for entry in entries if entry.kind == "version" and entry.version == 1)))


def a_version_before_its_step(told: Told) -> None:
    def change(entries: list[Entry]) -> None:
        at = next(i for i, entry in enumerate(entries) if entry.kind == "version" and entry.version == 1)
        entries[at - 1], entries[at] = entries[at], entries[at - 1]

    told.ledger(change)


def a_chunk_that_is_gone(told: Told) -> None:
    told.drop("chunks", version=1, index=0)


def a_chunk_with_a_bit_turned(told: Told) -> None:
    told.alter("chunks", lambda chunk: replace(chunk, data=flipped(chunk.data)), where={"version": 1})


def a_chunk_of_another_version(told: Told) -> None:
    places = told.one("manifests", version=2)[1].chunk_offsets
    told.alter("manifests", where={"version": 1}, chunk_offsets=places)


def flipped(data: Any) -> bytes:
    return bytes([data[0] ^ 1]) + bytes(data[1:])


def weights_that_are_not_their_digest(told: Told) -> None:
    import hashlib

    data = flipped(told.one("chunks", version=1, index=0)[1].data)
    told.alter("chunks", where={"version": 1, "index": 0}, data=data)
    told.alter(
        "manifests",
        lambda held: replace(held, chunk_sha256=(hashlib.sha256(data).hexdigest(), *held.chunk_sha256[1:])),
        where={"version": 1},
    )


def a_digest_that_only_the_ledger_knows(told: Told) -> None:
    told.alter("ledger", where={"kind": "version", "version": 1}, digest="0" * 64)


def a_base_that_comes_later(told: Told) -> None:
    told.alter("manifests", where={"version": 1}, base_version=2)


def a_closing_digest_of_other_weights(told: Told) -> None:
    told.alter("ledger", where={"kind": "run-closed"}, digest=told.one("manifests", version=1)[1].digest)


def a_checkpoint_of_other_weights(told: Told) -> None:
    at = Entry(seq=0, kind="checkpoint", time_ns=1, step=S, version=1, digest="f" * 64)
    told.ledger(lambda entries: entries.insert(-1, at))


def a_letter_about_nothing(told: Told) -> None:
    index, held = told.all("dead-letters")[0]
    told.append(index, replace(held, offset=10_000))


def a_letter_with_other_bytes(told: Told) -> None:
    index, held = told.all("dead-letters")[0]
    told.put(index, replace(held, value=b"hello?"))


def a_letter_sent_twice(told: Told) -> None:
    index, held = told.all("dead-letters")[0]
    told.append(index, replace(held, time_ns=held.time_ns + 1))


def no_letter(topic: str) -> Callable[[Told], None]:
    def plant(told: Told) -> None:
        told.drop("dead-letters", topic=f"{RUN}.{topic}")

    return plant


PLANTED: list[tuple[Callable[[Told], None], set[str]]] = [
    (a_gap_in_the_numbers, {"prompt-numbers"}),
    (a_second_prompt, {"prompt-numbers"}),
    (a_prompt_copied_into_another_partition, {"prompt-numbers"}),
    (a_slot_beyond_its_number, {"prompt-arithmetic"}),
    (a_slot_that_counts_drops_that_were_not, {"prompt-arithmetic"}),
    (an_oldest_version_that_is_too_old, {"prompt-arithmetic"}),
    (a_prompt_for_more_samples, {"prompt-arithmetic"}),
    (admission_before_its_version, {"backpressure"}),
    (admission_beyond_the_run, {"backpressure"}),
    (a_sample_of_older_weights, {"sample-versions"}),
    (a_sample_of_weights_that_never_were, {"sample-versions"}),
    (two_outcomes, {"one-outcome"}),
    (a_part_without_the_other, {"one-outcome"}),
    (an_outcome_in_another_partition, {"group-place"}),
    (an_outcome_of_another_row, {"group-place"}),
    (a_token_that_was_not_drawn, {"group-samples"}),
    (a_logprob_that_was_not_drawn, {"group-samples"}),
    (a_sample_too_few, {"group-samples"}),
    (the_second_record_of_a_sample, {"group-samples"}),
    (a_sample_from_nowhere, {"group-samples"}),
    (stale_and_filtered, {"one-fate"}),
    (trained_and_filtered, {"one-fate"}),
    (an_outcome_of_nobody, {"one-fate"}),
    (a_gap_in_the_ledger, {"ledger-order"}),
    (a_number_twice_in_the_ledger, {"ledger-order"}),
    (a_story_that_goes_on_after_its_end, {"ledger-order"}),
    (a_story_without_a_beginning, {"ledger-order"}),
    (another_schedule_than_agreed, {"ledger-order"}),
    (an_end_that_only_the_register_knows, {"ledger-order"}),
    (altered_step(4, step=5), {"step-numbers"}),
    (altered_step(4, version=1), {"step-numbers"}),
    (altered_step(1, boundaries=(3, 3)), {"step-numbers"}),
    (a_step_that_trained_too_little, {"step-numbers"}),
    (closed_after_another_step, {"step-numbers"}),
    (trained_twice, {"trained-once"}),
    (trained_in_another_order, {"step-order"}),
    (planned(1, sha256="0" * 64), {"plans"}),
    (planned_where_nothing_lies, {"plans"}),
    (planned_where_another_lies, {"plans"}),
    (trained_too_old, {"lag", "sample-versions"}),  # its prompt allowed no older weights either
    (stale_although_fresh, {"lag"}),
    (two_manifests, {"version-numbers"}),
    (a_version_without_manifest, {"version-numbers"}),
    (a_version_without_entry, {"version-numbers"}),
    (a_version_before_its_step, {"version-numbers"}),
    (a_chunk_that_is_gone, {"chunks"}),
    (a_chunk_with_a_bit_turned, {"chunks"}),
    (a_chunk_of_another_version, {"chunks"}),
    (weights_that_are_not_their_digest, {"digests"}),
    (a_digest_that_only_the_ledger_knows, {"digests"}),
    (a_base_that_comes_later, {"digests"}),
    (a_closing_digest_of_other_weights, {"last-digests"}),
    (a_checkpoint_of_other_weights, {"last-digests"}),
    (a_letter_about_nothing, {"letters"}),
    (a_letter_with_other_bytes, {"letters"}),
    (a_letter_sent_twice, {"letters-once"}),
    *[(no_letter(topic), {"accounted"}) for topic in FOREIGN if topic != "dead-letters"],
]


@pytest.mark.parametrize(("plant", "names"), PLANTED, ids=[f"{number}-{plant.__name__}" for number, (plant, _) in enumerate(PLANTED)])
def test_a_planted_violation_is_reported_by_its_check_alone(told: Told, plant: Callable[[Told], None], names: set[str]) -> None:
    plant(told)
    found = judged(told)
    assert broken(found) == names, as_text(found)
    for result in found.results:
        for violation in result.violations:
            assert violation.text
            assert any(value is not None for value in (violation.group, violation.step, violation.version, violation.where))


def test_every_check_has_a_violation_that_was_planted(told: Told) -> None:
    assert {result.check.name for result in judged(told).results} == {name for _, names in PLANTED for name in names}


# --- what is told and breaks nothing -----------------------------------------------------------------------------------------------


def test_records_that_come_twice_are_counted_by_kind_and_are_no_violation(told: Told) -> None:
    group = first_in(told, 1)
    index, rollout = told.one("rollouts", group=group, sample=0)
    told.append(index, rollout)
    for kind, facts in (("prompts", {"group": 0}), ("groups", {"group": 0}), ("ledger", {"seq": 2}), ("manifests", {"version": 1})):
        at, held = told.one(kind, **facts)
        told.append(at, held)
    for kind, facts in (("metrics", {"role": "trainer"}), ("chunks", {"version": 1})):
        at, held = told.one(kind, **facts)
        told.append(at, held)
    again = replace(rollout, started_ns=rollout.started_ns + 1, worker="rollout-0")
    told.append(index, again)
    found = judged(told)
    assert broken(found) == set(), as_text(found)
    assert as_table(found)["duplicates"] == {
        "prompts": 1,
        "samples sent twice": 1,
        "samples drawn twice": 1,
        "groups": 1,
        "ledger": 1,
        "manifests": 1,
        "chunks of no manifest": 1,
        "metrics": 1,
    }
    assert "8 duplicates" in summary(found)
    assert as_table(found)["redrawn"] == []  # it was begun before the first one was sent


def test_a_sample_begun_after_its_first_record_was_sent_is_listed_with_its_worker_and_time(told: Told) -> None:
    index, rollout = told.one("rollouts", group=first_in(told, 1), sample=0)
    sent_ms = told.records[index].timestamp_ms
    told.append(index, replace(rollout, started_ns=(sent_ms + 2000) * MS, worker="rollout-7"))
    found = judged(told)
    assert broken(found) == set()
    (again,) = as_table(found)["redrawn"]
    assert (again["group"], again["sample"], again["again"]["worker"]) == (rollout.group, 0, "rollout-7")
    assert again["after_s"] == pytest.approx(2.0)
    assert again["first"]["sent_s"] == sent_ms / 1000
    assert "1 samples were begun after the first record of them had been sent (rollout-7 1)" in as_text(found)


def test_a_broken_record_behind_everything_that_was_read_is_told_and_no_violation(told: Told) -> None:
    index, rollout = told.one("rollouts", group=0, sample=0)
    told.append(index, rollout)
    told.records[-1] = replace(told.records[-1], value=told.records[-1].value[:-9])
    found = judged(told)
    assert broken(found) == set()
    assert "1 records cannot be used and have no dead letter" in as_text(found)


def test_a_second_letter_by_a_process_that_took_over_is_a_duplicate(told: Told) -> None:
    index, held = told.one("dead-letters", topic=f"{RUN}.rollouts")
    told.append(index, replace(held, worker="scorer-1"))
    assert broken(judged(told)) == set()
    at, measured = told.one("metrics", worker="scorer-0")
    told.append(at, replace(measured, incarnation="another", seq=0))
    told.append(index, replace(held, time_ns=measured.time_ns + 1))
    found = judged(told)
    assert broken(found) == set(), as_text(found)
    assert as_table(found)["duplicates"] == {"dead letters": 2}


def test_a_sound_group_that_killed_its_reader_may_be_called_stale(told: Told) -> None:
    stale_although_fresh(told)
    group = told.all("ledger")[-2][1].groups[0]
    index = told.one("groups", group=group)[0]
    letter = dead_letters.from_record(told.records[index], kind="killer", reason="3 deaths", worker="trainer", time_ns=1)
    told.append(told.all("dead-letters")[0][0], letter)
    found = judged(told)
    assert broken(found) == set(), as_text(found)
    assert as_table(found)["dead_letters"]["killer"] == 1


def test_an_entry_beyond_a_gap_that_was_set_aside_is_not_of_the_story(told: Told) -> None:
    index, held = told.one("ledger", kind="step", step=0)
    told.append(index, replace(held, seq=10**6, step=10**6))
    assert "ledger-order" in broken(judged(told))
    letter = dead_letters.from_record(told.records[-1], kind="mismatch", reason="beyond a gap", worker="tracker", time_ns=1)
    told.append(told.all("dead-letters")[0][0], letter)
    assert broken(judged(told)) == set()


def test_a_missing_measurement_and_a_role_without_any_are_told(told: Told) -> None:
    measured = told.all("metrics")
    gone = {index for index, found in measured if found.role == "tracker"}
    gone.add([index for index, found in measured if found.role == "feeder"][2])
    told.records = [record for index, record in enumerate(told.records) if index not in gone]
    found = judged(told)
    assert broken(found) == set()
    notes = as_table(found)["notes"]
    assert "no measurement of: tracker; what only they read was not read by anybody" in notes
    assert "1 measurements are missing between others of their process" in notes


def test_chunks_that_retention_released_are_told(told: Told) -> None:
    begin = told.one("manifests", version=1)[1].chunk_offsets[0] + 1
    told.records = [record for record in told.records if told.kind(record) != "chunks" or record.offset >= begin]
    found = judged(told)
    assert broken(found) == set(), as_text(found)
    assert "chunks of 2 versions were released by retention: their digests cannot be recomputed" in as_table(found)["notes"]


def test_times_of_two_machines_are_not_compared(told: Told) -> None:
    admission_before_its_version(told)
    for at, measured in told.all("metrics"):
        if measured.role == "feeder":
            told.put(at, replace(measured, labels={**measured.labels, "host": "elsewhere"}))
    found = judged(told)
    assert broken(found) == set()
    assert any("not on one machine" in note for note in as_table(found)["notes"])


def test_one_bit_turned_in_any_record_that_was_used_is_noticed(told: Told) -> None:
    genuine, chosen = told.records, random.Random(5)
    used = [index for kind in ("prompts", "rollouts", "groups", "ledger", "manifests", "chunks") for index, _ in told.all(kind)]
    for index in chosen.sample(used, 24):
        record = genuine[index]
        at = chosen.randrange(len(record.value))
        turned = record.value[:at] + bytes([record.value[at] ^ 1 << chosen.randrange(8)]) + record.value[at + 1 :]
        told.records = [*genuine[:index], replace(record, value=turned), *genuine[index + 1 :]]
        found = judged(told)
        unread = any("have no dead letter" in note for note in as_table(found)["notes"])
        assert broken(found) or unread, f"{record.topic}/{record.partition}/{record.offset}, byte {at}"


# --- on the broker -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", [{"mode": "pipelined"}, {"mode": "one_step_off", "order": "arrival"}], ids=["lag 0", "lag 1"])
def test_a_run_whose_workers_are_killed_and_into_which_a_stranger_writes_is_clean(
    broker: str, run_id: str, tiny_model: Path, tmp_path: Path, schedule: dict[str, Any]
) -> None:
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 4, "steps_per_version": 2}
    config = config_of(tiny_model, tmp_path, run={"steps": 12, "seed": 3}, schedule={**sizes, **schedule}, rollout={"workers": 2})
    stranger = Producer({"bootstrap.servers": broker, "message.max.bytes": 16 << 20, "linger.ms": 0})
    with Crew(broker, run_id) as crew, Processes(broker, run_id, tmp_path) as workers:
        create(config, log=crew.log, run_id=run_id, say=lambda _: None)
        for topic, partition in OWNED:
            for head, value in bad_records(run_id, topic if (topic, partition) != ("weights", 1) else "weights/1").values():
                stranger.produce(f"{run_id}.{topic}", value, partition=partition, headers=head)
        assert stranger.flush(30) == 0
        for role, slot in ROLES:
            workers.start(role, slot)
        for done, role in enumerate(("rollout-0", "scorer-0", "trainer", "feeder", "tracker"), start=1):
            crew.wait(lambda done=done: crew.report()["steps"] >= 2 * done, limit_s=300.0)
            workers.kill(role)
            workers.start(role.split("-")[0])
            for topic in ("prompts", "rollouts", "groups", "ledger", "metrics", "weights"):
                repeat(crew, stranger, run_id, topic)
            assert stranger.flush(30) == 0
            assert broken(found := audit_kafka(broker, run_id)) == set(), as_text(found)
        crew.wait(lambda: crew.report()["status"] == "finished", limit_s=300.0)
        for name in workers.running:
            assert workers.ended(name) == 0, workers.text(name)
    del stranger
    found = audit_kafka(broker, run_id)
    assert broken(found) == set(), as_text(found)
    assert as_table(found)["fates"]["trained"] == 48
    assert as_table(found)["duplicates"]["ledger"] == 5
    assert sum(as_table(found)["dead_letters"].values()) == 5 * len(OWNED), as_text(found)
    print(as_text(found))


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
    told = Told(RUN, genuine)
    two_outcomes(told)
    planted = told.records[-1]
    stranger = Producer({"bootstrap.servers": broker})
    stranger.produce(planted.topic, planted.value, key=planted.key, partition=planted.partition, headers=list(planted.headers))
    assert stranger.flush(30) == 0
    del stranger
    status, said = command(capsys, RUN, "--bootstrap", broker, "--json")
    assert status == 1, said
    table = json.loads(said)
    assert {check["check"]: len(check["violations"]) for check in table["checks"] if check["violations"]} == {"one-outcome": 1}
    assert table["summary"].startswith("audit: 1 violation, ")
