"""Runs an audit, and formats its checks, duplicates and notes as plain data and as text."""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.pipeline.inspect.audit.check import Check, Violation
from penstock.pipeline.inspect.audit.checks import dead_letters, groups, prompts, steps, versions
from penstock.pipeline.inspect.audit.checks.dead_letters import accounted, unaccounted
from penstock.pipeline.inspect.audit.checks.groups import group_statuses
from penstock.pipeline.inspect.audit.checks.prompts import one_clock
from penstock.pipeline.inspect.audit.chunk_digests import TopicDigests
from penstock.pipeline.inspect.audit.collect import collect
from penstock.pipeline.inspect.audit.facts import Anchor, Facts
from penstock.pipeline.inspect.audit.rules import as_object
from penstock.pipeline.inspect.audit.source import Source, Unreadable
from penstock.topics.metrics import EVERY_RUN_HAS
from penstock.topics.weights import chunk_places


def duplicates(facts: Facts) -> dict[str, int]:
    """Return kind -> number of records that repeat earlier ones, which all readers drop; kinds without repetition are left out."""
    ((later, copies),) = facts.rows("SELECT count(*), coalesce(sum(copied), 0) FROM later_samples")
    listed = {position for fact in facts.manifests for position in chunk_places(fact.manifest)}
    counts = {
        "prompts": facts.repeats.get("prompts", 0),
        "samples sent twice": copies,
        "samples generated twice": later - copies,
        "groups": facts.repeats.get("groups", 0),
        "ledger": facts.repeats.get("ledger", 0),
        "manifests": facts.repeats.get("weights", 0),
        "chunks of no manifest": sum((where.partition, where.offset) not in listed for where in facts.chunks),
        "metrics": facts.repeats.get("metrics", 0),
        "dead letters": len(facts.dead_letters) - len({dead_letter.about for dead_letter in facts.dead_letters}),
    }
    return {name: count for name, count in counts.items() if count}


def dead_letter_kinds(facts: Facts) -> dict[str, int]:
    """Return kind of dead letter -> number of records that were dead-lettered."""
    return dict(sorted(Counter({fact.about: fact.kind for fact in facts.dead_letters}.values()).items()))


def notes(facts: Facts) -> Iterator[str]:
    """Yield findings that are not violations, as sentences: weak evidence, evidence from clocks, and what cannot be checked."""
    if facts.closed is None:
        yield "the run is active: groups without a final status are open, and missing dead letters are not violations"
        if facts.unusable:
            yield f"{len(facts.unusable)} records are unusable, {len(facts.dead_letters)} dead letters have been written so far"
    yield from _deleted(facts)
    if facts.poison:
        yield f"{len(facts.poison)} valid records were dead-lettered because they crashed their readers"
    yield from _about_workers(facts)
    yield from _about_records(facts)
    yield from _about_the_run(facts)


def _deleted(facts: Facts) -> Iterator[str]:
    """Yield which records retention has deleted, so that promises about them cannot be checked."""
    for topic in dict.fromkeys(topic for topic, _ in facts.start_offsets):
        # `_about_records` reports deleted chunks.
        partitions = [number for _, number in facts.truncated(topic) if topic != "weights" or not number]
        if partitions:
            where = ", ".join(f"{topic}/{partition} below {facts.start_offsets[topic, partition]}" for partition in partitions)
            yield f"retention has deleted records: {where}; promises that depend on these records are not checked"
    if facts.truncated("prompts") or facts.truncated("groups"):
        unknown = group_statuses(facts).get("gone", 0)
        absent = facts.value("SELECT count(*) FROM lifecycles WHERE admitted AND slot IS NULL")
        yield f"the prompts of {absent} groups were deleted, and the final status of {unknown}"


def _about_workers(facts: Facts) -> Iterator[str]:
    """Yield missing reports of workers, and whether their clocks could be compared."""
    if (roles := set(EVERY_RUN_HAS) - {worker.role for worker in facts.workers.values()}) and not facts.truncated("metrics"):
        yield f"no worker of these roles has reported: {', '.join(sorted(roles))}"
    if not one_clock(facts):
        cause = "measurements were deleted" if facts.truncated("metrics") else "feeder and trainer were not on one machine"
        yield f"{cause}: times of admission and of versions were not compared"
    spans = facts.rows("SELECT worker, incarnation, max(seq) + 1 - count(*) FROM measurements GROUP BY worker, incarnation")
    if gaps := sum(missing - facts.workers[worker, incarnation].first_seq for worker, incarnation, missing in spans):
        yield f"{gaps} measurements are missing between measurements of the same process"


def _about_records(facts: Facts) -> Iterator[str]:
    """Yield counts of records that are lost, unusable, deleted or repeated without a violation."""
    query = """
        SELECT count(*) FROM samples s LEFT JOIN lifecycles l USING (group_id)
        WHERE s.partition != l.partition OR (slot IS NULL AND group_id >= ?)
    """
    if lost := facts.value(query, facts.prompts_below):
        yield f"{lost} samples have no prompt in their partition"
    if strangers := sum(record.where.topic == "dead-letters" for record in facts.unusable):
        yield f"{strangers} records in dead-letters are unusable; no worker reads that topic, so nothing was affected"
    if remaining := len(unaccounted(facts)) - sum(1 for _ in accounted.rule(facts)):
        yield f"{remaining} records are unusable and have no dead letter; the log does not prove that a reader has reached them"
    if released := sum(recomputed.released for recomputed in facts.recomputed.values()):
        yield f"retention has deleted chunks of {released} versions, whose digests cannot be recomputed"
    if again := len(facts.manifests) - len(facts.first_manifests()):
        yield f"{again} manifests replace one of the same version and digest: a snapshot was added, or lost chunks were sent again"


def _about_the_run(facts: Facts) -> Iterator[str]:
    """Yield changes of data and code, rebases, and samples that were generated again."""
    for change in facts.changes:
        done = sum(fact.entry.kind == "step" and fact.entry.time_ns <= change["time_ns"] for fact in facts.entries)
        digests = f"{change['before'][:12]} -> {change['after'][:12]}"
        yield f"{change['what']} was changed while the run was stopped, after {done} steps: {digests}"
    for fact in facts.entries:
        if fact.entry.kind == "rebased":
            differences = as_object(fact.entry.details).get("differences", [])
            cause = f"{len(differences)} numbers of recomputed steps differed" if differences else "hardware or libraries had changed"
            yield f"rebased after {fact.entry.step} steps ({fact.where}): {cause}; the run resumed from the recomputed weights"
    query = "SELECT worker, count(*) AS again FROM later_samples WHERE resampled GROUP BY worker ORDER BY again DESC, min(number)"
    if workers := dict(facts.rows(query)):
        by_worker = ", ".join(f"{worker} {count}" for worker, count in workers.items())
        total = sum(workers.values())
        yield f"{total} samples were generated again after their first record had been sent ({by_worker}); --json lists them"


MODULES = (prompts, groups, steps, versions, dead_letters)
"""Modules with checks, in the order of a sample's lifecycle; each has a list `CHECKS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The violations that one check found, and the number of things it examined."""

    check: Check
    examined: int
    violations: tuple[Violation, ...]


def all_checks() -> tuple[Check, ...]:
    return tuple(check for module in MODULES for check in module.CHECKS)


SHOWN = 5
"""Largest number of printed violations per check; --json lists all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The facts of a run and the results of its checks."""

    facts: Facts
    results: tuple[Result, ...]

    @property
    def clean(self) -> bool:
        """True if there is no violation."""
        return not any(result.violations for result in self.results)


def audit(source: Source, anchors: Sequence[Anchor] = (), digests: TopicDigests | None = None) -> Audit:
    """Read a run and apply all checks; add every record to `digests`. Raises `Unreadable` if that is not possible.

    `anchors` are evidence of committed steps outside the log; the caller reads them before, because an active run adds more.
    """
    try:
        facts = collect(source, digests)
        facts.anchors.extend(anchors)
        if facts.closed is not None and not facts.workers and not facts.truncated("metrics"):
            raise Unreadable(f"run {facts.run} cannot be audited: it is closed and no worker has ever reported")
        results = [Result(check=check, examined=check.examined(facts), violations=tuple(check.rule(facts))) for check in all_checks()]
    except sqlite3.OperationalError as error:
        raise Unreadable(f"the audit cannot write a temporary file ({error}): set TMPDIR to a directory with more space") from error
    return Audit(facts=facts, results=tuple(results))


def summary(audited: Audit) -> str:
    """Summarise an audit in one line: "audit: clean, 96 groups, 12 steps, 7 versions, 0 duplicates, 0 dead letters"."""
    facts, broken = audited.facts, sum(len(result.violations) for result in audited.results)
    counts = [
        (facts.value("SELECT count(*) FROM lifecycles WHERE admitted"), "group"),
        (len({fact.entry.step for fact in facts.steps()}), "step"),
        (len(facts.first_manifests()), "version"),
        (sum(duplicates(facts).values()), "duplicate"),
        (sum(dead_letter_kinds(facts).values()), "dead letter"),
    ]
    outcome = "clean" if audited.clean else _count(broken, "violation")
    under_way = "" if facts.closed else f", {group_statuses(facts)['open']} groups open, the run is active"
    return f"audit: {outcome}, {', '.join(_count(number, what) for number, what in counts)}{under_way}"


def as_table(audited: Audit) -> dict[str, Any]:
    """Return what `penstock audit --json` prints."""
    facts = audited.facts
    return {
        "run": facts.run,
        "clean": audited.clean,
        "closed": facts.closed is not None,
        "summary": summary(audited),
        "records": dict(sorted(facts.counts.items())),
        "statuses": group_statuses(facts),
        "deleted_below": {f"{topic}/{partition}": start for (topic, partition), start in facts.start_offsets.items() if start},
        "steps": len(facts.steps()),
        "versions": len(facts.first_manifests()),
        "duplicates": duplicates(facts),
        "dead_letters": dead_letter_kinds(facts),
        "resampled": list(_resampled_samples(facts)),
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


def _resampled_samples(facts: Facts) -> Iterator[dict[str, Any]]:
    """Yield a row per sample that was generated again although its first record had been sent, with both records."""
    query = """
        SELECT group_id, sample, 'rollouts/' || partition || '/', first_offset, first_worker, sent_ms, offset, worker, started_ns
        FROM later_samples WHERE resampled ORDER BY number
    """
    for group, sample, partition, first, first_worker, sent_ms, again, worker, started_ns in facts.rows(query):
        yield {
            "group": group,
            "sample": sample,
            "first": {"where": f"{partition}{first}", "worker": first_worker, "sent_s": sent_ms / 1000},
            "again": {"where": f"{partition}{again}", "worker": worker, "started_s": started_ns / 1e9},
            "after_s": (started_ns - sent_ms * 1_000_000) / 1e9,
        }


def as_text(audited: Audit) -> str:
    """Format an audit: a table of the checks, the notes, and last the summary."""
    facts, width = audited.facts, max(len(result.check.name) for result in audited.results)
    lines = [f"{'check':<{width}}  violations  examined"]
    for result in audited.results:
        examined = f"{result.examined:,} {result.check.counts}"
        lines.append(f"{result.check.name:<{width}}  {len(result.violations) or '-':>10}  {examined:<24}  {result.check.promise}")
        lines += [f"    {as_line(violation)}" for violation in result.violations[:SHOWN]]
        if len(result.violations) > SHOWN:
            lines.append(f"    and {len(result.violations) - SHOWN} more; --json lists them")
    for title, counts in (
        ("groups by final status", group_statuses(facts)),
        ("duplicates", duplicates(facts)),
        ("dead letters", dead_letter_kinds(facts)),
    ):
        figures = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"
        lines.append(f"{title}: {figures}")
    lines += [f"note: {note}" for note in notes(facts)]
    return "\n".join([*lines, summary(audited)])


def as_line(violation: Violation) -> str:
    """Format a violation with its group, step, version and record."""
    coordinates = [f"{name} {value}" for name in ("group", "step", "version") if (value := getattr(violation, name)) is not None]
    where = ", ".join([*coordinates, *([str(violation.where)] if violation.where else [])])
    return f"{where}: {violation.text}" if where else violation.text


def _plain(violation: Violation) -> dict[str, Any]:
    coordinates = {name: getattr(violation, name) for name in ("group", "step", "version")}
    return {"text": violation.text, **coordinates, "where": str(violation.where) if violation.where else None}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
