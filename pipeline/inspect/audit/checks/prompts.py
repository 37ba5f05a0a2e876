"""Checks on admission and on sample versions. Clocks are compared on one machine only."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain

from penstock.pipeline.inspect.audit.check import PROMPTS, SAMPLES, Violation, check
from penstock.pipeline.inspect.audit.facts import DROPPED, Facts
from penstock.topics.wire.record import RecordId


@check("prompt-numbers", "groups are numbered without gap, one prompt each", prompts="SELECT count(*) FROM prompts")
def numbers(facts: Facts) -> Iterator[Violation]:
    """Admitted groups are numbered without gaps, and each has one prompt."""
    again = """
        SELECT group_id, p.partition, p.offset, l.partition, l.offset FROM prompts p JOIN lifecycles l USING (group_id)
        WHERE (p.partition, p.offset) != (l.partition, l.offset) ORDER BY p.rowid
    """
    for group, *where, partition, offset in facts.rows(again):
        text = f"group {group} has another prompt at {RecordId('prompts', partition, offset)}"
        yield Violation(text=text, group=group, where=RecordId("prompts", *where))
    # While the run is active, partitions end at different times: a group with an outcome was admitted well before.
    last = facts.value(f"SELECT coalesce(max(group_id), -1) FROM {'outcomes' if facts.closed is None else 'prompts'}")
    low = min(facts.prompts_below, last + 1)
    retained = facts.rows("SELECT group_id FROM lifecycles WHERE slot IS NOT NULL AND group_id >= ? ORDER BY group_id", low)
    missing = next(number for number, (group,) in enumerate(chain(retained, [(None,)]), start=low) if number != group)
    if missing < last:
        yield Violation(text=f"no prompt of group {missing}, although group {last} was admitted", group=missing)


@check("prompt-arithmetic", "slot, oldest version and K follow from the schedule", prompts=PROMPTS)
def arithmetic(facts: Facts) -> Iterator[Violation]:
    """Slot and oldest version follow from the groups dropped so far, K from the configuration."""
    terms, before, droppable = facts.terms, 0, 0
    query = f"""
        SELECT group_id, partition, offset, slot, min_version, samples, {DROPPED} OR stale IS NOT NULL, outcome FROM lifecycles
        WHERE admitted ORDER BY group_id
    """
    for group, partition, offset, slot, min_version, samples, may_be_dropped, outcome in facts.rows(query):
        if slot is None or terms.regraded_from(group):  # the parent counted its own drops
            droppable += may_be_dropped
            continue
        counted = group - slot
        violation = partial(Violation, group=group, where=RecordId("prompts", partition, offset))
        # While the run is active, drops may be after the ends that were read: a group with an outcome was admitted well before.
        if counted > droppable and (facts.closed is not None or outcome):
            yield violation(text=f"slot {slot} counts {counted} dropped groups, at most {droppable} were")
        elif counted < before:
            yield violation(text=f"slot {slot} counts {counted} dropped groups, an earlier prompt counted {before}")
        else:
            before = counted
        droppable += may_be_dropped
        # An extra group starts under the newest version, if that of its slot is not published.
        least, oldest = max(0, terms.needed_version(slot)), terms.min_version(slot)
        if not least <= min_version <= oldest:
            yield violation(text=f"oldest version {min_version}, expected {oldest} for slot {slot}")
        if samples != terms.samples_per_prompt:
            yield violation(text=f"{samples} samples requested, the run has {terms.samples_per_prompt}")


@check("backpressure", "no prompt before the version that admits it", prompts=PROMPTS)
def backpressure(facts: Facts) -> Iterator[Violation]:
    """No prompt is admitted before the version that admits its slot, and none beyond the slots of the run's steps."""
    terms, published = facts.terms, facts.published_ns()
    needed_slots, comparable = terms.steps * terms.prompts_per_step + terms.oversample_groups, one_clock(facts)
    query = "SELECT group_id, slot, created_ns, partition, offset FROM lifecycles WHERE slot IS NOT NULL ORDER BY group_id"
    for group, slot, created_ns, *where in facts.rows(query):
        if terms.regraded_from(group):
            continue
        violation = partial(Violation, group=group, where=RecordId("prompts", *where))
        needed = terms.needed_version(slot)
        if slot >= needed_slots:
            yield violation(text=f"slot {slot}, the run's steps need {needed_slots} groups")
        elif needed >= 0 and needed not in published:
            if needed >= facts.versions_below:
                yield violation(text=f"admitted for slot {slot} of version {needed}, which was never published")
        elif needed >= 0 and comparable and created_ns < published[needed]:
            early = (published[needed] - created_ns) / 1e9
            text = f"admitted {early:.3f} s before version {needed} was written, which admits slot {slot}"
            yield violation(text=text, version=needed)


def one_clock(facts: Facts) -> bool:
    """True if feeder and trainer ran on one machine, so that their times can be compared."""
    if facts.truncated("metrics"):
        return False  # measurements of other workers may have been deleted
    hosts = {role: {worker.host for worker in facts.workers.values() if worker.role == role} for role in ("feeder", "trainer")}
    return len(hosts["feeder"]) == 1 and hosts["feeder"] == hosts["trainer"] and None not in hosts["feeder"]


@check("sample-versions", "samples come from versions that exist and their prompt allows", samples=SAMPLES)
def versions(facts: Facts) -> Iterator[Violation]:
    """Samples are generated under versions that exist and that their prompt allows."""
    published = facts.first_manifests().keys()
    # First records by group, then those in a foreign partition, repetitions and poison records.
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
            continue  # the versions are those of the parent
        violation = partial(Violation, group=group, where=RecordId("rollouts", partition, offset))
        if oldest is not None and version_min < oldest:
            text = f"sample {sample} generated under version {version_min}, its prompt allows {oldest} and later"
            yield violation(text=text, version=version_min)
        for version in {version_min, version_max} - published:
            if version >= facts.versions_below:
                yield violation(text=f"sample {sample} generated under version {version}, which was never published", version=version)


CHECKS = (numbers, arithmetic, backpressure, versions)
