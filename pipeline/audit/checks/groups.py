"""Checks on how groups end.

The rule: an outcome is judged against the prompt and the samples in the log, not against its own fields.
"""

import heapq
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from penstock.pipeline.audit.check import Violation, check
from penstock.pipeline.audit.checks.gone import Gone
from penstock.pipeline.audit.facts import INCOMPLETE, Facts
from penstock.pipeline.audit.kept.groups import OutcomeFact
from penstock.pipeline.audit.rules import DROPS

WITH_SAMPLES = frozenset({"scored", "filtered"})


@check("one-outcome", "one outcome a group, all parts of it", outcomes=lambda facts: len(facts.outcomes))
def one_outcome(facts: Facts) -> Iterator[Violation]:
    """A group has one outcome, complete with all its parts; identical repetitions are duplicates."""
    first = facts.outcomes.first
    for outcome in facts.outcomes.later():
        other = first[outcome.group]
        same = "the same outcome" if outcome.sha256 == other.sha256 else f"another outcome, {other.outcome}"
        yield Violation(text=f"group {outcome.group} has {same} at {other.where}", group=outcome.group, where=outcome.where)
    named = {letter.about for letter in facts.letters}
    for record in facts.unusable:
        if record.kind == INCOMPLETE and record.where not in named and record.group not in first:
            yield Violation(text=record.reason, group=record.group, where=record.where)


@check("group-place", "an outcome stands in its prompt's partition and repeats the prompt", outcomes=lambda facts: len(facts.outcomes))
def place(facts: Facts) -> Iterator[Violation]:
    """An outcome is in its prompt's partition and repeats the prompt's fields."""
    admitted = facts.prompts.first
    for outcome in facts.outcomes:
        prompt = admitted.get(outcome.group)
        if prompt is None:
            continue  # the check one-fate reports it
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        if prompt.where.partition != outcome.where.partition:
            yield violation(text=f"its prompt stands at {prompt.where}, in another partition")
        if prompt.prompt_hash != outcome.prompt_hash:
            yield violation(text=f"prompt, slot, version or row differ from the prompt at {prompt.where}")


@check(
    "group-samples",
    "an outcome holds the first K samples as they were first drawn",
    samples=lambda facts: sum(len(outcome.samples.numbers) for outcome in facts.outcomes),
)
def samples(facts: Facts) -> Iterator[Violation]:
    """An outcome holds the first K samples in `rollouts`, each as its first record; a failed or abandoned group holds none."""
    admitted, gone = facts.prompts.first, Gone(facts)
    for outcome in facts.outcomes:
        numbers, absent, differing = outcome.samples
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        prompt = admitted.get(outcome.group)
        partition = prompt.where.partition if prompt else outcome.where.partition
        unknown = gone.samples(partition, outcome.group)
        if list(numbers) != (wanted := _wanted(facts, outcome, partition, unknown=unknown)):
            yield violation(text=f"{outcome.outcome} with samples {list(numbers)}, not {wanted}")
        if unknown:
            continue  # the first record of each may be gone
        for number in absent:
            yield violation(text=f"sample {number} stands nowhere in rollouts/{partition}")
        for number in differing:
            drawn = facts.samples.first(partition, outcome.group, number)
            assert drawn is not None
            yield violation(text=f"sample {number} differs from its first record at {drawn.where}")


def _wanted(facts: Facts, outcome: OutcomeFact, partition: int, *, unknown: bool) -> list[int]:
    """The numbers of the samples that an outcome has to hold; any K of those begun, where it is `unknown` which came first."""
    count, numbers = facts.terms.samples_per_prompt, outcome.samples.numbers
    if outcome.outcome not in WITH_SAMPLES:
        return []
    if unknown and facts.terms.oversample and len(set(numbers)) == len(numbers) == count:
        return list(numbers)
    drawn = facts.samples.of_group(partition, outcome.group)[:count] if facts.terms.oversample else []
    return sorted(fact.sample for fact in drawn) if len(drawn) == count else list(range(count))


@check("one-fate", "every admitted group has exactly one fate", groups=lambda facts: len(facts.prompts.first))
def one_fate(facts: Facts) -> Iterator[Violation]:
    """Each admitted group is trained, filtered, stale, failed, abandoned or unused, and no other group has a fate."""
    admitted, outcomes, trained, stale = facts.prompts.first, facts.outcomes.first, facts.planned.first, facts.stale()
    gone = Gone(facts)
    for group, _ in groupby(heapq.merge(admitted, outcomes, trained, sorted(stale))):
        outcome = outcomes.get(group)
        where = outcome.where if outcome else None
        step = planned.step if (planned := trained.get(group)) else None
        fates = [f"trained in step {step}"] if step is not None else []
        fates += [f"stale in ledger entry {stale[group]}"] if group in stale else []
        fates += [outcome.outcome] if outcome and outcome.outcome in DROPS else []
        if group not in admitted and not gone.prompt(group):
            fate = ", ".join(fates) or (outcome.outcome if outcome else "")
            yield Violation(text=f"was never admitted and is {fate}", group=group, step=step, where=where)
        elif len(fates) > 1:
            yield Violation(text=f"has {len(fates)} fates: {', '.join(fates)}", group=group, step=step, where=where)
        elif fates and outcome is None and not gone.outcome(group):
            yield Violation(text=f"is {fates[0]} without an outcome in groups", group=group, step=step)


def fates(facts: Facts) -> dict[str, int]:
    """Fate -> number of admitted groups; those without a fate are `unused` once the run is closed and `open` before.

    `gone` are those whose fate may have been deleted.
    """
    outcomes, trained, stale, gone = facts.outcomes.first, facts.planned.first, facts.stale(), Gone(facts)
    include_open = "open" if facts.closed is None else "unused"
    counts = dict.fromkeys(("trained", "filtered", "stale", "failed", "abandoned", include_open), 0)
    for group in (*facts.prompts.first, *gone.groups()):
        outcome = outcomes.get(group)
        open_or_gone = "gone" if gone.drop(group) else include_open
        dropped = outcome.outcome if outcome and outcome.outcome in DROPS else open_or_gone
        fate = "trained" if group in trained else "stale" if group in stale else dropped
        counts[fate] = counts.get(fate, 0) + 1
    return counts


CHECKS = (one_outcome, place, samples, one_fate)
