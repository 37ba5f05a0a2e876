"""One check of the audit, and a violation that it finds.

The rule: a check is a pure function from facts to violations; it examines one promise, so that a broken promise is reported by its name.
"""

from collections.abc import Callable, Iterator
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
