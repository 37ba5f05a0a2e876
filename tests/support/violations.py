"""Violations to plant into a genuine run's records, one each, with the checks that have to report them."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.topics import rollouts
from penstock.topics.ledger import Entry
from penstock.topics.rollouts import Turn
from tests.support.a_run import with_group
from tests.support.edited_run import EditedRun, with_sample

U, K, S, STEPS = 2, 2, 2, 6
RUN = "audited-run"
FOREIGN = ("prompts", "rollouts", "groups", "weights", "ledger", "metrics", "dead-letters")
MS = 1_000_000


def first_in(built: EditedRun, round_number: int) -> int:
    """A trained group of a round."""
    return next(group for group in built.trained() if built.one("prompts", group=group)[1].slot >= round_number * U * S)


def filtered(built: EditedRun, *, from_round: int = 0) -> int:
    return built.ended("filtered", from_round=from_round, round_groups=U * S)


def another(built: EditedRun, *, beyond: int = 0) -> int:
    """Admit one more group in a run that was to go on for two steps more; returns its number."""
    built.registered("info", steps=STEPS + 2)
    count = len(built.all("prompts"))
    dropped = count - U * STEPS
    index, last = built.one("prompts", group=count - 1)
    slot = count + beyond - dropped
    made = {"group": count + beyond, "slot": slot, "min_version": slot // (U * S), "created_ns": last.created_ns + 10**12}
    built.append(index, replace(last, **made))
    return count + beyond


def outcome_of(built: EditedRun, number: int, *, like: str) -> tuple[int, Any]:
    """An outcome for a group that has none, as another group's: its index is where that one stands."""
    index, held = built.one("groups", outcome=like)
    prompt = built.one("prompts", group=number)[1]
    facts = {name: getattr(prompt, name) for name in ("group", "slot", "min_version", "samples_per_prompt", "epoch", "row", "created_ns")}
    samples = tuple(replace(sample, rollout=replace(sample.rollout, group=number)) for sample in held.samples)
    texts = {"prompt": prompt.prompt, "prompt_ids": prompt.token_ids, "columns": prompt.columns}
    return index, replace(held, **facts, **texts, samples=samples)


def a_gap_in_the_numbers(built: EditedRun) -> None:
    another(built, beyond=1)


def a_second_prompt(built: EditedRun) -> None:
    index, held = built.one("prompts", group=0)
    built.append(index, replace(held, row=held.row + 1))


def a_prompt_copied_into_another_partition(built: EditedRun) -> None:
    index, held = built.one("prompts", group=0)
    built.append(index, held, partition=(built.records[index].partition + 1) % 4)


def a_slot_beyond_its_number(built: EditedRun) -> None:
    built.prompt(0, slot=1)


def a_slot_that_counts_drops_that_were_not(built: EditedRun) -> None:
    group = first_in(built, 1)
    slot = built.one("prompts", group=group)[1].slot
    dropped = sum(held.outcome == "filtered" and held.group < group for _, held in built.all("groups"))
    low = group - dropped - 1
    assert low < slot
    built.prompt(group, slot=low, min_version=low // (U * S))


def an_oldest_version_that_is_too_old(built: EditedRun) -> None:
    built.prompt(first_in(built, 1), min_version=0)


def a_prompt_for_more_samples(built: EditedRun) -> None:
    built.prompt(0, samples_per_prompt=K + 1)


def admission_before_its_version(built: EditedRun) -> None:
    manifest = built.one("manifests", version=1)[1]
    built.prompt(first_in(built, 1), created_ns=manifest.created_ns - MS)


def admission_beyond_the_run(built: EditedRun) -> None:
    another(built)
    built.registered("info", steps=STEPS)


def a_sample_of_older_weights(built: EditedRun) -> None:
    built.sample(filtered(built, from_round=1), 0, span_versions=np.array([0], np.int32))


def a_sample_of_weights_that_never_were(built: EditedRun) -> None:
    built.sample(filtered(built), 0, span_versions=np.array([9], np.int32))


def two_outcomes(built: EditedRun) -> None:
    index, held = built.one("groups", outcome="filtered")
    built.append(index, replace(held, reason="on second thoughts"))


def a_part_without_the_other(built: EditedRun) -> None:
    index, held = outcome_of(built, another(built), like="scored")
    built.append(index, held)
    built.records[-1], _ = with_group(built.records[-1], held, run=RUN, max_bytes=1)


def an_outcome_in_another_partition(built: EditedRun) -> None:
    index, held = built.one("groups", outcome="filtered")
    partition = built.records[index].partition
    del built.records[index]
    like = built.one("groups", outcome="scored")[0]
    built.append(like, held, partition=(partition + 1) % 4)


def an_outcome_of_another_row(built: EditedRun) -> None:
    built.group(first_in(built, 0), lambda held: replace(held, row=held.row + 1))


def a_token_that_was_not_drawn(built: EditedRun) -> None:
    def change(held: Any) -> Any:
        tokens = held.samples[1].rollout.token_ids.copy()
        tokens[0] += 1
        return with_sample(held, 1, token_ids=tokens)

    built.group(first_in(built, 1), change)


def a_logprob_that_was_not_drawn(built: EditedRun) -> None:
    def change(held: Any) -> Any:
        logprobs = held.samples[0].rollout.behaviour_logprobs.copy()
        logprobs[-1] = np.nextafter(logprobs[-1], np.float32(0))
        return with_sample(held, 0, behaviour_logprobs=logprobs)

    built.group(first_in(built, 0), change)


def a_sample_too_few(built: EditedRun) -> None:
    built.group(first_in(built, 1), lambda held: replace(held, samples=held.samples[:-1]))


def the_second_record_of_a_sample(built: EditedRun) -> None:
    group = first_in(built, 0)
    index, held = built.one("rollouts", group=group, sample=0)
    built.append(index, held)  # what was first is second now
    built.put(index, replace(held, started_ns=held.started_ns - 1))


def a_sample_from_nowhere(built: EditedRun) -> None:
    built.drop("rollouts", group=first_in(built, 0), sample=1)


def a_record_that_lists_a_sample_it_has_not(built: EditedRun) -> None:
    group = first_in(built, 0)
    (index, held), listed = (built.one("rollouts", group=group, sample=number) for number in range(K))
    value = rollouts.encode(held)
    headers = rollouts.headers(held, listed[1], run=RUN).encode(value)
    built.records[index] = replace(built.records[index], headers=headers, value=value)


def stale_and_filtered(built: EditedRun) -> None:
    group = filtered(built)
    built.ledger(lambda entries: entries.insert(-1, Entry(seq=0, kind="stale", time_ns=1, step=STEPS - 1, groups=(group,))))


def trained_and_filtered(built: EditedRun) -> None:
    built.group(first_in(built, 1), lambda held: replace(held, outcome="filtered", reason="why not"))


def an_outcome_of_nobody(built: EditedRun) -> None:
    index, held = built.one("groups", outcome="filtered")
    built.append(index, replace(held, group=10**12, outcome="failed", samples=()))


def a_gap_in_the_ledger(built: EditedRun) -> None:
    built.alter("ledger", where={"kind": "run-closed"}, change=lambda entry: replace(entry, seq=entry.seq + 1))


def a_number_twice_in_the_ledger(built: EditedRun) -> None:
    index = built.one("ledger", kind="run-opened")[0]
    last = built.all("ledger")[-1][1]
    closed = built.one("ledger", kind="run-closed")[0]
    built.put(closed, Entry(seq=last.seq, kind="stale", time_ns=1))
    built.append(index, last)


def a_story_that_goes_on_after_its_end(built: EditedRun) -> None:
    built.ledger(lambda entries: entries.append(Entry(seq=0, kind="stale", time_ns=1)))


def a_story_without_a_beginning(built: EditedRun) -> None:
    built.ledger(lambda entries: entries.pop(0))


def an_end_that_only_the_register_knows(built: EditedRun) -> None:
    built.drop("ledger", kind="run-closed")


def a_ledger_that_lost_its_end(built: EditedRun) -> None:
    measured = [held for _, held in built.all("metrics") if held.role == "trainer" and held.values.get("step") == STEPS]
    index = built.one("metrics", role="trainer", seq=measured[-1].seq)[0]
    built.put(index, replace(measured[-1], values={**measured[-1].values, "step": STEPS + 2.0}))


def an_entry_that_the_next_does_not_follow(built: EditedRun) -> None:
    index, held = built.one("ledger", kind="step", step=2)
    built.rewrite(index, replace(held, time_ns=held.time_ns + 1))


def an_evaluation_with_another_result(built: EditedRun) -> None:
    index, held = built.one("metrics", role="tracker")
    built.append(index, replace(held, worker="evaluator", role="evaluator", incarnation="e", seq=0, kind="eval", version=1))
    listed = {"evaluations": {"0" * 64: 1}}
    built.alter(
        "ledger", lambda entry: replace(entry, details=json.dumps({**json.loads(entry.details), **listed})), where={"kind": "run-closed"}
    )


def another_schedule_than_agreed(built: EditedRun) -> None:
    built.registered("schedule", max_drops_per_step=9)


def altered_step(number: int, **fields: Any) -> Callable[[EditedRun], None]:
    def plant(built: EditedRun) -> None:
        built.alter("ledger", where={"kind": "step", "step": number}, **fields)

    return plant


def a_step_that_trained_too_little(built: EditedRun) -> None:
    built.alter("ledger", lambda entry: replace(entry, plan=entry.plan[:-1]), where={"kind": "step", "step": STEPS - 1})


def closed_after_another_step(built: EditedRun) -> None:
    built.alter("ledger", where={"kind": "run-closed"}, step=STEPS - 1)


def trained_twice(built: EditedRun) -> None:
    again = built.one("ledger", kind="step", step=STEPS - 2)[1].plan[0]
    built.alter("ledger", lambda entry: replace(entry, plan=(entry.plan[0], again)), where={"kind": "step", "step": STEPS - 1})


def trained_in_another_order(built: EditedRun) -> None:
    built.alter("ledger", lambda entry: replace(entry, plan=entry.plan[::-1]), where={"kind": "step", "step": 2})


def planned(step: int, **fields: Any) -> Callable[[EditedRun], None]:
    def plant(built: EditedRun) -> None:
        built.alter(
            "ledger",
            lambda entry: replace(entry, plan=(*entry.plan[:-1], replace(entry.plan[-1], **fields))),
            where={"kind": "step", "step": step},
        )

    return plant


def planned_where_nothing_lies(built: EditedRun) -> None:
    offset = built.one("ledger", kind="step", step=1)[1].plan[-1].offset
    planned(1, offset=offset + 1)(built)


def planned_where_another_lies(built: EditedRun) -> None:
    other = built.one("ledger", kind="step", step=0)[1].plan[0]
    planned(1, partition=other.partition, offset=other.offset)(built)


def trained_too_old(built: EditedRun) -> None:
    built.sample(first_in(built, 1), 1, span_versions=np.array([0], np.int32))


def stale_although_fresh(built: EditedRun) -> None:
    group = another(built)
    index, held = outcome_of(built, group, like="scored")
    version = held.min_version
    partition = built.records[built.one("prompts", group=group)[0]].partition
    span = np.array([version], np.int32)
    for sample in held.samples:
        rollout = replace(sample.rollout, span_versions=span)
        built.append(built.one("rollouts", sample=0)[0], rollout, partition=partition)
        held = with_sample(held, rollout.sample, span_versions=span)
    built.append(index, held, partition=partition)
    built.ledger(lambda entries: entries.insert(-1, Entry(seq=0, kind="stale", time_ns=1, step=version * S, groups=(group,))))


def two_manifests(built: EditedRun) -> None:
    index, held = built.one("manifests", version=1)
    built.append(index, replace(held, digest="0" * 64))


def a_version_without_manifest(built: EditedRun) -> None:
    built.drop("manifests", version=STEPS // S)


def a_version_without_entry(built: EditedRun) -> None:
    built.ledger(lambda entries: entries.remove(next(entry for entry in entries if entry.kind == "version" and entry.version == 1)))


def a_version_before_its_step(built: EditedRun) -> None:
    def change(entries: list[Entry]) -> None:
        at = next(i for i, entry in enumerate(entries) if entry.kind == "version" and entry.version == 1)
        entries[at - 1], entries[at] = entries[at], entries[at - 1]

    built.ledger(change)


def a_chunk_that_is_gone(built: EditedRun) -> None:
    built.drop("chunks", version=2, index=0)


def a_chunk_with_a_bit_turned(built: EditedRun) -> None:
    built.alter("chunks", lambda chunk: replace(chunk, data=flipped(chunk.data)), where={"version": 1})


def a_chunk_of_another_version(built: EditedRun) -> None:
    places = built.one("manifests", version=2)[1].chunk_offsets
    built.alter("manifests", where={"version": 1}, chunk_offsets=places)


def flipped(data: Any) -> bytes:
    return bytes([data[0] ^ 1]) + bytes(data[1:])


def weights_that_are_not_their_digest(built: EditedRun) -> None:
    import hashlib

    data = flipped(built.one("chunks", version=1, index=0)[1].data)
    built.alter("chunks", where={"version": 1, "index": 0}, data=data)
    built.alter(
        "manifests",
        lambda held: replace(held, chunk_sha256=(hashlib.sha256(data).hexdigest(), *held.chunk_sha256[1:])),
        where={"version": 1},
    )


def a_digest_that_only_the_ledger_knows(built: EditedRun) -> None:
    built.alter("ledger", where={"kind": "version", "version": 1}, digest="0" * 64)


def a_base_that_comes_later(built: EditedRun) -> None:
    built.alter("manifests", where={"version": 1}, base_version=2)


def a_step_that_ended_in_other_weights(built: EditedRun) -> None:
    built.alter("ledger", where={"kind": "step", "step": S - 1}, digest="e" * 64)


def a_closing_digest_of_other_weights(built: EditedRun) -> None:
    built.alter("ledger", where={"kind": "run-closed"}, digest=built.one("manifests", version=1)[1].digest)


def a_checkpoint_of_other_weights(built: EditedRun) -> None:
    at = Entry(seq=0, kind="checkpoint", time_ns=1, step=S, version=1, digest="f" * 64)
    built.ledger(lambda entries: entries.insert(-1, at))


def a_letter_about_nothing(built: EditedRun) -> None:
    index, held = built.all("dead-letters")[0]
    built.append(index, replace(held, offset=10_000))


def a_letter_with_other_bytes(built: EditedRun) -> None:
    index, held = built.all("dead-letters")[0]
    built.put(index, replace(held, value=b"hello?"))


def a_letter_sent_twice(built: EditedRun) -> None:
    index, held = built.all("dead-letters")[0]
    built.append(index, replace(held, time_ns=held.time_ns + 1))


def no_letter(topic: str) -> Callable[[EditedRun], None]:
    def plant(built: EditedRun) -> None:
        built.drop("dead-letters", topic=f"{RUN}.{topic}")

    return plant


def played(built: EditedRun, **fields: Any) -> None:
    group = first_in(built, 0)
    tokens = len(built.one("rollouts", group=group, sample=0)[1].token_ids)
    turns = (Turn(start=0, end=1, source="prompt"), Turn(start=1, end=tokens, source="model", finish="stop", reward=1.0))
    mask = np.arange(tokens) >= 1
    logprobs = np.where(mask, built.one("rollouts", group=group, sample=0)[1].behaviour_logprobs, np.float32("nan"))
    whole = {"turns": turns, "segments": ((0, tokens, 0),), "loss_mask": mask, "behaviour_logprobs": logprobs}
    built.sample(group, 0, **{**whole, **fields})


def a_trajectory_that_trains_what_was_said_to_it(built: EditedRun) -> None:
    rollout = built.one("rollouts", group=first_in(built, 0), sample=0)[1]
    played(built, loss_mask=rollout.loss_mask, behaviour_logprobs=rollout.behaviour_logprobs)


def a_trajectory_with_a_turn_left_out(built: EditedRun) -> None:
    tokens = len(built.one("rollouts", group=first_in(built, 0), sample=0)[1].token_ids)
    played(built, turns=(Turn(start=1, end=tokens, source="model"),))


def a_broken_environment_that_counts(built: EditedRun) -> None:
    tokens = len(built.one("rollouts", group=first_in(built, 0), sample=0)[1].token_ids)
    parts = (Turn(start=0, end=1, source="prompt"), Turn(start=1, end=tokens, source="model"))
    played(built, turns=(*parts, Turn(start=tokens, end=tokens, source="environment", finish="environment-step: x")), finish="abort")


def groups_of_a_parent_that_they_do_not_name(built: EditedRun) -> None:
    built.registered("info", regraded_from={"run": "another", "step": 0, "steps": 1, "groups": [[0, 0]]})


PLANTED: list[tuple[Callable[[EditedRun], None], set[str]]] = [
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
    (a_trajectory_that_trains_what_was_said_to_it, {"trajectory-turns"}),
    (a_trajectory_with_a_turn_left_out, {"trajectory-turns"}),
    (a_broken_environment_that_counts, {"broken-environments"}),
    (two_outcomes, {"one-outcome"}),
    (a_part_without_the_other, {"one-outcome"}),
    (an_outcome_in_another_partition, {"group-place"}),
    (an_outcome_of_another_row, {"group-place"}),
    (a_token_that_was_not_drawn, {"group-samples"}),
    (a_logprob_that_was_not_drawn, {"group-samples"}),
    (a_sample_too_few, {"group-samples"}),
    (the_second_record_of_a_sample, {"group-samples"}),
    (a_sample_from_nowhere, {"group-samples"}),
    (a_record_that_lists_a_sample_it_has_not, {"group-samples", "accounted"}),
    (stale_and_filtered, {"one-status"}),
    (trained_and_filtered, {"one-status"}),
    (an_outcome_of_nobody, {"one-status"}),
    (groups_of_a_parent_that_they_do_not_name, {"regraded"}),
    (a_gap_in_the_ledger, {"ledger-order"}),
    (a_number_twice_in_the_ledger, {"ledger-order"}),
    (a_story_that_goes_on_after_its_end, {"ledger-order"}),
    (a_story_without_a_beginning, {"ledger-order"}),
    (another_schedule_than_agreed, {"ledger-order"}),
    (an_end_that_only_the_register_knows, {"ledger-order"}),
    (a_ledger_that_lost_its_end, {"ledger-end"}),
    (an_entry_that_the_next_does_not_follow, {"ledger-chain"}),
    (an_evaluation_with_another_result, {"evaluations"}),
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
    (a_step_that_ended_in_other_weights, {"last-digests"}),
    (a_letter_about_nothing, {"letters"}),
    (a_letter_with_other_bytes, {"letters"}),
    (a_letter_sent_twice, {"letters-once"}),
    *[(no_letter(topic), {"accounted"}) for topic in FOREIGN if topic != "dead-letters"],
]
