"""Checks: pure functions from facts to violations, one for each promise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.pipeline.inspect.audit.facts import Facts
from penstock.topics.wire.record import RecordId


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken promise, and the record that proves it."""

    text: str
    group: int | None = None
    step: int | None = None
    version: int | None = None
    where: RecordId | None = None


Rule = Callable[[Facts], Iterator[Violation]]
PROMPTS = "SELECT count(*) FROM lifecycles WHERE slot IS NOT NULL"
SAMPLES = "SELECT count(*) FROM samples"
COUNTED = "SELECT coalesce(sum(json_array_length(numbers)), 0) FROM outcomes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise and the function that checks it."""

    name: str
    promise: str
    counts: str
    """Plural noun for the things that were examined."""
    examined: Callable[[Facts], int]
    rule: Rule


def check(name: str, promise: str, **counted: Callable[[Facts], int] | str) -> Callable[[Rule], Check]:
    """Return a decorator that makes a `Check` of a generator of violations.

    `counted` is one keyword, such as `groups=count`: a noun for what is examined, and a function or SQL query that counts it.
    """
    ((noun, count),) = counted.items()
    examined = (lambda facts: int(facts.value(count))) if isinstance(count, str) else count
    return lambda rule: Check(name=name, promise=promise, counts=noun.replace("_", " "), examined=examined, rule=rule)
