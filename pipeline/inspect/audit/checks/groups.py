"""Checks on outcomes and on the final status of groups, against the prompts and samples in the log."""

import heapq
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.checks.retention import Retention
from penstock.pipeline.inspect.audit.facts import INCOMPLETE, Facts
from penstock.pipeline.inspect.audit.rules import DROPS
from penstock.pipeline.inspect.audit.store.groups import OutcomeFact

WITH_SAMPLES = frozenset({"scored", "filtered"})


@check("one-outcome", "one outcome a group, all parts of it", outcomes=lambda facts: len(facts.outcomes))
def one_outcome(facts: Facts) -> Iterator[Violation]:
    """A group has one outcome, complete with all its parts; identical repetitions are duplicates."""
    first = facts.outcomes.first
    for outcome in facts.outcomes.later():
        other = first[outcome.group]
        same = "the same outcome" if outcome.sha256 == other.sha256 else f"another outcome, {other.outcome}"
        yield Violation(text=f"group {outcome.group} has {same} at {other.where}", group=outcome.group, where=outcome.where)
    named = {fact.about for fact in facts.dead_letters}
    for record in facts.unusable:
        if record.kind == INCOMPLETE and record.where not in named and record.group not in first:
            yield Violation(text=record.reason, group=record.group, where=record.where)


@check("group-place", "an outcome is in its prompt's partition and repeats the prompt", outcomes=lambda facts: len(facts.outcomes))
def partition(facts: Facts) -> Iterator[Violation]:
    """An outcome is in its prompt's partition and repeats the prompt's fields."""
    admitted = facts.prompts.first
    for outcome in facts.outcomes:
        prompt = admitted.get(outcome.group)
        if prompt is None:
            continue  # the check one-fate reports it
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        if prompt.where.partition != outcome.where.partition:
            yield violation(text=f"its prompt is at {prompt.where}, in another partition")
        if prompt.prompt_hash != outcome.prompt_hash:
            yield violation(text=f"prompt, slot, version or row differ from the prompt at {prompt.where}")


@check(
    "group-samples",
    "an outcome holds the first K samples as first recorded",
    samples=lambda facts: sum(len(outcome.samples.numbers) for outcome in facts.outcomes),
)
def samples(facts: Facts) -> Iterator[Violation]:
    """An outcome holds the first K samples in `rollouts`, each as its first record; a failed or abandoned group holds none."""
    admitted, retention = facts.prompts.first, Retention(facts)
    for outcome in facts.outcomes:
        numbers, absent, differing = outcome.samples
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        prompt = admitted.get(outcome.group)
        partition = prompt.where.partition if prompt else outcome.where.partition
        unknown = retention.samples(partition, outcome.group)
        if list(numbers) != (expected := _expected(facts, outcome, partition, unknown=unknown)):
            yield violation(text=f"{outcome.outcome} with samples {list(numbers)}, not {expected}")
        if unknown:
            continue  # the first record of each may have been deleted
        for number in absent:
            yield violation(text=f"sample {number} is missing in rollouts/{partition}")
        for number in differing:
            first = facts.samples.first(partition, outcome.group, number)
            assert first is not None
            yield violation(text=f"sample {number} differs from its first record at {first.where}")


def _expected(facts: Facts, outcome: OutcomeFact, partition: int, *, unknown: bool) -> list[int]:
    """The numbers of the samples that an outcome has to hold; any K of the started ones if it is `unknown` which came first."""
    count, numbers = facts.terms.samples_per_prompt, outcome.samples.numbers
    if outcome.outcome not in WITH_SAMPLES:
        return []
    if unknown and facts.terms.oversample and len(set(numbers)) == len(numbers) == count:
        return list(numbers)
    firsts = facts.samples.of_group(partition, outcome.group)[:count] if facts.terms.oversample else []
    return sorted(fact.sample for fact in firsts) if len(firsts) == count else list(range(count))


@check("one-fate", "every admitted group has exactly one final status", groups=lambda facts: len(facts.prompts.first))
def one_status(facts: Facts) -> Iterator[Violation]:
    """Each admitted group is trained, filtered, stale, failed, abandoned or unused; no other group has a final status."""
    admitted, outcomes, trained, stale = facts.prompts.first, facts.outcomes.first, facts.planned.first, facts.stale()
    retention = Retention(facts)
    for group, _ in groupby(heapq.merge(admitted, outcomes, trained, sorted(stale))):
        outcome = outcomes.get(group)
        where = outcome.where if outcome else None
        step = planned.step if (planned := trained.get(group)) else None
        statuses = [f"trained in step {step}"] if step is not None else []
        statuses += [f"stale in ledger entry {stale[group]}"] if group in stale else []
        statuses += [outcome.outcome] if outcome and outcome.outcome in DROPS else []
        if group not in admitted and not retention.prompt(group):
            status = ", ".join(statuses) or (outcome.outcome if outcome else "")
            yield Violation(text=f"was never admitted and is {status}", group=group, step=step, where=where)
        elif len(statuses) > 1:
            yield Violation(text=f"has {len(statuses)} final statuses: {', '.join(statuses)}", group=group, step=step, where=where)
        elif statuses and outcome is None and not retention.outcome(group):
            yield Violation(text=f"is {statuses[0]} without an outcome in groups", group=group, step=step)


def group_statuses(facts: Facts) -> dict[str, int]:
    """Final status -> number of admitted groups; those without one are `unused` once the run is closed and `open` before.

    `gone`: the final status may have been deleted.
    """
    outcomes, trained, stale, retention = facts.outcomes.first, facts.planned.first, facts.stale(), Retention(facts)
    unfinished = "open" if facts.closed is None else "unused"
    counts = dict.fromkeys(("trained", "filtered", "stale", "failed", "abandoned", unfinished), 0)
    for group in (*facts.prompts.first, *retention.groups()):
        outcome = outcomes.get(group)
        otherwise = "gone" if retention.drop(group) else unfinished
        dropped = outcome.outcome if outcome and outcome.outcome in DROPS else otherwise
        status = "trained" if group in trained else "stale" if group in stale else dropped
        counts[status] = counts.get(status, 0) + 1
    return counts


CHECKS = (one_outcome, partition, samples, one_status)
