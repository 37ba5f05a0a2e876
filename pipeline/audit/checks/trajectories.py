"""Checks on trajectories of several turns.

The rule: what is trained is what the policy drew; what an environment said, or broke, never is.
"""

from collections.abc import Iterator

from penstock.pipeline.audit.check import Check, Violation
from penstock.pipeline.audit.facts import Facts


def turns(facts: Facts) -> Iterator[Violation]:
    """A trajectory's turns follow each other, and the policy's tokens alone are trained."""
    for sample in facts.samples:
        if sample.flaw is not None:
            yield Violation(text=f"sample {sample.sample}: {sample.flaw}", group=sample.group, where=sample.where)


def broken(facts: Facts) -> Iterator[Violation]:
    """A sample whose environment broke is in no outcome."""
    first = facts.first_samples()
    for outcome in facts.outcomes:
        for number, _ in outcome.samples:
            drawn = first.get((outcome.where.partition, outcome.group, number))
            if drawn is not None and drawn.broken is not None:
                text = f"sample {number} counts, though its environment broke: {drawn.broken[:120]}"
                yield Violation(text=text, group=outcome.group, where=outcome.where)


CHECKS = (
    Check(
        name="trajectory-turns",
        promise="in a trajectory turns follow each other, and the policy's tokens alone are trained",
        counts="samples",
        examined=lambda facts: len(facts.samples),
        rule=turns,
    ),
    Check(
        name="broken-environments",
        promise="no outcome holds a sample whose environment broke",
        counts="samples",
        examined=lambda facts: sum(len(outcome.samples) for outcome in facts.outcomes),
        rule=broken,
    ),
)
