"""Checks on trajectories of several turns.

The rule: what is trained is what the policy drew; what an environment said, or broke, never is.
"""

from collections.abc import Iterator

from penstock.pipeline.audit.check import Violation, check
from penstock.pipeline.audit.checks.gone import Gone
from penstock.pipeline.audit.facts import Facts


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
    broken, gone = facts.samples.broken, Gone(facts)
    for outcome in facts.outcomes if broken else ():
        if gone.samples(outcome.where.partition, outcome.group):
            continue  # what counted may be gone, and this one be its repetition
        for number in outcome.samples.numbers:
            if (why := broken.get((outcome.where.partition, outcome.group, number))) is not None:
                text = f"sample {number} counts, though its environment broke: {why[:120]}"
                yield Violation(text=text, group=outcome.group, where=outcome.where)


@check(
    "turns-answered",
    "where turns travel through the log, each is what was drawn for exactly what stands before it",
    turns=lambda facts: sum(len(turns) for _, turns in facts.samples.turns) if _turns_are_kept(facts) else 0,
)
def answered(facts: Facts) -> Iterator[Violation]:
    """Each turn of the policy is what a reply gave for exactly what stands before it."""
    given = {(reply.key.group, reply.key.sample, reply.key.sha256, reply.tokens) for reply in facts.replies}
    for sample, turns in facts.samples.turns if _turns_are_kept(facts) else ():
        for number, turn in enumerate(turns):
            if (sample.group, sample.sample, turn.context, turn.tokens) not in given:
                text = f"sample {sample.sample}: its turn {number} is in no reply to what stands before it"
                yield Violation(text=text, group=sample.group, where=sample.where)


@check(
    "replies-asked", "no turn was drawn that nobody had asked for", replies=lambda facts: 0 if facts.cut("calls") else len(facts.replies)
)
def asked(facts: Facts) -> Iterator[Violation]:
    """Nothing was drawn that nobody had asked for."""
    for reply in () if facts.cut("calls") else facts.replies:
        if reply.key not in facts.calls:
            group, sample, turn, attempt, _ = reply.key
            text = f"a reply to turn {turn} of sample {sample}, attempt {attempt}, which is in no call"
            yield Violation(text=text, group=group, where=reply.where)


def _turns_are_kept(facts: Facts) -> bool:
    """An archive has no turns beside their trajectories', and of a log they may be deleted."""
    return bool(facts.replies or facts.calls) and not facts.cut("replies")


CHECKS = (turns, broken, answered, asked)
