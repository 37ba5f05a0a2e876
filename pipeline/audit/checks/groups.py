"""Checks on how groups end.

The rule: an outcome is judged against the prompt and the samples in the log, not against its own fields.
"""

from collections.abc import Iterator
from functools import partial

from penstock.pipeline.audit.check import Check, Violation
from penstock.pipeline.audit.facts import INCOMPLETE, Facts
from penstock.pipeline.audit.rules import DROPS

WITH_SAMPLES = frozenset({"scored", "filtered"})


def one_outcome(facts: Facts) -> Iterator[Violation]:
    """A group has one outcome, complete with all its parts; identical repetitions are duplicates."""
    first = facts.first_outcomes()
    for outcome in facts.outcomes:
        other = first[outcome.group]
        if outcome is not other:
            same = "the same outcome" if outcome.sha256 == other.sha256 else f"another outcome, {other.outcome}"
            yield Violation(text=f"group {outcome.group} has {same} at {other.where}", group=outcome.group, where=outcome.where)
    named = {letter.about for letter in facts.letters}
    for record in facts.unusable:
        if record.kind == INCOMPLETE and record.where not in named and record.group not in first:
            yield Violation(text=record.reason, group=record.group, where=record.where)


def place(facts: Facts) -> Iterator[Violation]:
    """An outcome is in its prompt's partition and repeats the prompt's fields."""
    admitted = facts.first_prompts()
    for outcome in facts.outcomes:
        prompt = admitted.get(outcome.group)
        if prompt is None:
            continue  # the check one-fate reports it
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        if prompt.where.partition != outcome.where.partition:
            yield violation(text=f"its prompt stands at {prompt.where}, in another partition")
        if prompt.prompt_hash != outcome.prompt_hash:
            yield violation(text=f"prompt, slot, version or row differ from the prompt at {prompt.where}")


def samples(facts: Facts) -> Iterator[Violation]:
    """An outcome holds the first K samples in `rollouts`, each as its first record; a failed or abandoned group holds none."""
    first, admitted, count = facts.first_samples(), facts.first_prompts(), facts.terms.samples_per_prompt
    drawn_of = _drawn(facts) if facts.terms.oversample else {}
    for outcome in facts.outcomes:
        violation = partial(Violation, group=outcome.group, where=outcome.where)
        prompt = admitted.get(outcome.group)
        partition = prompt.where.partition if prompt else outcome.where.partition
        numbers = [number for number, _ in outcome.samples]
        drawn_first = drawn_of.get((partition, outcome.group), [])[:count]
        wanted = (sorted(drawn_first) if len(drawn_first) == count else list(range(count))) if outcome.outcome in WITH_SAMPLES else []
        if numbers != wanted:
            yield violation(text=f"{outcome.outcome} with samples {numbers}, not {wanted}")
        for number, body in outcome.samples:
            drawn = first.get((partition, outcome.group, number))
            if drawn is None:
                yield violation(text=f"sample {number} stands nowhere in rollouts/{partition}")
            elif drawn.body != body:
                yield violation(text=f"sample {number} differs from its first record at {drawn.where}")


def _drawn(facts: Facts) -> dict[tuple[int, int], list[int]]:
    """(partition, group) -> the numbers of its samples, in the order of `rollouts`."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for (partition, group, number), _ in sorted(facts.first_samples().items(), key=lambda item: item[1].where.offset):
        numbers.setdefault((partition, group), []).append(number)
    return numbers


def one_fate(facts: Facts) -> Iterator[Violation]:
    """Each admitted group is trained, filtered, stale, failed, abandoned or unused, and no other group has a fate."""
    admitted, outcomes, trained, stale = facts.first_prompts(), facts.first_outcomes(), facts.trained(), facts.stale()
    for group in sorted({*admitted, *outcomes, *trained, *stale}):
        outcome = outcomes.get(group)
        where = outcome.where if outcome else None
        fates = [f"trained in step {trained[group]}"] if group in trained else []
        fates += [f"stale in ledger entry {stale[group]}"] if group in stale else []
        fates += [outcome.outcome] if outcome and outcome.outcome in DROPS else []
        if group not in admitted:
            fate = ", ".join(fates) or (outcome.outcome if outcome else "")
            yield Violation(text=f"was never admitted and is {fate}", group=group, step=trained.get(group), where=where)
        elif len(fates) > 1:
            yield Violation(text=f"has {len(fates)} fates: {', '.join(fates)}", group=group, step=trained.get(group), where=where)
        elif fates and outcome is None:
            yield Violation(text=f"is {fates[0]} without an outcome in groups", group=group, step=trained.get(group))


def fates(facts: Facts) -> dict[str, int]:
    """Fate -> number of admitted groups; those without a fate are `unused` once the run is closed and `open` before."""
    outcomes, trained, stale = facts.first_outcomes(), facts.trained(), facts.stale()
    undecided = "open" if facts.closed is None else "unused"
    counts = dict.fromkeys(("trained", "filtered", "stale", "failed", "abandoned", undecided), 0)
    for group in facts.first_prompts():
        outcome = outcomes.get(group)
        dropped = outcome.outcome if outcome and outcome.outcome in DROPS else undecided
        counts["trained" if group in trained else "stale" if group in stale else dropped] += 1
    return counts


CHECKS = (
    Check(
        name="one-outcome",
        promise="one outcome a group, all parts of it",
        counts="outcomes",
        examined=lambda facts: len(facts.outcomes),
        rule=one_outcome,
    ),
    Check(
        name="group-place",
        promise="an outcome stands in its prompt's partition and repeats the prompt",
        counts="outcomes",
        examined=lambda facts: len(facts.outcomes),
        rule=place,
    ),
    Check(
        name="group-samples",
        promise="an outcome holds the first K samples as they were first drawn",
        counts="samples",
        examined=lambda facts: sum(len(outcome.samples) for outcome in facts.outcomes),
        rule=samples,
    ),
    Check(
        name="one-fate",
        promise="every admitted group has exactly one fate",
        counts="groups",
        examined=lambda facts: len(facts.first_prompts()),
        rule=one_fate,
    ),
)
