"""Checks on dead letters: each carries its record, and every unusable record has one.

A record without a dead letter is a violation only if the log proves that its reader has read past it.
"""

from collections.abc import Callable, Iterator, Mapping

from penstock.pipeline.inspect.audit.check import Violation, check
from penstock.pipeline.inspect.audit.facts import INCOMPLETE, DeadLetterFact, Facts, Unusable
from penstock.topics import weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.dead_letters import SKIPPED
from penstock.topics.wire.record import RecordId


@check("letters", "a dead letter carries the record that it names", dead_letters=lambda facts: len(facts.dead_letters))
def true(facts: Facts) -> Iterator[Violation]:
    for fact in facts.dead_letters:
        if fact.kind == SKIPPED:
            continue  # a skipped offset range cannot be read
        body = facts.bodies.get(fact.about)
        if facts.deleted(fact.about):
            continue
        if body is None and fact.about.topic != RUNS_TOPIC:  # the topic of all runs is compacted: the record may be deleted
            yield Violation(text=f"a dead letter names {fact.about}, where there is no record", where=fact.where)
        elif body is not None and body != fact.body:
            yield Violation(text=f"a dead letter for {fact.about} contains other bytes than the record", where=fact.where)


@check("letters-once", "no process writes two dead letters for a record", dead_letters=lambda facts: len(facts.dead_letters))
def once(facts: Facts) -> Iterator[Violation]:
    """Yield second dead letters of a process about one record; a restarted worker may write another one."""
    firsts: dict[tuple[RecordId, str], DeadLetterFact] = {}
    if facts.truncated("metrics"):
        return  # the processes of a worker name are unknown
    for fact in facts.dead_letters:
        key = (fact.about, fact.worker)
        if key in firsts and _processes(facts, fact) < 2:
            text = f"{fact.worker} already wrote a dead letter for {fact.about}, at {firsts[key].where}"
            yield Violation(text=text, where=fact.where)
        firsts.setdefault(key, fact)


def _processes(facts: Facts, dead_letter: DeadLetterFact) -> int:
    """Return the number of processes of this worker name that had started when the dead letter was written."""
    return sum(worker == dead_letter.worker and process.started_ns <= dead_letter.time_ns for (worker, _), process in facts.workers.items())


@check("accounted", "an unusable record has its dead letter", unusable_records=lambda facts: len(facts.unusable))
def accounted(facts: Facts) -> Iterator[Violation]:
    """Yield unusable records without a dead letter, if the log proves that their reader has read past them."""
    read_up_to: dict[tuple[str, int], int] = {}
    for record in unaccounted(facts):
        topic, partition, offset = record.where
        if (topic, partition) not in read_up_to:
            read_up_to[topic, partition] = _read_up_to(facts, topic, partition)
        if offset < read_up_to[topic, partition]:
            text = f"the record is unusable ({record.kind}: {record.reason}) and has no dead letter"
            yield Violation(text=text, group=record.group, where=record.where)


def unaccounted(facts: Facts) -> list[Unusable]:
    """Return unusable records that need a dead letter and have none; empty while the run is active."""
    if facts.closed is None:
        return []
    named = {fact.about for fact in facts.dead_letters} | replaced_chunks(facts)
    unnamed = (record for record in facts.unusable if record.where.topic != "dead-letters" and record.where not in named)
    return [record for record in unnamed if record.kind != INCOMPLETE and not _dropped_unread(facts, record)]


def replaced_chunks(facts: Facts) -> set[RecordId]:
    """Return the offsets of chunks that a later manifest of their version replaces."""
    listed, current = (
        {RecordId("weights", *position) for fact in manifests for position in weights.chunk_places(fact.manifest)}
        for manifests in (facts.manifests, facts.first_manifests().values())
    )
    return listed - current


def _dropped_unread(facts: Facts, record: Unusable) -> bool:
    """True if the reader dropped, or may have dropped, the record as a duplicate because of its headers, without decoding it."""
    topic, partition, offset = record.where
    if record.group is None:
        return False
    query = """
        SELECT slot, sample_count, outcome_partition != :partition OR outcome_offset < :offset, outcome_deleted FROM lifecycles
        WHERE group_id = :group
    """
    unknown = (None, None, None, bool(facts.truncated("groups")))
    slot, sample_count, earlier, outcome_deleted = next(facts.rows(query, partition=partition, offset=offset, group=record.group), unknown)
    if topic == "groups":
        # The order in which two partitions were read is unknown.
        return bool(outcome_deleted if earlier is None else earlier)
    if topic == "rollouts":
        if sample_count == 0 or facts.value("SELECT coalesce(?, 0) < slot_limit('rollouts', ?)", slot, partition):
            return True  # the group may have ended before the sample arrived
        query = "SELECT offset FROM samples WHERE group_id = ? AND partition = ? AND sample = ? AND kind = 'first' AND offset < ?"
        return all(facts.value(query, record.group, partition, sample, offset) is not None for sample in record.samples)
    return False


def _read_up_to(facts: Facts, topic: str, partition: int) -> int:
    """Return the highest offset of a partition that was read according to the log; -1 if the log proves none."""
    if topic in _READ_BY_GROUP:
        return int(facts.value(_READ_BY_GROUP[topic], partition))
    return max(_READ[topic](facts, partition), default=-1) if topic in _READ else -1


_READ_BY_GROUP = {
    "prompts": """
        SELECT coalesce(max(offset), -1) FROM prompts p WHERE partition = ?
        AND EXISTS (SELECT 1 FROM samples s WHERE s.group_id = p.group_id AND s.partition = p.partition)
    """,
    "rollouts": """
        SELECT coalesce(max(s.offset), -1) FROM samples s JOIN lifecycles USING (group_id)
        WHERE s.partition = ? AND kind = 'first' AND sample_count > 0
    """,
    "groups": """
        SELECT coalesce(max(o.offset), -1) FROM outcomes o WHERE partition = ?
        AND EXISTS (SELECT 1 FROM decided d WHERE d.group_id = o.group_id)
    """,
}
"""Topic -> query for the newest record of a partition that was certainly read: a prompt with samples, a sample in an outcome, an outcome
that was trained or stale."""


def _listed_weights(facts: Facts, partition: int) -> list[int]:
    """Return offsets that the trainer has read for certain: on partition 0 manifests except the last two, else the manifests' chunks."""
    if partition == 0:
        # The trainer has trained a round since, whose groups it read after this record.
        return sorted(fact.where.offset for fact in facts.manifests)[:-2]
    # Before a manifest is written, the records between its chunks and the last version's are read.
    chunks = [chunk for fact in facts.manifests for chunk in weights.chunk_places(fact.manifest)]
    return [offset for chunk_partition, offset in chunks if chunk_partition == partition]


def _tracked_ledger(facts: Facts, _: int) -> list[int]:
    """Return the offset of the closing entry if a tracker exited normally, because it reads the ledger to its end."""
    closing = [fact.where.offset for fact in facts.entries if fact.entry.kind == "run-closed"]
    return closing if _tracker_end(facts) >= 0 else []


def _tracked_metrics(facts: Facts, _: int) -> list[int]:
    """Return offsets that the tracker has read for certain: other workers' final reports before its own, with which it exited."""
    others = [worker.final for worker in facts.workers.values() if worker.role != "tracker" and worker.final is not None]
    return [offset for offset in others if offset < _tracker_end(facts)]


def _tracker_end(facts: Facts) -> int:
    """Return the offset of the final measurement of a tracker that exited normally; -1 if none did."""
    return max((worker.final or -1 for worker in facts.workers.values() if worker.role == "tracker"), default=-1)


_READ: Mapping[str, Callable[[Facts, int], list[int]]] = {
    "weights": _listed_weights,
    "ledger": _tracked_ledger,
    "metrics": _tracked_metrics,
}
"""Topic -> function that returns offsets of a partition that were certainly read."""

CHECKS = (true, once, accounted)
