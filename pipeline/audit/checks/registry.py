"""The checks of an audit as a table, and what each of them found.

The rule: a check is a pure function from facts to violations; it examines one promise, so that a broken promise is reported by its name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock.pipeline.audit.facts import Facts, Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that the log shows broken, and where."""

    text: str
    group: int | None = None
    step: int | None = None
    version: int | None = None
    where: Where | None = None


Rule = Callable[[Facts], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise."""

    name: str
    promise: str
    counts: str
    """What was examined, in words."""
    examined: Callable[[Facts], int]
    rule: Rule
    of_the_work: bool = False
    """Whether it compares prompts or samples with what else went on while they were made; a re-scored run holds copies of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check found."""

    check: Check
    examined: int
    violations: tuple[Violation, ...]


def examine(facts: Facts, checks: Iterable[Check] | None = None) -> list[Result]:
    """Apply every check that the run can be held to."""
    return [
        Result(check=check, examined=check.examined(facts), violations=tuple(check.rule(facts)))
        for check in (all_checks() if checks is None else checks)
        if facts.rescored_from is None or not check.of_the_work
    ]


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which a sample's life passes them."""
    from penstock.pipeline.audit.checks import dead_letters, groups, prompts, steps, versions

    modules = (prompts, groups, steps, versions, dead_letters)
    return tuple(check for module in modules for check in module.CHECKS)
