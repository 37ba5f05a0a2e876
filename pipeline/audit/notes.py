"""The notes of an audit beside its violations: duplicates, samples drawn again, what could not be judged.

The rule: a note is no broken promise; evidence that is one-sided or depends on clocks is reported here, with its figures.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from penstock.pipeline.audit.checks.dead_letters import accounted, unaccounted
from penstock.pipeline.audit.checks.gone import Gone
from penstock.pipeline.audit.checks.groups import fates
from penstock.pipeline.audit.checks.prompts import one_clock
from penstock.pipeline.audit.facts import Facts
from penstock.pipeline.audit.kept.samples import LaterSample
from penstock.pipeline.audit.rules import as_object
from penstock.topics.metrics import EVERY_RUN_HAS


def redrawn(facts: Facts) -> list[LaterSample]:
    """Samples drawn again although they were in the log, judged by clocks: a record's timestamp is its sending time."""
    drawn_again = (pair for pair in facts.samples.later if pair.again.body != pair.first.body)
    return [pair for pair in drawn_again if pair.started_ns >= (pair.first.timestamp_ms + 1) * 1_000_000]


def duplicates(facts: Facts) -> dict[str, int]:
    """Kind -> number of records that repeat others; readers drop them all."""
    later = facts.samples.later
    copies = sum(pair.first.body == pair.again.body for pair in later)
    listed = {
        (partition, offset)
        for fact in facts.manifests
        for partition, offset in zip(fact.manifest.chunk_partitions, fact.manifest.chunk_offsets, strict=True)
    }
    counts = {
        "prompts": facts.repeats.get("prompts", 0),
        "samples sent twice": copies,
        "samples drawn twice": len(later) - copies,
        "groups": facts.repeats.get("groups", 0),
        "ledger": facts.repeats.get("ledger", 0),
        "manifests": facts.repeats.get("weights", 0),
        "chunks of no manifest": sum((where.partition, where.offset) not in listed for where in facts.chunks),
        "metrics": facts.repeats.get("metrics", 0),
        "dead letters": len(facts.letters) - len({letter.about for letter in facts.letters}),
    }
    return {name: count for name, count in counts.items() if count}


def letters(facts: Facts) -> dict[str, int]:
    """Class of the reason -> number of records that were set aside."""
    return dict(sorted(Counter({letter.about: letter.kind for letter in facts.letters}.values()).items()))


def notes(facts: Facts) -> Iterator[str]:
    """Facts a person should know, a line each."""
    for note in _NOTES:
        yield from note(facts)


def _under_way(facts: Facts) -> Iterator[str]:
    if facts.closed is None:
        yield "the run is under way: groups without a fate are open, and records without a dead letter are not judged"
        if facts.unusable:
            yield f"{len(facts.unusable)} records cannot be used, {len(facts.letters)} dead letters are there so far"


def _deleted(facts: Facts) -> Iterator[str]:
    for topic in dict.fromkeys(topic for topic, _ in facts.begins):
        # Of weights the note on digests says what is gone, but for the manifests.
        places = [place for place in facts.cut(topic) if topic != "weights" or not place[1]]
        if places:
            where = ", ".join(f"{topic}/{partition} below {facts.begins[topic, partition]}" for _, partition in places)
            yield f"records were deleted: {where}; what only they show is not judged"
    if facts.cut("prompts") or facts.cut("groups"):
        yield f"of {len(Gone(facts).groups())} groups the prompt is gone, of {fates(facts).get('gone', 0)} the fate"


def _killers(facts: Facts) -> Iterator[str]:
    if facts.killers:
        yield f"{len(facts.killers)} records were set aside because they had ended their readers"


def _silent_roles(facts: Facts) -> Iterator[str]:
    if (roles := set(EVERY_RUN_HAS) - {worker.role for worker in facts.workers.values()}) and not facts.cut("metrics"):
        yield f"no measurement of: {', '.join(sorted(roles))}; what only they read was not read by anybody"


def _clocks(facts: Facts) -> Iterator[str]:
    if not one_clock(facts):
        apart = "feeder and trainer were not on one machine"
        yield f"{'measurements were deleted' if facts.cut('metrics') else apart}: times of admission and of versions were not compared"


def _missing_measurements(facts: Facts) -> Iterator[str]:
    if gaps := sum(worker.seqs.missing() for worker in facts.workers.values()):
        yield f"{gaps} measurements are missing between others of their process"


def _lost_samples(facts: Facts) -> Iterator[str]:
    gone = Gone(facts)
    places = [(facts.prompts.first.get(sample.group), sample) for sample in facts.samples.astray()]
    absent = sum(prompt is None and not gone.prompt(sample.group) for prompt, sample in places)
    if lost := absent + sum(prompt is not None and prompt.where.partition != sample.where.partition for prompt, sample in places):
        yield f"{lost} samples belong to no prompt of their partition"


def _unusable_letters(facts: Facts) -> Iterator[str]:
    if strangers := sum(record.where.topic == "dead-letters" for record in facts.unusable):
        yield f"{strangers} records in dead-letters cannot be used; nobody reads that topic"


def _unread(facts: Facts) -> Iterator[str]:
    if left := len(unaccounted(facts)) - sum(1 for _ in accounted.rule(facts)):
        yield f"{left} records cannot be used and have no dead letter; nothing shows that a reader had come to them before the run ended"


def _digests(facts: Facts) -> Iterator[str]:
    if released := sum(recomputed.released for recomputed in facts.recomputed.values()):
        yield f"chunks of {released} versions were released by retention: their digests cannot be recomputed"
    if again := len(facts.manifests) - len(facts.first_manifests()):
        yield f"{again} times a version was published again, with the same digest"


def _redrawn(facts: Facts) -> Iterator[str]:
    if again := redrawn(facts):
        workers = Counter(sample.again.worker for sample in again)
        who = ", ".join(f"{worker} {count}" for worker, count in workers.most_common())
        yield f"{len(again)} samples were begun after the first record of them had been sent ({who}); --json lists them"


def _rebased(facts: Facts) -> Iterator[str]:
    for fact in facts.entries:
        if fact.entry.kind == "rebased":
            found = as_object(fact.entry.details).get("differences", [])
            what = f"{len(found)} numbers of repeated steps differed" if found else "the arithmetic had changed"
            yield f"rebased after {fact.entry.step} steps ({fact.where}): {what}; the run went on from what the repetition gave"


def _changed(facts: Facts) -> Iterator[str]:
    for change in facts.changes:
        done = sum(fact.entry.kind == "step" and fact.entry.time_ns <= change["time_ns"] for fact in facts.entries)
        digests = f"{change['before'][:12]} -> {change['after'][:12]}"
        yield f"{change['what']} was changed while the run was stopped, after {done} steps: {digests}"


_NOTES: tuple[Callable[[Facts], Iterator[str]], ...] = (
    _under_way,
    _deleted,
    _killers,
    _silent_roles,
    _clocks,
    _missing_measurements,
    _lost_samples,
    _unusable_letters,
    _unread,
    _digests,
    _changed,
    _rebased,
    _redrawn,
)
