"""Turns records into facts, topic by topic. An unreadable record is itself a fact; no record ends the audit."""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.pipeline.inspect.audit.anchors import of_trainer
from penstock.pipeline.inspect.audit.chunk_digests import verify_versions
from penstock.pipeline.inspect.audit.facts import (
    INCOMPLETE,
    DeadLetterFact,
    EntryFact,
    Facts,
    ManifestFact,
    ReplyFact,
    Unusable,
    WorkerFact,
)
from penstock.pipeline.inspect.audit.rules import as_object, oldest_trained, terms_of
from penstock.pipeline.inspect.audit.source import Source, Unreadable, plain
from penstock.pipeline.inspect.audit.store.groups import OutcomeFact, OutcomeSamples, PlannedFact, PromptFact
from penstock.pipeline.inspect.audit.store.hashes import (
    body_of,
    hash_of,
    prompt_hash,
    sample_hash,
    sampled_turns,
    tokens_hash,
    trajectory_flaw,
)
from penstock.pipeline.inspect.audit.store.samples import SampleFact, Samples
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.samples import Rollout
from penstock.topics.turns import calls, replies
from penstock.topics.wire import errors
from penstock.topics.wire.record import Record, RecordId

RETAINED = ("prompts", "calls", "replies", "rollouts", "groups", "weights", "metrics", "ledger", "dead-letters")
"""Topics in which deleted records are distinguished from lost ones."""
COMPLETE = {"ledger": "the final status of the run's groups", "dead-letters": "the unusable records"}
"""Topics that an audit needs from offset 0 -> what their records hold."""


def empty_facts(source: Source) -> Facts:
    """Facts with the run's terms, from its registration or else from the ledger's first entry. Raises `Unreadable`."""
    start_offsets = {
        (topic, partition): source.start_offset(topic, partition) for topic in RETAINED for partition in source.partitions(topic)
    }
    for topic, content in COMPLETE.items():
        if first := start_offsets.get((topic, 0), 0):
            raise Unreadable(f"{source.run}.{topic}/0: the records at offsets 0 to {first - 1} were deleted; they held {content}")
    config_and_info: tuple[dict[str, Any], dict[str, Any]] | None = None
    registered, own = _run_records(source, RUNS_TOPIC), _run_records(source, "run")
    status = registered[-1].status if registered else None
    # Only earlier releases wrote the configuration to the topic that all runs share.
    for created in own[-1:] or [record for record in registered[-1:] if record.config != runs.NOTHING]:
        config_and_info = as_object(created.config), as_object(created.info)
    for record in () if config_and_info else source.read("ledger"):
        try:
            entry = ledger.read(record, run=source.run)[1]
        except errors.Unusable:
            continue
        if entry.kind == "run-opened":
            details = as_object(entry.details)
            config_and_info = details.get("config", {}), details.get("info", {})
            break
    if config_and_info is None:
        raise Unreadable(f"neither the register of runs nor the ledger has the configuration of run {source.run}")
    config, info = config_and_info
    terms = terms_of(config, info)
    return Facts(
        run=source.run,
        terms=terms,
        samples=Samples(terms.samples_per_prompt + terms.oversample),
        changes=info.get("changes", ()),
        schedule=config.get("schedule"),
        status=status,
        start_offsets=start_offsets,
    )


def _run_records(source: Source, topic: str) -> list[runs.RunRecord]:
    """The usable registration records of the run in a topic."""
    records = []
    for record in source.read(topic):
        if record.key == source.run.encode():
            with contextlib.suppress(errors.Unusable):
                records.append(runs.read(record, run=source.run)[1])
    return records


ORDER = ("dead-letters", RUNS_TOPIC, "run", "metrics", "ledger", "prompts", "calls", "replies", "rollouts", "groups")
"""Dead letters first, so that the bytes of each record they name are hashed when it is read. Prompts before samples, samples before
outcomes, so that only hashes are stored for the comparison."""


def collect(source: Source) -> Facts:
    """Read a whole run; raises `Unreadable`."""
    collector = Collector(empty_facts(source))
    for topic in ORDER:
        for record in source.read(topic):
            collector.take(record, topic)
        collector.end_of(topic)
    for record in source.read("weights", [0]):
        collector.take(record, "weights")
    verify_versions(source, collector.facts, note=collector.note, refuse=collector.refuse)
    return collector.facts


class Collector:
    """Accumulates facts, and groups whose parts are not all read yet."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._named: dict[RecordId, str] = {}
        """Records with a dead letter -> its kind."""
        self._parts: dict[tuple[int, int, str], list[Record]] = {}
        self._prompt_ids: dict[int, Any] = {}
        """Group -> the tokens of its prompt, if turns are compared with replies."""
        self._first_bodies: dict[tuple[str, int], bytes] = {}
        """Topic and number -> hash of its first record."""

    def take(self, record: Record, topic: str) -> None:
        """Add one record of a topic."""
        where = self.note(record)
        fold = _FOLDS.get(topic)
        if fold is not None:
            try:
                fold(self, record, where)
            except errors.Unusable as error:
                self.refuse(record, error)

    def note(self, record: Record) -> RecordId:
        """Count a record; store the hash of its bytes if it has a dead letter."""
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.counts[where.topic] = self.facts.counts.get(where.topic, 0) + 1
        if where in self._named:
            self.facts.bodies[where] = body_of(record.key, record.headers, record.value)
        return where

    def refuse(self, record: Record, error: errors.Unusable) -> None:
        """Add an unusable record."""
        self._add_unusable(record, error.kind, str(error))

    def _add_unusable(self, record: Record, kind: str, reason: str) -> None:
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.unusable.append(Unusable(where, kind, reason, *self._claims(record, where.topic)))

    def end_of(self, topic: str) -> None:
        """Finish what needs all records of a topic."""
        if topic == "prompts":
            self._count_repeats("prompts", self.facts.prompts.drop_repeats())
            self.facts.samples.make_room(self.facts.prompts.first)
        elif topic == "groups":
            self._end_of_groups()
            self._count_repeats("groups", self.facts.outcomes.drop_repeats())

    def _end_of_groups(self) -> None:
        """Add the parts of incomplete groups as unusable."""
        for records in self._parts.values():
            if self.facts.deleted(RecordId("groups", records[0].partition, records[0].offset)):
                continue  # later parts may have been deleted too
            headers = groups.check(records[0], run=self.facts.run)
            problem = f"only {len(records)} of the {headers.parts} parts of group {headers.group} are in the log"
            for record in records:
                self._add_unusable(record, INCOMPLETE, problem)
        self._parts.clear()

    def _claims(self, record: Record, topic: str) -> tuple[int | None, tuple[int, ...]]:
        """Its group and, in `rollouts`, its samples, if its headers are valid."""
        check = {"prompts": prompts.check, "rollouts": rollouts.check, "groups": groups.check}.get(topic)
        try:
            headers = check(record, run=self.facts.run) if check else None
        except errors.Unusable:
            return None, ()
        if headers is None:
            return None, ()
        return headers.group, tuple(rollouts.tokens_of(headers)) if topic == "rollouts" else ()

    def _dead_letter(self, record: Record, where: RecordId) -> None:
        dead_letter = dead_letters.read(record, run=self.facts.run)[1]
        about = RecordId(plain(dead_letter.topic, self.facts.run), dead_letter.partition, dead_letter.offset)
        body = body_of(dead_letter.key, dead_letter.headers, dead_letter.value)
        self.facts.dead_letters.append(DeadLetterFact(where, about, dead_letter.kind, dead_letter.worker, dead_letter.time_ns, body))
        self._named[about] = dead_letter.kind
        if dead_letter.kind == "killer":
            self.facts.poison.add(about)

    def _prompt(self, record: Record, where: RecordId) -> None:
        prompt = prompts.read(record, run=self.facts.run)[1]
        numbers = (prompt.group, prompt.slot, prompt.min_version, prompt.samples_per_prompt, prompt.created_ns)
        self._prompt_ids |= {prompt.group: prompt.token_ids} if self.facts.terms.turns_by_log else {}
        self.facts.prompts.add(PromptFact(where, *numbers, prompt_hash(prompt, prompt.token_ids), hash_of(record.value)))
        self._note_first(where, prompt.group)

    def _samples(self, record: Record, where: RecordId) -> None:
        samples = rollouts.read_all(record, run=self.facts.run)[1]
        started = self.facts.terms.samples_per_prompt + self.facts.terms.oversample
        if samples[-1].sample >= started:
            raise errors.Unusable(f"sample {samples[-1].sample} where a group has {started}", kind="mismatch")
        for rollout in samples:
            self._sample(rollout, where, record.timestamp_ms)

    def _sample(self, rollout: Rollout, where: RecordId, timestamp_ms: int) -> None:
        versions = (oldest_trained([rollout]) or 0, int(max(rollout.span_versions)))
        fact = SampleFact(where, rollout.group, rollout.sample, *versions, timestamp_ms, rollout.worker, sample_hash(rollout))
        stored = self.facts.samples
        self._note_first(where, rollout.group)
        if where in self.facts.poison:
            stored.poison.append(fact)
        elif stored.add(fact, rollout.started_ns) and rollout.broken is not None:
            stored.broken[where.partition, rollout.group, rollout.sample] = rollout.broken
        stored.most_sequences = max(stored.most_sequences, len(rollout.segments or ((),)))
        if (flaw := trajectory_flaw(rollout)) is not None:
            stored.flaws.append((fact, flaw))
        if (prompt_ids := self._prompt_ids.get(rollout.group)) is not None and (turns := sampled_turns(rollout, prompt_ids)):
            stored.turns.append((fact, turns))

    def _note_first(self, where: RecordId, group: int) -> None:
        """Note the first retained group of a partition whose first records were deleted."""
        facts, partition = self.facts, where[:2]
        start = facts.start_offsets.get(partition)
        if (
            start
            and start <= where.offset
            and partition not in facts.first_retained
            and (where.topic == "prompts" or group in facts.prompts.first)
        ):
            facts.first_retained[partition] = group

    def _call(self, record: Record, _: RecordId) -> None:
        key = calls.read(record, run=self.facts.run)[1].key
        self._count_repeats("calls", key in self.facts.calls)
        self.facts.calls.add(key)

    def _reply(self, record: Record, where: RecordId) -> None:
        reply = replies.read(record, run=self.facts.run)[1]
        self.facts.replies.append(ReplyFact(where, reply.key, tokens_hash(reply.token_ids)))

    def _group(self, record: Record, where: RecordId) -> None:
        headers = groups.check(record, run=self.facts.run)
        assert headers.group is not None and headers.parts is not None
        key = (where.partition, headers.group, headers.sha256 or "")
        parts = self._parts.setdefault(key, [])
        if headers.part != len(parts):
            if not parts:
                del self._parts[key]
            if self.facts.start_offsets.get(where[:2]) and where[:2] not in self.facts.first_retained:
                return  # earlier parts were deleted
            self._add_unusable(record, INCOMPLETE, f"part {headers.part} of group {headers.group}, expected part {len(parts)}")
            return
        parts.append(record)
        if len(parts) == headers.parts:
            self._complete_group(self._parts.pop(key))

    def _complete_group(self, records: Sequence[Record]) -> None:
        try:
            group = groups.read(records, run=self.facts.run)[1]
        except errors.Unusable as error:
            for record in records:
                self.refuse(record, error)
            return
        where, sha256 = RecordId("groups", records[0].partition, records[0].offset), hashlib.sha256()
        for record in records:
            sha256.update(record.value)
        samples = [sample.rollout for sample in group.samples]
        facts = (prompt_hash(group, group.prompt_ids), sha256.digest(), self._outcome_samples(group, where), oldest_trained(samples))
        self.facts.outcomes.add(OutcomeFact(where, group.group, group.outcome, *facts))
        self._note_first(where, group.group)

    def _outcome_samples(self, group: groups.Group, where: RecordId) -> OutcomeSamples:
        """Compare the samples of an outcome with their first records."""
        prompt = self.facts.prompts.first.get(group.group)
        partition = where.partition if prompt is None else prompt.where.partition
        firsts = [(sample.rollout, self.facts.samples.first(partition, group.group, sample.rollout.sample)) for sample in group.samples]
        return OutcomeSamples(
            tuple(rollout.sample for rollout, _ in firsts),
            tuple(rollout.sample for rollout, first in firsts if first is None),
            tuple(rollout.sample for rollout, first in firsts if first is not None and first.body != sample_hash(rollout)),
        )

    def _entry(self, record: Record, where: RecordId) -> None:
        entry = ledger.read(record, run=self.facts.run)[1]
        self._check_foreign(where)
        body = hash_of(record.value)
        if not self._repeats("ledger", entry.seq, body):
            start = len(self.facts.planned)
            for planned in entry.plan:
                planned_at = RecordId("groups", planned.partition, planned.offset)
                self.facts.planned.add(PlannedFact(planned_at, planned.group, entry.step or 0, _digest(planned.sha256)))
            light = replace(entry, plan=(), metrics={}) if entry.kind == "step" else entry
            self.facts.entries.append(EntryFact(where, light, body, range(start, len(self.facts.planned))))

    def _manifest(self, record: Record, where: RecordId) -> None:
        manifest = weights.read(record, run=self.facts.run)[1]
        self._check_foreign(where)
        body = hash_of(record.value)
        if not self._repeats("weights", manifest.version, body):
            self.facts.manifests.append(ManifestFact(where, manifest, body))

    def _check_foreign(self, where: RecordId) -> None:
        """Raise `Unusable` for an entry or manifest after a gap, which its readers have dead-lettered."""
        if self._named.get(where) == "mismatch":
            raise errors.Unusable("dead-lettered because it follows a gap", kind="mismatch")

    def _measurement(self, record: Record, where: RecordId) -> None:
        measurement = metrics.read(record, run=self.facts.run)[1]
        key = (measurement.worker, measurement.incarnation)
        fresh = WorkerFact(
            measurement.worker, measurement.role, measurement.incarnation, measurement.labels.get("host"), measurement.time_ns
        )
        if self.facts.start_offsets.get(where[:2]):
            fresh.seqs.below = measurement.seq  # earlier ones may have been deleted
        worker = self.facts.workers.setdefault(key, fresh)
        worker.host = worker.host or measurement.labels.get("host")
        self._count_repeats("metrics", not worker.seqs.add(measurement.seq))
        if measurement.kind == "final":
            worker.final = where.offset
        if measurement.role == "trainer" and (anchor := of_trainer(where, measurement.values)) is not None:
            self.facts.anchors = [*(other for other in self.facts.anchors if other.steps > anchor.steps), anchor]

    def _repeats(self, topic: str, number: int, body: bytes) -> bool:
        """True if this record is identical to the first one of its number; counts it."""
        key = (topic, number)
        if key not in self._first_bodies:
            self._first_bodies[key] = body
            return False
        if repeats := self._first_bodies[key] == body:
            self._count_repeats(topic, 1)
        return repeats

    def _count_repeats(self, topic: str, count: int) -> None:
        if count:
            self.facts.repeats[topic] = self.facts.repeats.get(topic, 0) + count


_FOLDS: dict[str, Callable[[Collector, Record, RecordId], None]] = {
    "dead-letters": Collector._dead_letter,
    "prompts": Collector._prompt,
    "calls": Collector._call,
    "replies": Collector._reply,
    "rollouts": Collector._samples,
    "groups": Collector._group,
    "ledger": Collector._entry,
    "weights": Collector._manifest,
    "metrics": Collector._measurement,
}


def _digest(sha256: str) -> bytes:
    """The bytes of a digest; zeros if a plan has none."""
    with contextlib.suppress(ValueError):
        if len(digest := bytes.fromhex(sha256)) == 32:
            return digest
    return bytes(32)
