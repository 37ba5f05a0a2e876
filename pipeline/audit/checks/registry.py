"""All checks of the audit in one table, and their results. The rule: a check that is in no module's `CHECKS` is not part of an audit."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.pipeline.audit.check import Check, Violation
from penstock.pipeline.audit.checks import dead_letters, groups, prompts, steps, versions
from penstock.pipeline.audit.facts import Facts

MODULES = (prompts, groups, steps, versions, dead_letters)
"""In the order in which a sample's life passes them; each has its own table, `CHECKS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check found."""

    check: Check
    examined: int
    violations: tuple[Violation, ...]


def examine(facts: Facts, checks: Iterable[Check] | None = None) -> list[Result]:
    """Apply the checks to a run; all of them, or these."""
    return [
        Result(check=check, examined=check.examined(facts), violations=tuple(check.rule(facts)))
        for check in (all_checks() if checks is None else checks)
    ]


def all_checks() -> tuple[Check, ...]:
    """Every check of an audit."""
    return tuple(check for module in MODULES for check in module.CHECKS)
