"""Turns records into facts, topic by topic: decoded by `topics`' functions and hashed at once.

The rule: a record that cannot be read is itself a fact; no record ends the audit.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.pipeline.audit.anchors import of_trainer
from penstock.pipeline.audit.begin import begin
from penstock.pipeline.audit.chunk_digests import weigh
from penstock.pipeline.audit.facts import INCOMPLETE, EntryFact, Facts, LetterFact, ManifestFact, ReplyFact, Unusable, WorkerFact
from penstock.pipeline.audit.kept.groups import HeldSamples, OutcomeFact, PlannedFact, PromptFact
from penstock.pipeline.audit.kept.hashes import body_of, hash_of, prompt_hash, sample_hash
from penstock.pipeline.audit.kept.sampled_turns import sampled_turns, tokens_hash, trajectory_flaw
from penstock.pipeline.audit.kept.samples import SampleFact
from penstock.pipeline.audit.rules import oldest_trained
from penstock.pipeline.audit.source import Source, plain
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.samples import Rollout
from penstock.topics.turns import calls, replies
from penstock.topics.wire import errors
from penstock.topics.wire.record import Record, RecordId

ORDER = ("dead-letters", RUNS_TOPIC, "run", "metrics", "ledger", "prompts", "calls", "replies", "rollouts", "groups")
"""Dead letters first: the bytes of every record they name are hashed when it is read. A prompt before its samples, they before the outcome
that holds them: what is compared with them need not be kept."""


def gather(source: Source) -> Facts:
    """Read a whole run; raises `Unreadable`."""
    gatherer = Gatherer(begin(source))
    for topic in ORDER:
        for record in source.read(topic):
            gatherer.take(record, topic)
        gatherer.end_of(topic)
    for record in source.read("weights", [0]):
        gatherer.take(record, "weights")
    weigh(source, gatherer.facts, note=gatherer.note, refuse=gatherer.refuse)
    return gatherer.facts


class Gatherer:
    """The facts so far, and the groups whose parts are not all read yet."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._named: dict[RecordId, str] = {}
        """Records that dead letters name -> class of the reason."""
        self._parts: dict[tuple[int, int, str], list[Record]] = {}
        self._prompt_ids: dict[int, Any] = {}
        """Group -> the tokens of its prompt, where turns are compared with replies."""
        self._first_bodies: dict[tuple[str, int], bytes] = {}
        """Topic and number -> hash of its first record."""

    def take(self, record: Record, topic: str) -> None:
        """Note one record of a topic."""
        where = self.note(record)
        fold = _FOLDS.get(topic)
        if fold is not None:
            try:
                fold(self, record, where)
            except errors.Unusable as error:
                self.refuse(record, error)

    def note(self, record: Record) -> RecordId:
        """Count a record, and keep the hash of its bytes if a dead letter names it."""
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.counts[where.topic] = self.facts.counts.get(where.topic, 0) + 1
        if where in self._named:
            self.facts.bodies[where] = body_of(record.key, record.headers, record.value)
        return where

    def refuse(self, record: Record, error: errors.Unusable) -> None:
        """Note a record that cannot be used."""
        self._set_aside(record, error.kind, str(error))

    def _set_aside(self, record: Record, kind: str, reason: str) -> None:
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.unusable.append(Unusable(where, kind, reason, *self._claims(record, where.topic)))

    def end_of(self, topic: str) -> None:
        """Settle what only a whole topic shows."""
        if topic == "prompts":
            self._count_repeats("prompts", self.facts.prompts.drop_repeats())
            self.facts.samples.make_room(self.facts.prompts.first)
        elif topic == "groups":
            self._end_of_groups()
            self._count_repeats("groups", self.facts.outcomes.drop_repeats())

    def _end_of_groups(self) -> None:
        """Note the parts of groups whose other parts never came."""
        for records in self._parts.values():
            if self.facts.deleted(RecordId("groups", records[0].partition, records[0].offset)):
                continue  # the others may have been deleted behind it
            headers = groups.check(records[0], run=self.facts.run)
            problem = f"only {len(records)} of the {headers.parts} parts of group {headers.group} are there"
            for record in records:
                self._set_aside(record, INCOMPLETE, problem)
        self._parts.clear()

    def _claims(self, record: Record, topic: str) -> tuple[int | None, tuple[int, ...]]:
        """Its group and, in `rollouts`, its samples, as far as its headers can be believed."""
        check = {"prompts": prompts.check, "rollouts": rollouts.check, "groups": groups.check}.get(topic)
        try:
            headers = check(record, run=self.facts.run) if check else None
        except errors.Unusable:
            return None, ()
        if headers is None:
            return None, ()
        return headers.group, tuple(rollouts.tokens_of(headers)) if topic == "rollouts" else ()

    def _letter(self, record: Record, where: RecordId) -> None:
        letter = dead_letters.read(record, run=self.facts.run)[1]
        about = RecordId(plain(letter.topic, self.facts.run), letter.partition, letter.offset)
        body = body_of(letter.key, letter.headers, letter.value)
        self.facts.letters.append(LetterFact(where, about, letter.kind, letter.worker, letter.time_ns, body))
        self._named[about] = letter.kind
        if letter.kind == "killer":
            self.facts.killers.add(about)

    def _prompt(self, record: Record, where: RecordId) -> None:
        prompt = prompts.read(record, run=self.facts.run)[1]
        numbers = (prompt.group, prompt.slot, prompt.min_version, prompt.samples_per_prompt, prompt.created_ns)
        self._prompt_ids |= {prompt.group: prompt.token_ids} if self.facts.terms.turns_by_log else {}
        self.facts.prompts.add(PromptFact(where, *numbers, prompt_hash(prompt, prompt.token_ids), hash_of(record.value)))
        self._kept(where, prompt.group)

    def _samples(self, record: Record, where: RecordId) -> None:
        samples = rollouts.read_all(record, run=self.facts.run)[1]
        begun = self.facts.terms.samples_per_prompt + self.facts.terms.oversample
        if samples[-1].sample >= begun:
            raise errors.Unusable(f"sample {samples[-1].sample} where a group has {begun}", kind="mismatch")
        for rollout in samples:
            self._sample(rollout, where, record.timestamp_ms)

    def _sample(self, rollout: Rollout, where: RecordId, timestamp_ms: int) -> None:
        versions = (oldest_trained([rollout]) or 0, int(max(rollout.span_versions)))
        fact = SampleFact(where, rollout.group, rollout.sample, *versions, timestamp_ms, rollout.worker, sample_hash(rollout))
        held = self.facts.samples
        self._kept(where, rollout.group)
        if where in self.facts.killers:
            held.killers.append(fact)
        elif held.add(fact, rollout.started_ns) and rollout.broken is not None:
            held.broken[where.partition, rollout.group, rollout.sample] = rollout.broken
        held.most_sequences = max(held.most_sequences, len(rollout.segments or ((),)))
        if (flaw := trajectory_flaw(rollout)) is not None:
            held.flaws.append((fact, flaw))
        if (prompt_ids := self._prompt_ids.get(rollout.group)) is not None and (turns := sampled_turns(rollout, prompt_ids)):
            held.turns.append((fact, turns))

    def _kept(self, where: RecordId, group: int) -> None:
        """Note the first group of a partition whose beginning was deleted."""
        facts, place = self.facts, where[:2]
        begin = facts.begins.get(place)
        if begin and begin <= where.offset and place not in facts.first_kept and (where.topic == "prompts" or group in facts.prompts.first):
            facts.first_kept[place] = group

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
        held = self._parts.setdefault(key, [])
        if headers.part != len(held):
            if not held:
                del self._parts[key]
            if self.facts.begins.get(where[:2]) and where[:2] not in self.facts.first_kept:
                return  # those before it were deleted
            self._set_aside(record, INCOMPLETE, f"part {headers.part} of group {headers.group} where part {len(held)} belongs")
            return
        held.append(record)
        if len(held) == headers.parts:
            self._whole_group(self._parts.pop(key))

    def _whole_group(self, records: Sequence[Record]) -> None:
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
        facts = (prompt_hash(group, group.prompt_ids), sha256.digest(), self._held(group, where), oldest_trained(samples))
        self.facts.outcomes.add(OutcomeFact(where, group.group, group.outcome, *facts))
        self._kept(where, group.group)

    def _held(self, group: groups.Group, where: RecordId) -> HeldSamples:
        """Compare the samples of an outcome with their first records."""
        prompt = self.facts.prompts.first.get(group.group)
        partition = where.partition if prompt is None else prompt.where.partition
        firsts = [(sample.rollout, self.facts.samples.first(partition, group.group, sample.rollout.sample)) for sample in group.samples]
        return HeldSamples(
            tuple(rollout.sample for rollout, _ in firsts),
            tuple(rollout.sample for rollout, first in firsts if first is None),
            tuple(rollout.sample for rollout, first in firsts if first is not None and first.body != sample_hash(rollout)),
        )

    def _entry(self, record: Record, where: RecordId) -> None:
        entry = ledger.read(record, run=self.facts.run)[1]
        self._refused(where)
        body = hash_of(record.value)
        if not self._repeats("ledger", entry.seq, body):
            begin = len(self.facts.planned)
            for planned in entry.plan:
                at = RecordId("groups", planned.partition, planned.offset)
                self.facts.planned.add(PlannedFact(at, planned.group, entry.step or 0, _digest(planned.sha256)))
            light = replace(entry, plan=(), metrics={}) if entry.kind == "step" else entry
            self.facts.entries.append(EntryFact(where, light, body, range(begin, len(self.facts.planned))))

    def _manifest(self, record: Record, where: RecordId) -> None:
        manifest = weights.read(record, run=self.facts.run)[1]
        self._refused(where)
        body = hash_of(record.value)
        if not self._repeats("weights", manifest.version, body):
            self.facts.manifests.append(ManifestFact(where, manifest, body))

    def _refused(self, where: RecordId) -> None:
        """Leave out a foreign entry or manifest: one beyond a gap, which its readers have set aside."""
        if self._named.get(where) == "mismatch":
            raise errors.Unusable("set aside as one beyond a gap", kind="mismatch")

    def _measurement(self, record: Record, where: RecordId) -> None:
        measurement = metrics.read(record, run=self.facts.run)[1]
        key = (measurement.worker, measurement.incarnation)
        fresh = WorkerFact(
            measurement.worker, measurement.role, measurement.incarnation, measurement.labels.get("host"), measurement.time_ns
        )
        if self.facts.begins.get(where[:2]):
            fresh.seqs.below = measurement.seq  # those before may have been deleted
        worker = self.facts.workers.setdefault(key, fresh)
        worker.host = worker.host or measurement.labels.get("host")
        self._count_repeats("metrics", not worker.seqs.add(measurement.seq))
        if measurement.kind == "final":
            worker.final = where.offset
        if measurement.role == "trainer" and (anchor := of_trainer(where, measurement.values)) is not None:
            self.facts.anchors = [*(held for held in self.facts.anchors if held.steps > anchor.steps), anchor]

    def _repeats(self, topic: str, number: int, body: bytes) -> bool:
        """True if this record is identical to the first of its number; it is then only counted."""
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


_FOLDS: dict[str, Callable[[Gatherer, Record, RecordId], None]] = {
    "dead-letters": Gatherer._letter,
    "prompts": Gatherer._prompt,
    "calls": Gatherer._call,
    "replies": Gatherer._reply,
    "rollouts": Gatherer._samples,
    "groups": Gatherer._group,
    "ledger": Gatherer._entry,
    "weights": Gatherer._manifest,
    "metrics": Gatherer._measurement,
}


def _digest(sha256: str) -> bytes:
    """The bytes of a digest; zeros where a plan names none."""
    with contextlib.suppress(ValueError):
        if len(found := bytes.fromhex(sha256)) == 32:
            return found
    return bytes(32)
