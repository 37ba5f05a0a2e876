"""Checks on the ledger's order, and on the plans of its steps."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.facts import ANY, DROPPED, EntryFact, Facts
from penstock.pipeline.inspect.audit.rules import as_object
from penstock.topics import ledger
from penstock.topics.wire.record import RecordId


def _planned(facts: Facts) -> int:
    return sum(fact.planned for fact in facts.steps())


@check("ledger-order", "entries without gap, run-opened first, run-closed last", entries=lambda facts: len(facts.entries))
def order(facts: Facts) -> Iterator[Violation]:
    for number, fact in enumerate(facts.entries):
        before = facts.entries[number - 1].entry.seq if number else -1
        entry = fact.entry
        if entry.seq != before + 1:
            yield Violation(text=f"entry {entry.seq} ({entry.kind}) follows entry {before}", step=entry.step, where=fact.where)
        if (entry.kind == "run-opened") != (number == 0):
            expected = "run-opened comes first and once" if number else "the first entry is not run-opened"
            yield Violation(text=f"{entry.kind} is entry {entry.seq}: {expected}", where=fact.where)
        if entry.kind == "run-closed" and number != len(facts.entries) - 1:
            yield Violation(text=f"run-closed is entry {entry.seq}, but is not the last entry", where=fact.where)
        if entry.kind == "run-opened" and facts.records:
            details = as_object(entry.details)
            if (details.get("config"), details.get("info")) not in facts.records:
                yield Violation(text="no record of the topic run has the configuration and info of run-opened", where=fact.where)
    if facts.closed is None and facts.status in ("finished", "failed") and facts.entries:
        text = f"the run is registered as {facts.status}, but the ledger has no run-closed"
        yield Violation(text=text, where=facts.entries[-1].where)


@check(
    "ledger-chain",
    "each entry has the SHA-256 of the entry before",
    entries=lambda facts: sum(fact.entry.previous is not None for fact in facts.entries),
)
def chain(facts: Facts) -> Iterator[Violation]:
    """Yield entries with a wrong digest of their predecessor; only entries of earlier releases, before all others, may have none."""
    for before, fact in zip((None, *facts.entries), facts.entries, strict=False):
        previous, expected = fact.entry.previous, before.sha256 if before and (fact.entry.previous or before.entry.previous) else None
        if previous != expected:
            text = f"entry {fact.entry.seq} names {_short(previous)} as SHA-256 of its predecessor, which has {_short(expected)}"
            yield Violation(text=text, step=fact.entry.step, where=before.where if before else fact.where)


def _short(sha256: str | None) -> str:
    return f"{sha256[:16]}…" if sha256 else "none"


@check(
    "evaluations",
    "evaluations that the ledger lists are those in metrics",
    evaluations=lambda facts: sum(1 for _ in _listed_evaluations(facts)),
)
def evaluations(facts: Facts) -> Iterator[Violation]:
    """Yield listed evaluations that `metrics` has otherwise; one that it has not at all may have been lost with its worker."""
    recorded = {evaluation.version for evaluation in facts.evaluations.values()}
    for fact, sha256, version in _listed_evaluations(facts):
        actual = facts.evaluations.get(sha256)
        if (actual.version != version) if actual is not None else version in recorded:
            text = f"entry {fact.entry.seq} lists an evaluation of version {version} with SHA-256 {_short(sha256)}, metrics has another one"
            yield Violation(text=text, version=version, where=fact.where)


def _listed_evaluations(facts: Facts) -> Iterator[tuple[EntryFact, str, int]]:
    """Yield (ledger entry, SHA-256, policy version) of each evaluation that the ledger lists; none if `metrics` was truncated."""
    for fact in facts.entries if not facts.truncated("metrics") else ():
        yield from ((fact, sha256, version) for sha256, version in ledger.evaluations(fact.entry).items())


@check("step-numbers", "steps 0 to n-1 once each, of U groups, under version floor(step / S)", steps=lambda facts: len(facts.steps()))
def numbers(facts: Facts) -> Iterator[Violation]:
    terms = facts.terms
    most = ANY if facts.truncated("rollouts") else facts.most_sequences
    for number, fact in enumerate(facts.steps()):
        entry = fact.entry
        violation = partial(Violation, step=entry.step, where=fact.where)
        if entry.step != number:
            yield violation(text=f"step {entry.step}, expected step {number}")
        if fact.planned != terms.prompts_per_step:
            yield violation(text=f"the step has {fact.planned} groups, expected {terms.prompts_per_step}")
        if entry.version != (learner := terms.learner_version(entry.step or 0)):
            yield violation(text=f"step {entry.step} started from version {entry.version}, expected {learner}")
        ends, samples = entry.boundaries, fact.planned * terms.samples_per_prompt * most
        if any(low >= high for low, high in zip((0, *ends), ends, strict=False)) or max(ends, default=0) > samples:
            yield violation(text=f"micro-batches end at {list(ends)[:8]} of {samples} samples")
        if number >= terms.steps:
            yield violation(text=f"step {entry.step} is beyond the {terms.steps} steps of the run")
    closed = facts.closed
    if closed is not None and closed.step != len(facts.steps()):
        yield Violation(text=f"the run was closed after {closed.step} steps, the ledger has {len(facts.steps())}", step=closed.step)


@check(
    "ledger-end", "the ledger reaches what measurements, checkpoints and metrics.jsonl have seen", anchors=lambda facts: len(facts.anchors)
)
def reached(facts: Facts) -> Iterator[Violation]:
    """Yield anchors, which are evidence outside the ledger, of more committed steps than the ledger has."""
    done, last = len(facts.steps()), facts.entries[-1].where if facts.entries else None
    for anchor in facts.anchors:
        if anchor.steps > done:
            text = f"the ledger ends after {done} steps, but {anchor.name} shows {anchor.steps}: the last entries are missing"
            yield Violation(text=text, step=done, where=last)


@check("trained-once", "every trained group is in exactly one step", groups=_planned)
def trained_once(facts: Facts) -> Iterator[Violation]:
    query = f"""
        SELECT entry, group_id, l.step FROM decided d JOIN lifecycles l USING (group_id)
        WHERE kind = 'step' AND NOT {_FIRST} ORDER BY d.rowid
    """
    for entry, group, first in facts.rows(query):
        yield _violation(facts, entry, group)(text=f"group {group} was already trained in step {first}")


_FIRST = "d.rowid = (SELECT min(rowid) FROM decided WHERE group_id = d.group_id AND kind = 'step')"
"""SQL condition on a planned group `d`: no earlier plan contains the group."""


@check(
    "step-order",
    "order = submission takes the lowest available groups",
    groups=lambda facts: _planned(facts) if facts.terms.order == "submission" else 0,
)
def submission(facts: Facts) -> Iterator[Violation]:
    """Yield plans that do not take the lowest group that is neither trained nor dropped, if `schedule.order = submission`."""
    if facts.terms.order != "submission":
        return
    admitted = facts.rows(f"SELECT group_id, stale, {DROPPED} FROM lifecycles WHERE slot IS NOT NULL ORDER BY group_id")
    reached, following = -1, next(admitted, None)
    # The check trained-once reports repetitions.
    for entry, seq, group in facts.rows(f"SELECT entry, seq, group_id FROM decided d WHERE {_FIRST} ORDER BY rowid"):
        violation = _violation(facts, entry, group)
        if group < reached:
            yield violation(text=f"group {group} is trained after group {reached}")
            continue
        while following is not None and following[0] <= group:
            skipped, stale, dropped = following
            following = next(admitted, None)
            if skipped < group and not dropped and (stale is None or stale >= seq):
                yield violation(text=f"group {group} was trained before group {skipped}, which was not dropped")
        reached = group


@check("plans", "offsets and SHA-256 of plans exist and match their groups", groups=_planned)
def plans(facts: Facts) -> Iterator[Violation]:
    query = """
        SELECT entry, d.group_id, d.partition, d.offset, d.body, o.group_id, o.body
        FROM decided d LEFT JOIN outcomes o ON o.partition = d.partition AND o.offset = d.offset
        WHERE kind = 'step' AND (o.group_id IS NOT d.group_id OR o.body != d.body) AND d.offset >= start_offset('groups', d.partition)
        ORDER BY d.rowid
    """
    for entry, group, partition, offset, planned, other, body in facts.rows(query):
        where, violation = RecordId("groups", partition, offset), _violation(facts, entry, group)
        if other is None:
            yield violation(text=f"the planned record {where} is not the first part of this group")
        elif other != group:
            yield violation(text=f"group {other} is at {where}")
        else:
            yield violation(text=f"the group at {where} has SHA-256 {body.hex()[:16]}…, the plan has {planned.hex()[:16]}…")


@check(
    "lag",
    "nothing is trained beyond max_lag, nothing within it is stale",
    groups=lambda facts: _planned(facts) + facts.value("SELECT count(DISTINCT group_id) FROM decided WHERE kind = 'stale'"),
)
def lag(facts: Facts) -> Iterator[Violation]:
    terms = facts.terms
    # Groups without an outcome or samples are reported by plans and one-status.
    query = """
        SELECT entry, kind, d.step / :steps AS learner, group_id, version_min, outcome_partition, outcome_offset
        FROM decided d JOIN lifecycles l USING (group_id)
        WHERE (learner - version_min > :max_lag) != (kind = 'stale') ORDER BY d.rowid
    """
    for entry, kind, learner, group, version, *where in facts.rows(query, steps=terms.steps_per_version, max_lag=terms.max_lag):
        if (outcome := RecordId("groups", *where)) not in facts.poison:  # unreadable groups are listed as stale
            was = "trained" if kind == "step" else "listed as stale"
            text = f"{was} {learner - version} versions behind the learner's {learner}, max_lag is {terms.max_lag}"
            yield replace(_violation(facts, entry, group)(text=text), version=version, where=outcome)


def _violation(facts: Facts, entry: int, group: int) -> Callable[..., Violation]:
    """Return a constructor of violations about one group of a ledger entry."""
    return partial(Violation, group=group, step=facts.entries[entry].entry.step, where=facts.entries[entry].where)


CHECKS = (order, reached, chain, evaluations, numbers, trained_once, submission, plans, lag)
