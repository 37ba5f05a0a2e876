"""One check of the audit, and a violation that it finds.

The rule: a check is a pure function from facts to violations; it examines one promise, so that a broken promise is reported by its name.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.pipeline.audit.facts import Facts
from penstock.topics.wire.record import RecordId


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken promise, and the record that shows it."""

    text: str
    group: int | None = None
    step: int | None = None
    version: int | None = None
    where: RecordId | None = None


Rule = Callable[[Facts], Iterator[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise, and how to check it."""

    name: str
    promise: str
    counts: str
    """Noun for what was examined, in the plural."""
    examined: Callable[[Facts], int]
    rule: Rule


def check(name: str, promise: str, **counted: Callable[[Facts], int]) -> Callable[[Rule], Check]:
    """Make a check of the rule below; what it examines is given as `noun=how many`, the noun with _ for a space.

    Example:
        @check("plans", "offsets and SHA-256 of plans exist and match their groups", groups=_planned)
    """
    ((counts, examined),) = counted.items()
    return lambda rule: Check(name=name, promise=promise, counts=counts.replace("_", " "), examined=examined, rule=rule)
