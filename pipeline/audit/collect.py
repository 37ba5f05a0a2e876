"""Turns records into facts, topic by topic: decoded by `topics`' functions and hashed at once.

The rule: a record that cannot be read is itself a fact; no record ends the audit.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.pipeline.audit.anchors import of_trainer
from penstock.pipeline.audit.chunk_digests import weigh
from penstock.pipeline.audit.drawn_turns import drawn_turns, tokens_hash, trajectory_flaw
from penstock.pipeline.audit.facts import (
    INCOMPLETE,
    EntryFact,
    Facts,
    LetterFact,
    ManifestFact,
    OutcomeFact,
    PromptFact,
    ReplyFact,
    SampleFact,
    Unusable,
    Where,
    WorkerFact,
)
from penstock.pipeline.audit.rules import as_object, oldest_trained, terms_of
from penstock.pipeline.audit.source import Source, Unreadable, plain
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.samples import Rollout
from penstock.topics.turns import calls, replies
from penstock.topics.wire import errors
from penstock.topics.wire.record import RawHeaders, Record


def gather(source: Source) -> Facts:
    """Read a whole run; raises `Unreadable`."""
    gatherer = Gatherer(_begin(source))
    # Dead letters first: the bytes of every record they name are hashed when it is read.
    for topic in ("dead-letters", RUNS_TOPIC, "run", "metrics", "ledger", "groups", "prompts", "calls", "replies", "rollouts"):
        for record in source.read(topic):
            gatherer.take(record, topic)
    gatherer.end_of_groups()
    for record in source.read("weights", [0]):
        gatherer.take(record, "weights")
    weigh(source, gatherer.facts, note=gatherer.note, refuse=gatherer.refuse)
    return gatherer.facts


def _begin(source: Source) -> Facts:
    """Facts with the run's terms, from the register or else from the ledger's first entry."""
    config_and_info: tuple[dict[str, Any], dict[str, Any]] | None = None
    registered, own = _said(source, RUNS_TOPIC), _said(source, "run")
    status = registered[-1].status if registered else None
    # In the topic that all runs share only an earlier release has left a configuration.
    for made in own[-1:] or [said for said in registered[-1:] if said.config != runs.NOTHING]:
        config_and_info = as_object(made.config), as_object(made.info)
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
        raise Unreadable(f"neither the register of runs nor the ledger says how run {source.run} was configured")
    config, info = config_and_info
    begins = {("weights", partition): source.begin("weights", partition) for partition in source.partitions("weights")}
    return Facts(
        run=source.run,
        terms=terms_of(config, info),
        schedule=config.get("schedule"),
        status=status,
        begins=begins,
    )


def _said(source: Source, topic: str) -> list[runs.RunRecord]:
    """The usable records of the run in a topic of what runs are."""
    said = []
    for record in source.read(topic):
        if record.key == source.run.encode():
            with contextlib.suppress(errors.Unusable):
                said.append(runs.read(record, run=source.run)[1])
    return said


class Gatherer:
    """The facts so far, and the groups whose parts are not all read yet."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._named: dict[Where, str] = {}
        """Records that dead letters name -> class of the reason."""
        self._parts: dict[tuple[int, int, str], list[Record]] = {}
        self._prompt_ids: dict[int, Any] = {}
        """Group -> the tokens of its prompt, where turns are compared with replies."""
        self._first_bodies: dict[tuple[str, int, int], bytes] = {}
        """(topic, partition, group or number) -> hash of its first record."""

    def take(self, record: Record, topic: str) -> None:
        """Note one record of a topic."""
        where = self.note(record)
        fold = _FOLDS.get(topic)
        if fold is not None:
            try:
                fold(self, record, where)
            except errors.Unusable as error:
                self.refuse(record, error)

    def note(self, record: Record) -> Where:
        """Count a record, and keep the hash of its bytes if a dead letter names it."""
        where = Where(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.counts[where.topic] = self.facts.counts.get(where.topic, 0) + 1
        if where in self._named:
            self.facts.bodies[where] = body_of(record.key, record.headers, record.value)
        return where

    def refuse(self, record: Record, error: errors.Unusable) -> None:
        """Note a record that cannot be used."""
        self._set_aside(record, error.kind, str(error))

    def _set_aside(self, record: Record, kind: str, reason: str) -> None:
        where = Where(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.unusable.append(Unusable(where, kind, reason, *self._claims(record, where.topic)))

    def end_of_groups(self) -> None:
        """Note the parts of groups whose other parts never came."""
        for records in self._parts.values():
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

    def _letter(self, record: Record, where: Where) -> None:
        letter = dead_letters.read(record, run=self.facts.run)[1]
        about = Where(plain(letter.topic, self.facts.run), letter.partition, letter.offset)
        body = body_of(letter.key, letter.headers, letter.value)
        self.facts.letters.append(LetterFact(where, about, letter.kind, letter.worker, letter.time_ns, body))
        self._named[about] = letter.kind
        if letter.kind == "killer":
            self.facts.killers.add(about)

    def _prompt(self, record: Record, where: Where) -> None:
        prompt = prompts.read(record, run=self.facts.run)[1]
        body = _hash(record.value)
        if not self._repeats("prompts", where.partition, prompt.group, body):
            numbers = (prompt.group, prompt.slot, prompt.min_version, prompt.samples_per_prompt, prompt.created_ns)
            self._prompt_ids |= {prompt.group: prompt.token_ids} if self.facts.terms.turns_by_log else {}
            content = _prompt_hash(prompt, prompt.token_ids)
            self.facts.prompts.append(PromptFact(where, *numbers, content, body))

    def _samples(self, record: Record, where: Where) -> None:
        samples = rollouts.read_all(record, run=self.facts.run)[1]
        begun = self.facts.terms.samples_per_prompt + self.facts.terms.oversample
        if samples[-1].sample >= begun:
            raise errors.Unusable(f"sample {samples[-1].sample} where a group has {begun}", kind="mismatch")
        self.facts.samples.extend(
            SampleFact(
                where,
                rollout.group,
                rollout.sample,
                oldest_trained([rollout]) or 0,
                int(max(rollout.span_versions)),
                rollout.started_ns,
                record.timestamp_ms,
                rollout.worker,
                sample_hash(rollout),
                len(rollout.segments or ((),)),
                trajectory_flaw(rollout),
                rollout.broken,
                drawn_turns(rollout, self._prompt_ids.get(rollout.group, ())) if self._prompt_ids else (),
            )
            for rollout in samples
        )

    def _call(self, record: Record, _: Where) -> None:
        key = calls.read(record, run=self.facts.run)[1].key
        self._count_repeat("calls") if key in self.facts.calls else self.facts.calls.add(key)

    def _reply(self, record: Record, where: Where) -> None:
        reply = replies.read(record, run=self.facts.run)[1]
        self.facts.replies.append(ReplyFact(where, reply.key, tokens_hash(reply.token_ids)))

    def _group(self, record: Record, where: Where) -> None:
        headers = groups.check(record, run=self.facts.run)
        assert headers.group is not None and headers.parts is not None
        key = (where.partition, headers.group, headers.sha256 or "")
        held = self._parts.setdefault(key, [])
        if headers.part != len(held):
            if not held:
                del self._parts[key]
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
        where = Where("groups", records[0].partition, records[0].offset)
        sha256 = hashlib.sha256()
        for record in records:
            sha256.update(record.value)
        if self._repeats("groups", where.partition, group.group, sha256.digest()):
            return
        samples = [sample.rollout for sample in group.samples]
        self.facts.outcomes.append(
            OutcomeFact(
                where,
                group.group,
                group.outcome,
                _prompt_hash(group, group.prompt_ids),
                sha256.hexdigest(),
                tuple((sample.sample, sample_hash(sample)) for sample in samples),
                oldest_trained(samples),
            )
        )

    def _entry(self, record: Record, where: Where) -> None:
        entry = ledger.read(record, run=self.facts.run)[1]
        self._refused(where)
        body = _hash(record.value)
        if not self._repeats("ledger", 0, entry.seq, body):
            self.facts.entries.append(EntryFact(where, entry, body))

    def _manifest(self, record: Record, where: Where) -> None:
        manifest = weights.read(record, run=self.facts.run)[1]
        self._refused(where)
        body = _hash(record.value)
        if not self._repeats("weights", 0, manifest.version, body):
            self.facts.manifests.append(ManifestFact(where, manifest, body))

    def _refused(self, where: Where) -> None:
        """Leave out a foreign entry or manifest: one beyond a gap, which its readers have set aside."""
        if self._named.get(where) == "mismatch":
            raise errors.Unusable("set aside as one beyond a gap", kind="mismatch")

    def _measurement(self, record: Record, where: Where) -> None:
        measurement = metrics.read(record, run=self.facts.run)[1]
        key = (measurement.worker, measurement.incarnation)
        fresh = WorkerFact(
            measurement.worker, measurement.role, measurement.incarnation, measurement.labels.get("host"), measurement.time_ns
        )
        worker = self.facts.workers.setdefault(key, fresh)
        worker.host = worker.host or measurement.labels.get("host")
        if measurement.seq in worker.seqs:
            self._count_repeat("metrics")
        worker.seqs.add(measurement.seq)
        if measurement.kind == "final":
            worker.final = where.offset
        if measurement.role == "trainer" and (anchor := of_trainer(where, measurement.values)) is not None:
            self.facts.anchors = [*(held for held in self.facts.anchors if held.steps > anchor.steps), anchor]

    def _repeats(self, topic: str, partition: int, number: int, body: bytes) -> bool:
        """True if this record is identical to the first of its number; it is then only counted."""
        key = (topic, partition, number)
        if key not in self._first_bodies:
            self._first_bodies[key] = body
        elif self._first_bodies[key] == body:
            self._count_repeat(topic)
            return True
        return False

    def _count_repeat(self, topic: str) -> None:
        self.facts.repeats[topic] = self.facts.repeats.get(topic, 0) + 1


_FOLDS: dict[str, Callable[[Gatherer, Record, Where], None]] = {
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


def body_of(key: bytes | None, headers: RawHeaders, value: bytes) -> bytes:
    """Hash of a record's bytes; an absent header and one without a value differ."""
    digest = hashlib.blake2b(digest_size=16)
    for name, text in (("", key), *headers):
        digest.update(f"{len(name)}:{name};{-1 if text is None else len(text)}:".encode("utf-8", "surrogatepass"))
        digest.update(text or b"")
    digest.update(value)
    return digest.digest()


def sample_hash(rollout: Rollout) -> bytes:
    """Hash of all of a sample's fields."""
    logprobs = np.array(rollout.behaviour_logprobs, np.float32)
    logprobs[np.isnan(logprobs)] = np.nan  # one bit pattern for every NaN
    arrays = (
        np.asarray(rollout.token_ids, np.int32),
        logprobs,
        np.asarray(rollout.loss_mask, np.bool_),
        np.asarray(rollout.span_versions, np.int32),
        np.asarray(rollout.span_starts, np.int32),
        *([] if rollout.support is None else [np.asarray(rollout.support, np.int32)]),
    )
    fields = (rollout.group, rollout.sample, rollout.finish, rollout.temperature, rollout.top_p, rollout.top_k)
    episode = (rollout.segments, rollout.turns, rollout.messages)
    seeded = (rollout.environment, rollout.environment_version, rollout.environment_seed)
    digest = hashlib.blake2b(
        repr((*fields, rollout.started_ns, rollout.ended_ns, rollout.worker, episode, seeded)).encode(), digest_size=16
    )
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.digest()


def _prompt_hash(of: prompts.Prompt | groups.Group, token_ids: Any) -> bytes:
    numbers = (of.group, of.slot, of.min_version, of.samples_per_prompt, of.epoch, of.row, of.created_ns)
    return _hash(repr((numbers, of.prompt, of.columns)).encode() + np.asarray(token_ids, np.int32).tobytes())


def _hash(value: bytes | memoryview) -> bytes:
    return hashlib.blake2b(value, digest_size=16).digest()
