"""Checks: pure functions from facts to violations, one for each promise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.pipeline.inspect.audit.facts import Facts
from penstock.topics.wire.record import RecordId


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken promise and the record that shows it."""

    text: str
    group: int | None = None
    step: int | None = None
    version: int | None = None
    where: RecordId | None = None


Rule = Callable[[Facts], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise and the function that checks it."""

    name: str
    promise: str
    counts: str
    """Noun for what was examined, in the plural."""
    examined: Callable[[Facts], int]
    rule: Rule


def check(name: str, promise: str, **counted: Callable[[Facts], int]) -> Callable[[Rule], Check]:
    """Decorator that makes a check of a rule; `counted` is `noun=count function`, the noun with _ for a space.

    Example:
        @check("plans", "offsets and SHA-256 of plans exist and match their groups", groups=_planned)
    """
    ((counts, examined),) = counted.items()
    return lambda rule: Check(name=name, promise=promise, counts=counts.replace("_", " "), examined=examined, rule=rule)
