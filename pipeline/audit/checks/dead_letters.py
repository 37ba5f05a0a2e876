"""Checks on dead letters: that each is true, and that no unusable record lacks one.

The rule: a record without a dead letter is a violation only where the log proves that its reader has passed it.
"""

from collections.abc import Callable, Iterator, Mapping

from penstock.pipeline.audit.check import Violation, check
from penstock.pipeline.audit.checks.gone import Gone
from penstock.pipeline.audit.facts import INCOMPLETE, Facts, LetterFact, Unusable
from penstock.topics import weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.dead_letters import SKIPPED
from penstock.topics.wire.record import RecordId


@check("letters", "a dead letter carries the record that it names", dead_letters=lambda facts: len(facts.letters))
def true(facts: Facts) -> Iterator[Violation]:
    """A dead letter names a record that exists and carries its bytes."""
    for letter in facts.letters:
        if letter.kind == SKIPPED:
            continue  # of what lies there nothing can be read
        body = facts.bodies.get(letter.about)
        if facts.deleted(letter.about):
            continue
        if body is None and letter.about.topic != RUNS_TOPIC:  # the register is compacted: the record may be deleted
            yield Violation(text=f"a dead letter about {letter.about}, where there is no record", where=letter.where)
        elif body is not None and body != letter.body:
            yield Violation(text=f"a dead letter about {letter.about} carries other bytes than lie there", where=letter.where)


@check("letters-once", "no process sets a record aside twice", dead_letters=lambda facts: len(facts.letters))
def once(facts: Facts) -> Iterator[Violation]:
    """One process sets a record aside once; another process that takes over may do so again."""
    first_letters: dict[tuple[RecordId, str], LetterFact] = {}
    if facts.cut("metrics"):
        return  # which processes ran under a name is not known
    for letter in facts.letters:
        key = (letter.about, letter.worker)
        if key in first_letters and _processes(facts, letter) < 2:
            text = f"{letter.worker} has set {letter.about} aside already, at {first_letters[key].where}"
            yield Violation(text=text, where=letter.where)
        first_letters.setdefault(key, letter)


def _processes(facts: Facts, letter: LetterFact) -> int:
    """Number of processes that had run under the writer's name by then."""
    return sum(worker == letter.worker and fact.began_ns <= letter.time_ns for (worker, _), fact in facts.workers.items())


@check("accounted", "a record nobody can use has its dead letter", unusable_records=lambda facts: len(facts.unusable))
def accounted(facts: Facts) -> Iterator[Violation]:
    """Every record that cannot be used has its dead letter, once its reader has passed it."""
    passed: dict[tuple[str, int], int] = {}
    for record in unaccounted(facts):
        topic, partition, offset = record.where
        if (topic, partition) not in passed:
            passed[topic, partition] = _passed(facts, topic, partition)
        if offset < passed[topic, partition]:
            text = f"cannot be used ({record.kind}: {record.reason}) and has no dead letter"
            yield Violation(text=text, group=record.group, where=record.where)


def unaccounted(facts: Facts) -> list[Unusable]:
    """Records that cannot be used, repeat nothing, and have no dead letter; none while the run goes on."""
    if facts.closed is None:
        return []
    named = {letter.about for letter in facts.letters} | replaced_chunks(facts)
    left = [record for record in facts.unusable if record.where.topic != "dead-letters" and record.where not in named]
    if not left:
        return []
    gone = Gone(facts)
    return [record for record in left if record.kind != INCOMPLETE and not _dropped_unread(facts, record, gone)]


def replaced_chunks(facts: Facts) -> set[RecordId]:
    """RecordId chunks lay that were sent again: a later manifest of the same version says where they are now."""
    listed, current = (
        {RecordId("weights", *place) for fact in found for place in weights.chunk_places(fact.manifest)}
        for found in (facts.manifests, facts.first_manifests().values())
    )
    return listed - current


def _dropped_unread(facts: Facts, record: Unusable, gone: Gone) -> bool:
    """True if its reader dropped it as a duplicate, by headers that were valid, or may have done so: what it repeats may be gone."""
    topic, partition, offset = record.where
    if record.group is None:
        return False
    outcome = facts.outcomes.first.get(record.group)
    if topic == "groups":
        # It is unknown which of two partitions was read first.
        if outcome is None:
            return gone.outcome(record.group)
        return outcome.where.partition != partition or outcome.where.offset < offset
    if topic == "rollouts":
        if (outcome is not None and not outcome.samples.numbers) or gone.samples(partition, record.group):
            return True  # the group may have ended before the sample arrived
        firsts = [facts.samples.first(partition, record.group, sample) for sample in record.samples]
        return all(first is not None and first.where.offset < offset for first in firsts)
    return False


def _passed(facts: Facts, topic: str, partition: int) -> int:
    """The offset up to which a partition was certainly read; -1 if nothing shows any."""
    read = _READ.get(topic)
    return max(read(facts, partition), default=-1) if read is not None else -1


def _drawn_prompts(facts: Facts, partition: int) -> list[int]:
    """Offsets of the prompts that samples were drawn from."""
    drawn = {sample.group for sample in facts.samples if sample.where.partition == partition}
    return [prompt.where.offset for prompt in facts.prompts if prompt.where.partition == partition and prompt.group in drawn]


def _scored_samples(facts: Facts, partition: int) -> list[int]:
    """Offsets of the samples of groups whose outcome holds samples."""
    found = (sample for sample in facts.samples.firsts() if sample.where.partition == partition)
    ended = ((sample, facts.outcomes.first.get(sample.group)) for sample in found)
    return [sample.where.offset for sample, outcome in ended if outcome is not None and outcome.samples.numbers]


def _used_groups(facts: Facts, partition: int) -> list[int]:
    """Offsets of the outcomes that were trained or stale."""
    trained, stale, here = facts.planned.first, facts.stale(), (fact for fact in facts.outcomes if fact.where.partition == partition)
    return [fact.where.offset for fact in here if fact.group in trained or fact.group in stale]


def _listed_weights(facts: Facts, partition: int) -> list[int]:
    """Offsets of the manifests' chunks; on partition 0, of the manifests except the last two."""
    if partition == 0:
        # A round was trained since: the same reader read its groups, behind this record.
        return sorted(fact.where.offset for fact in facts.manifests)[:-2]
    # Before a manifest is written, the records between its chunks and the last version's are read.
    manifests = [fact.manifest for fact in facts.manifests]
    chunks = [chunk for listed in manifests for chunk in zip(listed.chunk_partitions, listed.chunk_offsets, strict=True)]
    return [offset for at, offset in chunks if at == partition]


def _tracked_ledger(facts: Facts, _: int) -> list[int]:
    """Offset of the closing entry, if a tracker ended in order: it reads the ledger to its end."""
    closing = [fact.where.offset for fact in facts.entries if fact.entry.kind == "run-closed"]
    return closing if _tracker_end(facts) >= 0 else []


def _tracked_metrics(facts: Facts, _: int) -> list[int]:
    """Offsets of the other workers' last measurements before the tracker's own."""
    others = [worker.final for worker in facts.workers.values() if worker.role != "tracker" and worker.final is not None]
    return [offset for offset in others if offset < _tracker_end(facts)]


def _tracker_end(facts: Facts) -> int:
    """Offset of the last measurement of a tracker that ended in order; -1 if none did."""
    return max((worker.final or -1 for worker in facts.workers.values() if worker.role == "tracker"), default=-1)


_READ: Mapping[str, Callable[[Facts, int], list[int]]] = {
    "prompts": _drawn_prompts,
    "rollouts": _scored_samples,
    "groups": _used_groups,
    "weights": _listed_weights,
    "ledger": _tracked_ledger,
    "metrics": _tracked_metrics,
}
"""Topic -> the offsets of one of its partitions that the log shows to have been read."""


CHECKS = (true, once, accounted)
