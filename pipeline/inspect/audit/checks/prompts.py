"""Checks on the admission of prompts and on sample versions. Times are compared only if they are from one machine's clock."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain

from penstock.pipeline.inspect.audit.check import PROMPTS, SAMPLES, Violation, check
from penstock.pipeline.inspect.audit.facts import DROPPED, Facts
from penstock.topics.wire.record import RecordId


@check("prompt-numbers", "groups are numbered without gap, one prompt each", prompts="SELECT count(*) FROM prompts")
def numbers(facts: Facts) -> Iterator[Violation]:
    again = """
        SELECT group_id, p.partition, p.offset, l.partition, l.offset FROM prompts p JOIN lifecycles l USING (group_id)
        WHERE (p.partition, p.offset) != (l.partition, l.offset) ORDER BY p.rowid
    """
    for group, *where, partition, offset in facts.rows(again):
        text = f"group {group} has another prompt at {RecordId('prompts', partition, offset)}"
        yield Violation(text=text, group=group, where=RecordId("prompts", *where))
    # In an active run, partitions were read up to different times; a group with an outcome was admitted well before.
    last = facts.value(f"SELECT coalesce(max(group_id), -1) FROM {'outcomes' if facts.closed is None else 'prompts'}")
    low = min(facts.prompts_below, last + 1)
    retained = facts.rows("SELECT group_id FROM lifecycles WHERE slot IS NOT NULL AND group_id >= ? ORDER BY group_id", low)
    missing = next(number for number, (group,) in enumerate(chain(retained, [(None,)]), start=low) if number != group)
    if missing < last:
        yield Violation(text=f"group {missing} has no prompt, although group {last} was admitted", group=missing)


@check("prompt-arithmetic", "slot, oldest version and K follow from the schedule", prompts=PROMPTS)
def arithmetic(facts: Facts) -> Iterator[Violation]:
    """Yield prompts with a wrong slot, oldest version or K. A slot is the group's number minus the groups dropped before its admission."""
    terms, before, droppable = facts.terms, 0, 0
    query = f"""
        SELECT group_id, partition, offset, slot, min_version, samples, {DROPPED} OR stale IS NOT NULL, outcome FROM lifecycles
        WHERE admitted ORDER BY group_id
    """
    for group, partition, offset, slot, min_version, samples, may_be_dropped, outcome in facts.rows(query):
        if slot is None or terms.regraded_from(group):  # slots of regraded groups follow from drops in the parent run
            droppable += may_be_dropped
            continue
        counted = group - slot
        violation = partial(Violation, group=group, where=RecordId("prompts", partition, offset))
        # In an active run, drops may follow after the offsets that were read; a group with an outcome was admitted well before.
        if counted > droppable and (facts.closed is not None or outcome):
            yield violation(text=f"slot {slot} implies {counted} dropped groups, but at most {droppable} were dropped")
        elif counted < before:
            yield violation(text=f"slot {slot} implies {counted} dropped groups, but an earlier prompt implies {before}")
        else:
            before = counted
        droppable += may_be_dropped
        # An extra group may start under the newest version before the version of its slot is published.
        least, oldest = max(0, terms.needed_version(slot)), terms.min_version(slot)
        if not least <= min_version <= oldest:
            yield violation(text=f"oldest version {min_version}, expected {oldest} for slot {slot}")
        if samples != terms.samples_per_prompt:
            yield violation(text=f"the prompt requests {samples} samples, the configuration has {terms.samples_per_prompt}")


@check("backpressure", "no prompt before the version that admits it", prompts=PROMPTS)
def backpressure(facts: Facts) -> Iterator[Violation]:
    """Yield prompts admitted before the version that admits them, or beyond the slots that the run's steps need."""
    terms, published = facts.terms, {fact.manifest.version: fact.manifest.created_ns for fact in reversed(facts.manifests)}
    needed_slots, comparable = terms.steps * terms.prompts_per_step + terms.oversample_groups, one_clock(facts)
    query = "SELECT group_id, slot, created_ns, partition, offset FROM lifecycles WHERE slot IS NOT NULL ORDER BY group_id"
    for group, slot, created_ns, *where in facts.rows(query):
        if terms.regraded_from(group):
            continue
        violation = partial(Violation, group=group, where=RecordId("prompts", *where))
        needed = terms.needed_version(slot)
        if slot >= needed_slots:
            yield violation(text=f"slot {slot} is beyond the {needed_slots} slots that the run's steps need")
        elif needed >= 0 and needed not in published:
            if needed >= facts.versions_below:
                yield violation(text=f"slot {slot} was admitted, but version {needed}, which admits it, was never published")
        elif needed >= 0 and comparable and created_ns < published[needed]:
            early = (published[needed] - created_ns) / 1e9
            text = f"slot {slot} was admitted {early:.3f} s before version {needed}, which admits it, was published"
            yield violation(text=text, version=needed)


def one_clock(facts: Facts) -> bool:
    """True if feeder and trainer ran on one machine, so that their times can be compared."""
    if facts.truncated("metrics"):
        return False  # measurements of other workers may have been deleted
    hosts = {role: {worker.host for worker in facts.workers.values() if worker.role == role} for role in ("feeder", "trainer")}
    return len(hosts["feeder"]) == 1 and hosts["feeder"] == hosts["trainer"] and None not in hosts["feeder"]


@check("sample-versions", "samples come from versions that exist and their prompt allows", samples=SAMPLES)
def versions(facts: Facts) -> Iterator[Violation]:
    published = facts.first_manifests().keys()
    # Sorted: first records by group, then records in a wrong partition, repetitions, poison records.
    query = """
        SELECT group_id, s.partition, s.offset, sample, s.version_min, version_max, l.min_version
        FROM samples s LEFT JOIN lifecycles l USING (group_id)
        WHERE s.version_min < l.min_version OR s.version_min NOT IN (SELECT value FROM json_each(:published))
            OR version_max NOT IN (SELECT value FROM json_each(:published))
        ORDER BY CASE kind WHEN 'first' THEN s.partition IS NOT l.partition WHEN 'again' THEN 2 ELSE 3 END,
            CASE WHEN kind = 'first' AND s.partition = l.partition THEN group_id END,
            CASE WHEN kind = 'first' AND s.partition = l.partition THEN sample END, s.rowid
    """
    for group, partition, offset, sample, version_min, version_max, oldest in facts.rows(query, published=json.dumps(sorted(published))):
        if facts.terms.regraded_from(group):
            continue  # the parent run generated the samples, under its own versions
        violation = partial(Violation, group=group, where=RecordId("rollouts", partition, offset))
        if oldest is not None and version_min < oldest:
            text = f"sample {sample} was generated under version {version_min}, the prompt requires {oldest} or later"
            yield violation(text=text, version=version_min)
        for version in {version_min, version_max} - published:
            if version >= facts.versions_below:
                text = f"sample {sample} was generated under version {version}, which was never published"
                yield violation(text=text, version=version)


CHECKS = (numbers, arithmetic, backpressure, versions)
