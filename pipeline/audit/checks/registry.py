"""All checks of the audit in one table, and their results. The rule: a check that is not in this table is not part of an audit."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.pipeline.audit.check import Check, Violation
from penstock.pipeline.audit.checks import dead_letters, groups, prompts, steps, versions
from penstock.pipeline.audit.facts import Facts

CHECKS: tuple[Check, ...] = (*prompts.CHECKS, *groups.CHECKS, *steps.CHECKS, *versions.CHECKS, *dead_letters.CHECKS)
"""In the order in which a sample's life passes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check found."""

    check: Check
    examined: int
    violations: tuple[Violation, ...]


def examine(facts: Facts, checks: Iterable[Check] = CHECKS) -> list[Result]:
    """Apply the checks to a run."""
    return [Result(check=check, examined=check.examined(facts), violations=tuple(check.rule(facts))) for check in checks]
