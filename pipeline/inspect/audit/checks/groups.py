"""Checks on trajectories, outcomes and the final status of groups, against the prompts and samples in the log."""

import json
from collections.abc import Iterator
from functools import partial

from penstock.pipeline.inspect.audit.check import COUNTED, PROMPTS, SAMPLES, Violation, check
from penstock.pipeline.inspect.audit.facts import DROPPED, INCOMPLETE, Facts
from penstock.pipeline.inspect.audit.rules import DROPS
from penstock.topics.wire.record import RecordId


@check("one-outcome", "one outcome a group, all parts of it", outcomes="SELECT count(*) FROM outcomes")
def one_outcome(facts: Facts) -> Iterator[Violation]:
    """Yield second outcomes of a group that are not identical repetitions, and outcomes of which parts are missing."""
    query = """
        SELECT group_id, o.body = outcome_body, l.outcome, outcome_partition, outcome_offset, o.partition, o.offset
        FROM outcomes o JOIN lifecycles l USING (group_id)
        WHERE (o.partition, o.offset) != (outcome_partition, outcome_offset) ORDER BY o.rowid
    """
    for group, equal, other, partition, offset, *where in facts.rows(query):
        same = "the same outcome" if equal else f"another outcome, {other}"
        text = f"group {group} has {same} at {RecordId('groups', partition, offset)}"
        yield Violation(text=text, group=group, where=RecordId("groups", *where))
    named = {fact.about for fact in facts.dead_letters}
    has_outcome = "SELECT 1 FROM outcomes WHERE group_id = ?"
    for record in facts.unusable:
        if record.kind == INCOMPLETE and record.where not in named and not facts.value(has_outcome, record.group):
            yield Violation(text=record.reason, group=record.group, where=record.where)


@check("group-place", "an outcome is in its prompt's partition and repeats the prompt", outcomes="SELECT count(*) FROM outcomes")
def partition(facts: Facts) -> Iterator[Violation]:
    # The check one-status reports outcomes without a prompt.
    query = """
        SELECT group_id, o.partition, o.offset, l.partition, l.offset, o.prompt_hash != l.prompt_hash
        FROM outcomes o JOIN lifecycles l USING (group_id)
        WHERE o.partition != l.partition OR o.prompt_hash != l.prompt_hash ORDER BY o.rowid
    """
    for group, partition, offset, *prompt, differs in facts.rows(query):
        violation, where = partial(Violation, group=group, where=RecordId("groups", partition, offset)), RecordId("prompts", *prompt)
        if where.partition != partition:
            yield violation(text=f"the group's prompt is in another partition, at {where}")
        if differs:
            yield violation(text=f"prompt, slot, version or row differ from the prompt at {where}")


@check("group-samples", "an outcome holds the first K samples as first recorded", samples=COUNTED)
def samples(facts: Facts) -> Iterator[Violation]:
    """Yield outcomes whose samples are not the first K recorded ones; a failed or abandoned group must have none."""
    query = """
        SELECT group_id, o.partition, o.offset, o.outcome, numbers, expected, absent, differing, coalesce(l.partition, o.partition),
            coalesce(slot, 0) < slot_limit('rollouts', coalesce(l.partition, o.partition))
        FROM outcomes o JOIN lifecycles l USING (group_id)
        WHERE numbers != expected OR absent != '[]' OR differing != '[]' ORDER BY o.rowid
    """
    for group, partition, offset, outcome, held, expected, absent, differing, place, deleted in facts.rows(query):
        violation = partial(Violation, group=group, where=RecordId("groups", partition, offset))
        numbers, count = json.loads(held), facts.terms.samples_per_prompt
        any_k = deleted and facts.terms.oversample and expected != "[]" and len(set(numbers)) == len(numbers) == count
        if held != expected and not any_k:
            yield violation(text=f"{outcome} with samples {held}, not {expected}")
        if deleted:
            continue  # the first record of each may have been deleted
        for number in json.loads(absent):
            yield violation(text=f"sample {number} is not in rollouts/{place}")
        for number in json.loads(differing):
            first = "SELECT offset FROM samples WHERE group_id = ? AND partition = ? AND sample = ? AND kind = 'first'"
            where = RecordId("rollouts", place, facts.value(first, group, place, number))
            yield violation(text=f"sample {number} differs from its first record at {where}")


@check("one-status", "every admitted group has exactly one final status", groups=PROMPTS)
def one_status(facts: Facts) -> Iterator[Violation]:
    """Yield groups with several final statuses, or with one although they were never admitted or have no outcome."""
    query = """
        SELECT group_id, slot IS NULL, step, stale, outcome, outcome_partition, outcome_offset, outcome_deleted FROM lifecycles
        WHERE slot IS NULL OR step IS NOT NULL OR stale IS NOT NULL ORDER BY group_id
    """
    for group, absent, step, stale, outcome, partition, offset, outcome_deleted in facts.rows(query):
        where = RecordId("groups", partition, offset) if outcome else None
        statuses = [f"trained in step {step}"] if step is not None else []
        statuses += [f"stale in ledger entry {stale}"] if stale is not None else []
        statuses += [outcome] if outcome in DROPS else []
        if absent and group >= facts.prompts_below:
            text = f"the group was never admitted, but is {', '.join(statuses) or outcome}"
            yield Violation(text=text, group=group, step=step, where=where)
        elif len(statuses) > 1:
            yield Violation(text=f"has {len(statuses)} final statuses: {', '.join(statuses)}", group=group, step=step, where=where)
        elif statuses and outcome is None and not outcome_deleted:
            yield Violation(text=f"the group is {statuses[0]} without an outcome in groups", group=group, step=step)


@check(
    "regraded",
    "groups of a parent run name it, and the regraded steps train them alone",
    groups=lambda facts: sum(len(numbers) for origin in facts.terms.regraded for numbers in origin.groups),
)
def regraded(facts: Facts) -> Iterator[Violation]:
    """Yield groups that name a wrong parent run or are trained in a wrong step; groups that are not regraded must name none."""
    terms, any_regraded = facts.terms, bool(facts.terms.regraded)
    query = "SELECT group_id, partition, offset, parent FROM outcomes WHERE parent IS NOT NULL OR ? ORDER BY rowid"
    for group, *where, parent in facts.rows(query, any_regraded):
        origin = terms.regraded_from(group)
        if parent != (expected := origin.parent if origin else None):
            text = f"the record names {parent or 'no run'} as parent run, expected {expected or 'none'}"
            yield Violation(text=text, group=group, where=RecordId("groups", *where))
    trained = "SELECT group_id, step FROM lifecycles WHERE step IS NOT NULL AND ? ORDER BY step, group_id"
    for group, step in facts.rows(trained, any_regraded):
        origin, of_step = terms.regraded_from(group), next((origin for origin in terms.regraded if step in origin.steps), None)
        if origin != of_step:
            own, steps = (f"of {origin.parent}" if origin else "of the run"), (f"those of {of_step.parent}" if of_step else "own ones")
            yield Violation(text=f"a group {own} is trained in step {step}, which trains {steps}", group=group, step=step)


def group_statuses(facts: Facts) -> dict[str, int]:
    """Return final status -> number of admitted groups. Without a final status, a group is `open`, or `unused` if the run is closed.

    `gone` counts groups whose final status may have been deleted.
    """
    unfinished = "open" if facts.closed is None else "unused"
    query = f"""
        SELECT CASE
            WHEN step IS NOT NULL THEN 'trained' WHEN stale IS NOT NULL THEN 'stale'
            WHEN {DROPPED} THEN coalesce(outcome, 'gone') ELSE ? END AS status, count(*)
        FROM lifecycles WHERE admitted GROUP BY status
    """
    return dict.fromkeys(("trained", "filtered", "stale", "failed", "abandoned", unfinished), 0) | dict(facts.rows(query, unfinished))


@check("trajectory-turns", "in a trajectory turns follow each other, and the policy's tokens alone are trained", samples=SAMPLES)
def turns(facts: Facts) -> Iterator[Violation]:
    flawed = "SELECT group_id, sample, flaw, partition, offset FROM samples WHERE flaw IS NOT NULL ORDER BY rowid"
    for group, sample, flaw, *where in facts.rows(flawed):
        yield Violation(text=f"sample {sample}: {flaw}", group=group, where=RecordId("rollouts", *where))


@check("broken-environments", "no outcome holds a sample whose environment broke", samples=COUNTED)
def broken(facts: Facts) -> Iterator[Violation]:
    # If earlier records may have been deleted, the sample in the log may be a repetition of the one that counts.
    query = """
        SELECT group_id, sample, broken, o.partition, o.offset
        FROM (SELECT * FROM samples WHERE broken IS NOT NULL AND kind = 'first') s
        CROSS JOIN outcomes o USING (group_id, partition) CROSS JOIN json_each(numbers) n JOIN lifecycles l USING (group_id)
        WHERE n.value = sample AND coalesce(slot, 0) >= slot_limit('rollouts', o.partition) ORDER BY o.rowid, n.key
    """
    for group, sample, why, *where in facts.rows(query):
        text = f"sample {sample} is in the outcome although its environment broke: {why[:120]}"
        yield Violation(text=text, group=group, where=RecordId("groups", *where))


@check(
    "turns-answered",
    "if turns travel through the log, each is the reply to exactly its context",
    turns=lambda facts: facts.value("SELECT count(*) FROM turns") if _has_turns(facts) else 0,
)
def replied_turns(facts: Facts) -> Iterator[Violation]:
    query = """
        SELECT group_id, sample, number, partition, offset FROM turns t WHERE NOT EXISTS (
            SELECT 1 FROM replies r WHERE (r.group_id, r.sample, r.context, r.tokens) = (t.group_id, t.sample, t.context, t.tokens)
        ) ORDER BY rowid
    """
    for group, sample, number, *where in facts.rows(query) if _has_turns(facts) else ():
        text = f"sample {sample}, turn {number}: no recorded reply has this context and these tokens"
        yield Violation(text=text, group=group, where=RecordId("rollouts", *where))


@check(
    "replies-asked",
    "every generated turn was requested",
    replies=lambda facts: 0 if facts.truncated("calls") else facts.value("SELECT count(*) FROM replies"),
)
def requested(facts: Facts) -> Iterator[Violation]:
    query = """
        SELECT group_id, sample, turn, attempt, partition, offset FROM replies r
        WHERE (group_id, sample, turn, attempt, context) NOT IN (SELECT * FROM calls) ORDER BY rowid
    """
    for group, sample, turn, attempt, *where in () if facts.truncated("calls") else facts.rows(query):
        text = f"the reply to turn {turn} of sample {sample}, attempt {attempt}, has no call"
        yield Violation(text=text, group=group, where=RecordId("replies", *where))


def _has_turns(facts: Facts) -> bool:
    """True if calls or replies are recorded. Archives do not contain them, and retention may have deleted them."""
    recorded = facts.value("SELECT EXISTS (SELECT 1 FROM replies) OR EXISTS (SELECT 1 FROM calls)")
    return bool(recorded) and not facts.truncated("replies")


CHECKS = (turns, broken, replied_turns, requested, one_outcome, partition, samples, one_status, regraded)
