"""The whole audit of a run, as plain data and as text.

The rule: the last line says it all; whatever is a violation has coordinates.
"""

from dataclasses import dataclass
from typing import Any

from penstock.pipeline.audit.check import Violation
from penstock.pipeline.audit.checks.groups import fates
from penstock.pipeline.audit.checks.registry import Result, examine
from penstock.pipeline.audit.collect import gather
from penstock.pipeline.audit.facts import Facts
from penstock.pipeline.audit.notes import duplicates, letters, notes, redrawn
from penstock.pipeline.audit.source import Source, Unreadable

SHOWN = 5
"""Violations of one check that are printed; --json has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found."""

    facts: Facts
    results: tuple[Result, ...]

    @property
    def clean(self) -> bool:
        """Whether no promise is broken."""
        return not any(result.violations for result in self.results)


def audit(source: Source) -> Audit:
    """Read a run and judge it; raises `Unreadable`."""
    facts = gather(source)
    if facts.closed is not None and not facts.workers:
        raise Unreadable(f"run {facts.run} is closed and no worker has measured anything in it: it holds nobody's work to judge")
    return Audit(facts=facts, results=tuple(examine(facts)))


def summary(found: Audit) -> str:
    """The one line.

    Example:
        summary(found)  # -> "audit: clean, 96 groups, 12 steps, 7 versions, 0 duplicates, 0 dead letters"
    """
    facts, broken = found.facts, sum(len(result.violations) for result in found.results)
    counts = [
        (len(facts.first_prompts()), "group"),
        (len({fact.entry.step for fact in facts.steps()}), "step"),
        (len(facts.first_manifests()), "version"),
        (sum(duplicates(facts).values()), "duplicate"),
        (sum(letters(facts).values()), "dead letter"),
    ]
    verdict = "clean" if found.clean else _count(broken, "violation")
    under_way = "" if facts.closed else f", {fates(facts)['open']} groups open, the run is under way"
    return f"audit: {verdict}, {', '.join(_count(number, what) for number, what in counts)}{under_way}"


def as_table(found: Audit) -> dict[str, Any]:
    """Everything, ready for JSON."""
    facts = found.facts
    return {
        "run": facts.run,
        "clean": found.clean,
        "closed": facts.closed is not None,
        "summary": summary(found),
        "records": dict(sorted(facts.counts.items())),
        "fates": fates(facts),
        "steps": len(facts.steps()),
        "versions": len(facts.first_manifests()),
        "duplicates": duplicates(facts),
        "dead_letters": letters(facts),
        "redrawn": [
            {
                "group": one.group,
                "sample": one.sample,
                "first": {"where": str(one.first.where), "worker": one.first.worker, "sent_s": one.first.timestamp_ms / 1000},
                "again": {"where": str(one.again.where), "worker": one.again.worker, "started_s": one.again.started_ns / 1e9},
                "after_s": one.after_s,
            }
            for one in redrawn(facts)
        ],
        "checks": [
            {
                "check": result.check.name,
                "promise": result.check.promise,
                "examined": result.examined,
                "of": result.check.counts,
                "violations": [_plain(violation) for violation in result.violations],
            }
            for result in found.results
        ],
        "notes": list(notes(facts)),
    }


def as_text(found: Audit) -> str:
    """A table of the checks, what was told beside it, and the one line."""
    facts, width = found.facts, max(len(result.check.name) for result in found.results)
    lines = [f"{'check':<{width}}  violations  examined"]
    for result in found.results:
        examined = f"{result.examined:,} {result.check.counts}"
        lines.append(f"{result.check.name:<{width}}  {len(result.violations) or '-':>10}  {examined:<24}  {result.check.promise}")
        lines += [f"    {_line(violation)}" for violation in result.violations[:SHOWN]]
        if len(result.violations) > SHOWN:
            lines.append(f"    and {len(result.violations) - SHOWN} more; --json lists them")
    for title, counts in (("groups by fate", fates(facts)), ("duplicates", duplicates(facts)), ("dead letters", letters(facts))):
        told = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
        lines.append(f"{title}: {told}")
    lines += [f"note: {note}" for note in notes(facts)]
    return "\n".join([*lines, summary(found)])


def _line(violation: Violation) -> str:
    places = [f"{name} {value}" for name in ("group", "step", "version") if (value := getattr(violation, name)) is not None]
    place = ", ".join([*places, *([str(violation.where)] if violation.where else [])])
    return f"{place}: {violation.text}" if place else violation.text


def _plain(violation: Violation) -> dict[str, Any]:
    place = {name: getattr(violation, name) for name in ("group", "step", "version")}
    return {"text": violation.text, **place, "where": str(violation.where) if violation.where else None}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
