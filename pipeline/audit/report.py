"""The whole audit of a run, as plain data and as text.

The rule: the last line is the summary; every violation has coordinates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.audit.anchors import Anchor
from penstock.pipeline.audit.check import Violation
from penstock.pipeline.audit.checks.gone import Gone
from penstock.pipeline.audit.checks.groups import fates
from penstock.pipeline.audit.checks.registry import Result, examine
from penstock.pipeline.audit.collect import gather
from penstock.pipeline.audit.facts import Facts
from penstock.pipeline.audit.notes import duplicates, letters, notes, redrawn
from penstock.pipeline.audit.source import Source, Unreadable

SHOWN = 5
"""Number of violations of one check that are printed; --json has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The facts of a run and the result of every check."""

    facts: Facts
    results: tuple[Result, ...]

    @property
    def clean(self) -> bool:
        """True if no promise is broken."""
        return not any(result.violations for result in self.results)


def audit(source: Source, anchors: Sequence[Anchor] = ()) -> Audit:
    """Read a run and judge it, also by what was read elsewhere before; raises `Unreadable`."""
    facts = gather(source)
    facts.anchors.extend(anchors)
    if facts.closed is not None and not facts.workers and not facts.cut("metrics"):
        raise Unreadable(f"run {facts.run} is closed and no worker has measured anything in it: it holds nobody's work to judge")
    return Audit(facts=facts, results=tuple(examine(facts)))


def summary(audited: Audit) -> str:
    """The audit in one line.

    Example:
        summary(audited)  # -> "audit: clean, 96 groups, 12 steps, 7 versions, 0 duplicates, 0 dead letters"
    """
    facts, broken = audited.facts, sum(len(result.violations) for result in audited.results)
    counts = [
        (len(facts.prompts.first) + len(Gone(facts).groups()), "group"),
        (len({fact.entry.step for fact in facts.steps()}), "step"),
        (len(facts.first_manifests()), "version"),
        (sum(duplicates(facts).values()), "duplicate"),
        (sum(letters(facts).values()), "dead letter"),
    ]
    verdict = "clean" if audited.clean else _count(broken, "violation")
    under_way = "" if facts.closed else f", {fates(facts)['open']} groups open, the run is under way"
    return f"audit: {verdict}, {', '.join(_count(number, what) for number, what in counts)}{under_way}"


def as_table(audited: Audit) -> dict[str, Any]:
    """The whole audit as plain data for JSON."""
    facts = audited.facts
    return {
        "run": facts.run,
        "clean": audited.clean,
        "closed": facts.closed is not None,
        "summary": summary(audited),
        "records": dict(sorted(facts.counts.items())),
        "fates": fates(facts),
        "deleted_below": {f"{topic}/{partition}": begin for (topic, partition), begin in facts.begins.items() if begin},
        "steps": len(facts.steps()),
        "versions": len(facts.first_manifests()),
        "duplicates": duplicates(facts),
        "dead_letters": letters(facts),
        "redrawn": [
            {
                "group": pair.again.group,
                "sample": pair.again.sample,
                "first": {"where": str(pair.first.where), "worker": pair.first.worker, "sent_s": pair.first.timestamp_ms / 1000},
                "again": {"where": str(pair.again.where), "worker": pair.again.worker, "started_s": pair.started_ns / 1e9},
                "after_s": (pair.started_ns - pair.first.timestamp_ms * 1_000_000) / 1e9,
            }
            for pair in redrawn(facts)
        ],
        "checks": [
            {
                "check": result.check.name,
                "promise": result.check.promise,
                "examined": result.examined,
                "of": result.check.counts,
                "violations": [_plain(violation) for violation in result.violations],
            }
            for result in audited.results
        ],
        "notes": list(notes(facts)),
    }


def as_text(audited: Audit) -> str:
    """A table of the checks, the notes, and the summary line."""
    facts, width = audited.facts, max(len(result.check.name) for result in audited.results)
    lines = [f"{'check':<{width}}  violations  examined"]
    for result in audited.results:
        examined = f"{result.examined:,} {result.check.counts}"
        lines.append(f"{result.check.name:<{width}}  {len(result.violations) or '-':>10}  {examined:<24}  {result.check.promise}")
        lines += [f"    {_line(violation)}" for violation in result.violations[:SHOWN]]
        if len(result.violations) > SHOWN:
            lines.append(f"    and {len(result.violations) - SHOWN} more; --json lists them")
    for title, counts in (("groups by fate", fates(facts)), ("duplicates", duplicates(facts)), ("dead letters", letters(facts))):
        figures = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
        lines.append(f"{title}: {figures}")
    lines += [f"note: {note}" for note in notes(facts)]
    return "\n".join([*lines, summary(audited)])


def _line(violation: Violation) -> str:
    coordinates = [f"{name} {value}" for name in ("group", "step", "version") if (value := getattr(violation, name)) is not None]
    where = ", ".join([*coordinates, *([str(violation.where)] if violation.where else [])])
    return f"{where}: {violation.text}" if where else violation.text


def _plain(violation: Violation) -> dict[str, Any]:
    coordinates = {name: getattr(violation, name) for name in ("group", "step", "version")}
    return {"text": violation.text, **coordinates, "where": str(violation.where) if violation.where else None}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
