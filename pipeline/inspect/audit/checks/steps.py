"""Checks on the ledger's order, and on the plans of its steps."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.checks.retention import ANY, Retention
from penstock.pipeline.inspect.audit.facts import EntryFact, Facts
from penstock.pipeline.inspect.audit.rules import DROPS, as_object
from penstock.pipeline.inspect.audit.store.groups import OutcomeFact


def _planned(facts: Facts) -> int:
    return len(facts.planned)


@check("ledger-order", "entries without gap, run-opened first, run-closed last", entries=lambda facts: len(facts.entries))
def order(facts: Facts) -> Iterator[Violation]:
    """Entries are numbered without gaps or repetitions; run-opened comes first, run-closed last, each once."""
    for number, fact in enumerate(facts.entries):
        before = facts.entries[number - 1].entry.seq if number else -1
        entry = fact.entry
        if entry.seq != before + 1:
            yield Violation(text=f"entry {entry.seq} ({entry.kind}) follows entry {before}", step=entry.step, where=fact.where)
        if (entry.kind == "run-opened") != (number == 0):
            expected = "run-opened comes first and once" if number else "the first entry is not run-opened"
            yield Violation(text=f"{entry.kind} is entry {entry.seq}: {expected}", where=fact.where)
        if entry.kind == "run-closed" and number != len(facts.entries) - 1:
            yield Violation(text=f"run-closed is entry {entry.seq}, others follow", where=fact.where)
        if entry.kind == "run-opened" and facts.status is not None:
            config = as_object(entry.details).get("config", {})
            if config.get("schedule") != facts.schedule:
                yield Violation(text="run-opened and the register of runs disagree on the schedule", where=fact.where)
    if facts.closed is None and facts.status in ("finished", "failed") and facts.entries:
        text = f"the register of runs says {facts.status}, the ledger has no run-closed"
        yield Violation(text=text, where=facts.entries[-1].where)


@check("step-numbers", "steps 0 to n-1 once each, of U groups, under version floor(step / S)", steps=lambda facts: _kinds(facts)["step"])
def numbers(facts: Facts) -> Iterator[Violation]:
    """Steps are 0 to n - 1, each once, of U groups, under version floor(step / S)."""
    terms = facts.terms
    most = ANY if facts.truncated("rollouts") else facts.samples.most_sequences
    for number, fact in enumerate(facts.steps()):
        entry = fact.entry
        violation = partial(Violation, step=entry.step, where=fact.where)
        if entry.step != number:
            yield violation(text=f"step {entry.step}, expected step {number}")
        if len(fact.plan) != terms.prompts_per_step:
            yield violation(text=f"{len(fact.plan)} groups, a step has {terms.prompts_per_step}")
        if entry.version != (learner := terms.learner_version(entry.step or 0)):
            yield violation(text=f"trained version {entry.version}, step {entry.step} belongs to version {learner}")
        ends, samples = entry.boundaries, len(fact.plan) * terms.samples_per_prompt * most
        if any(low >= high for low, high in zip((0, *ends), ends, strict=False)) or max(ends, default=0) > samples:
            yield violation(text=f"micro-batches end at {list(ends)[:8]} of {samples} samples")
        if number >= terms.steps:
            yield violation(text=f"step {entry.step} of a run of {terms.steps}")
    closed = facts.closed
    if closed is not None and closed.step != len(facts.steps()):
        yield Violation(text=f"closed after {closed.step} steps, the ledger has {len(facts.steps())}", step=closed.step)


@check(
    "ledger-end", "the ledger reaches what measurements, checkpoints and metrics.jsonl have seen", anchors=lambda facts: len(facts.anchors)
)
def reached(facts: Facts) -> Iterator[Violation]:
    """The ledger contains every step that has evidence elsewhere."""
    done, last = len(facts.steps()), facts.entries[-1].where if facts.entries else None
    for anchor in facts.anchors:
        if anchor.steps > done:
            text = f"the ledger ends after {done} steps, {anchor.name} has seen {anchor.steps}: its last entries are gone"
            yield Violation(text=text, step=done, where=last)


@check("trained-once", "every trained group is in exactly one step", groups=_planned)
def trained_once(facts: Facts) -> Iterator[Violation]:
    """No group is in two steps, or twice in one."""
    first, again = facts.planned.first, {planned.group for planned in facts.planned.later()}
    seen = set[int]()
    for fact in facts.steps() if again else ():
        for planned in facts.plan(fact):
            if planned.group in seen:
                text = f"group {planned.group} was trained in step {first[planned.group].step} already"
                yield Violation(text=text, group=planned.group, step=fact.entry.step, where=fact.where)
            seen |= {planned.group} & again


@check(
    "step-order",
    "order = submission takes the lowest available groups",
    groups=lambda facts: _planned(facts) if facts.terms.order == "submission" else 0,
)
def submission(facts: Facts) -> Iterator[Violation]:
    """Under `submission` order a plan takes the lowest group that is neither trained nor dropped."""
    if facts.terms.order != "submission":
        return
    stale, outcomes, admitted = facts.stale(), facts.outcomes.first, facts.prompts.first.groups
    again, seen, retention = {planned.group for planned in facts.planned.later()}, set[int](), Retention(facts)
    reached, position = -1, 0
    for fact in facts.steps():
        for planned in facts.plan(fact):
            violation = partial(Violation, group=planned.group, step=fact.entry.step, where=fact.where)
            if planned.group in seen:
                continue  # the check trained-once reports it
            seen |= {planned.group} & again
            if planned.group < reached:
                yield violation(text=f"group {planned.group} is trained after group {reached}")
                continue
            while position < len(admitted) and (skipped := admitted[position]) <= planned.group:
                position += 1
                dropped = stale.get(skipped, fact.entry.seq) < fact.entry.seq or _drops(outcomes.get(skipped)) or retention.drop(skipped)
                if skipped < planned.group and not dropped:
                    yield violation(text=f"group {skipped}, which was not dropped, was skipped for group {planned.group}")
            reached = planned.group


@check("plans", "offsets and SHA-256 of plans exist and match their groups", groups=_planned)
def plans(facts: Facts) -> Iterator[Violation]:
    """Every group of a plan is at the offset the plan names, with the digest it names."""
    for fact in facts.steps():
        for planned in facts.plan(fact):
            violation, where = partial(Violation, group=planned.group, step=fact.entry.step, where=fact.where), planned.where
            if facts.deleted(where):
                continue
            outcome = facts.outcomes.first.get(planned.group)
            if outcome is None or outcome.where != where:
                outcome = next(facts.outcomes.at(where), None)
            if outcome is None:
                yield violation(text=f"no group starts at {where}")
            elif outcome.group != planned.group:
                yield violation(text=f"group {outcome.group} is at {where}")
            elif outcome.body != planned.body:
                yield violation(text=f"the group at {where} has SHA-256 {outcome.sha256[:16]}…, planned was {planned.sha256[:16]}…")


@check("lag", "nothing is trained beyond max_lag, nothing within it is stale", groups=lambda facts: _planned(facts) + len(facts.stale()))
def lag(facts: Facts) -> Iterator[Violation]:
    """Nothing older than max_lag is trained, and nothing within it is listed as stale."""
    terms, outcomes = facts.terms, facts.outcomes.first
    for fact in facts.entries:
        if fact.entry.kind in ("step", "stale"):
            learner = terms.learner_version(fact.entry.step or 0)
            for group in _decided(facts, fact):
                outcome = outcomes.get(group)
                if outcome is None or outcome.version_min is None or outcome.where in facts.poison:
                    continue  # plans and one-fate report it; unreadable groups are listed as stale
                behind = learner - outcome.version_min
                violation = partial(Violation, group=group, step=fact.entry.step, version=outcome.version_min, where=outcome.where)
                if (behind > terms.max_lag) != (fact.entry.kind == "stale"):
                    was = "trained" if fact.entry.kind == "step" else "listed as stale"
                    yield violation(text=f"{was} {behind} versions behind the learner's {learner}, max_lag is {terms.max_lag}")


def _decided(facts: Facts, fact: EntryFact) -> Iterable[int]:
    return fact.entry.groups if fact.entry.kind == "stale" else (planned.group for planned in facts.plan(fact))


def _drops(outcome: OutcomeFact | None) -> bool:
    return outcome is not None and outcome.outcome in DROPS


def _kinds(facts: Facts) -> Counter[str]:
    return Counter(fact.entry.kind for fact in facts.entries)


CHECKS = (order, reached, numbers, trained_once, submission, plans, lag)
