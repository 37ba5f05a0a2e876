"""Checks on multi-turn trajectories: only tokens that the policy generated are trained."""

from collections.abc import Iterator

from penstock.pipeline.inspect.audit.check import COUNTED, SAMPLES, Violation, check
from penstock.pipeline.inspect.audit.facts import Facts
from penstock.topics.wire.record import RecordId


@check("trajectory-turns", "in a trajectory turns follow each other, and the policy's tokens alone are trained", samples=SAMPLES)
def turns(facts: Facts) -> Iterator[Violation]:
    """A trajectory's turns follow each other, and the policy's tokens alone are trained."""
    flawed = "SELECT group_id, sample, flaw, partition, offset FROM samples WHERE flaw IS NOT NULL ORDER BY rowid"
    for group, sample, flaw, *where in facts.rows(flawed):
        yield Violation(text=f"sample {sample}: {flaw}", group=group, where=RecordId("rollouts", *where))


@check("broken-environments", "no outcome holds a sample whose environment broke", samples=COUNTED)
def broken(facts: Facts) -> Iterator[Violation]:
    """A sample whose environment broke is in no outcome."""
    # If the counted sample may have been deleted, the one in the log may be its repetition.
    query = """
        SELECT group_id, sample, broken, o.partition, o.offset
        FROM (SELECT * FROM samples WHERE broken IS NOT NULL AND kind = 'first') s
        CROSS JOIN outcomes o USING (group_id, partition) CROSS JOIN json_each(numbers) n JOIN lifecycles l USING (group_id)
        WHERE n.value = sample AND coalesce(slot, 0) >= slot_limit('rollouts', o.partition) ORDER BY o.rowid, n.key
    """
    for group, sample, why, *where in facts.rows(query):
        text = f"sample {sample} counts, though its environment broke: {why[:120]}"
        yield Violation(text=text, group=group, where=RecordId("groups", *where))


@check(
    "turns-answered",
    "if turns travel through the log, each is the reply to exactly its context",
    turns=lambda facts: facts.value("SELECT count(*) FROM turns") if _has_turns(facts) else 0,
)
def replied_turns(facts: Facts) -> Iterator[Violation]:
    """Every policy turn must match a recorded reply: same group, sample, context and tokens."""
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
    """Every reply has its call."""
    query = """
        SELECT group_id, sample, turn, attempt, partition, offset FROM replies r
        WHERE (group_id, sample, turn, attempt, context) NOT IN (SELECT * FROM calls) ORDER BY rowid
    """
    for group, sample, turn, attempt, *where in () if facts.truncated("calls") else facts.rows(query):
        text = f"a reply to turn {turn} of sample {sample}, attempt {attempt}, which is in no call"
        yield Violation(text=text, group=group, where=RecordId("replies", *where))


def _has_turns(facts: Facts) -> bool:
    """False for an archive, which has no calls and replies, and after retention deleted them."""
    recorded = facts.value("SELECT EXISTS (SELECT 1 FROM replies) OR EXISTS (SELECT 1 FROM calls)")
    return bool(recorded) and not facts.truncated("replies")


CHECKS = (turns, broken, replied_turns, requested)
