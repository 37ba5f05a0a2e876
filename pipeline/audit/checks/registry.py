"""All checks of the audit in one table, and their results. The rule: a check that is in no module's `CHECKS` is not part of an audit."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.pipeline.audit.check import Check, Violation
from penstock.pipeline.audit.checks import dead_letters, groups, prompts, steps, trajectories, versions
from penstock.pipeline.audit.facts import Facts

MODULES = (prompts, trajectories, groups, steps, versions, dead_letters)
"""Modules in the order of a sample's life; each has a table `CHECKS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The violations one check found, and the number of things it examined."""

    check: Check
    examined: int
    violations: tuple[Violation, ...]


def examine(facts: Facts, checks: Iterable[Check] | None = None) -> list[Result]:
    """Apply the given checks to a run, by default all."""
    return [
        Result(check=check, examined=check.examined(facts), violations=tuple(check.rule(facts)))
        for check in (all_checks() if checks is None else checks)
    ]


def all_checks() -> tuple[Check, ...]:
    """Every check of an audit."""
    return tuple(check for module in MODULES for check in module.CHECKS)
