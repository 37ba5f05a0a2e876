"""Checks on multi-turn trajectories: only tokens that the policy generated are trained."""

from collections.abc import Iterator

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.checks.retention import Retention
from penstock.pipeline.inspect.audit.facts import Facts


@check(
    "trajectory-turns",
    "in a trajectory turns follow each other, and the policy's tokens alone are trained",
    samples=lambda facts: len(facts.samples),
)
def turns(facts: Facts) -> Iterator[Violation]:
    """A trajectory's turns follow each other, and the policy's tokens alone are trained."""
    for sample, flaw in facts.samples.flaws:
        yield Violation(text=f"sample {sample.sample}: {flaw}", group=sample.group, where=sample.where)


@check(
    "broken-environments",
    "no outcome holds a sample whose environment broke",
    samples=lambda facts: sum(len(outcome.samples.numbers) for outcome in facts.outcomes),
)
def broken(facts: Facts) -> Iterator[Violation]:
    """A sample whose environment broke is in no outcome."""
    broken, retention = facts.samples.broken, Retention(facts)
    for outcome in facts.outcomes if broken else ():
        if retention.samples(outcome.where.partition, outcome.group):
            continue  # the counted sample may have been deleted, and this one be its repetition
        for number in outcome.samples.numbers:
            if (why := broken.get((outcome.where.partition, outcome.group, number))) is not None:
                text = f"sample {number} counts, though its environment broke: {why[:120]}"
                yield Violation(text=text, group=outcome.group, where=outcome.where)


@check(
    "turns-answered",
    "if turns travel through the log, each is the reply to exactly its context",
    turns=lambda facts: sum(len(turns) for _, turns in facts.samples.turns) if _has_turns(facts) else 0,
)
def replied_turns(facts: Facts) -> Iterator[Violation]:
    """Each turn of the policy is the reply to exactly its context."""
    replied = {(reply.key.group, reply.key.sample, reply.key.sha256, reply.tokens) for reply in facts.replies}
    for sample, turns in facts.samples.turns if _has_turns(facts) else ():
        for number, turn in enumerate(turns):
            if (sample.group, sample.sample, turn.context, turn.tokens) not in replied:
                text = f"sample {sample.sample}: its turn {number} is in no reply to its context"
                yield Violation(text=text, group=sample.group, where=sample.where)


@check(
    "replies-asked",
    "every generated turn was requested",
    replies=lambda facts: 0 if facts.truncated("calls") else len(facts.replies),
)
def requested(facts: Facts) -> Iterator[Violation]:
    """Every reply has its call."""
    for reply in () if facts.truncated("calls") else facts.replies:
        if reply.key not in facts.calls:
            group, sample, turn, attempt, _ = reply.key
            text = f"a reply to turn {turn} of sample {sample}, attempt {attempt}, which is in no call"
            yield Violation(text=text, group=group, where=reply.where)


def _has_turns(facts: Facts) -> bool:
    """False for an archive, which has no calls and replies, and after retention deleted them."""
    return bool(facts.replies or facts.calls) and not facts.truncated("replies")


CHECKS = (turns, broken, replied_turns, requested)
