"""Reads all records of a run and collects facts about them, topic by topic. An unusable record is a fact too, and not an error."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.pipeline.inspect.audit.chunk_digests import TopicDigests, verify_versions
from penstock.pipeline.inspect.audit.facts import (
    INCOMPLETE,
    Anchor,
    DeadLetterFact,
    EntryFact,
    Facts,
    ManifestFact,
    Unusable,
    WorkerFact,
)
from penstock.pipeline.inspect.audit.rules import as_object, oldest_trained, terms_of, trajectory_flaw
from penstock.pipeline.inspect.audit.source import Source, Unreadable, plain
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.rollouts import Rollout
from penstock.topics.turns import calls, replies
from penstock.topics.wire import errors
from penstock.topics.wire.record import RawHeaders, Record, RecordId

RETAINED = ("prompts", "calls", "replies", "rollouts", "groups", "weights", "metrics", "ledger", "dead-letters")
"""Topics in which records deleted by retention are distinguished from lost records."""
REGRADE = "regrade:"
"""Prefix of the scorer's name in regraded groups; the parent run follows."""
COMPLETE = {"ledger": "the final status of the run's groups", "dead-letters": "the unusable records"}
"""Topics that an audit needs from offset 0 -> content of their records."""


def empty_facts(source: Source) -> Facts:
    """Return facts with only the run's configuration, from its registration or the first ledger entry. Raises `Unreadable`."""
    start_offsets = {
        (topic, partition): source.start_offset(topic, partition) for topic in RETAINED for partition in source.partitions(topic)
    }
    for topic, content in COMPLETE.items():
        if first := start_offsets.get((topic, 0), 0):
            raise Unreadable(
                f"{source.run} cannot be audited: offsets 0 to {first - 1} of {source.run}.{topic}/0 were deleted, which had {content}"
            )
    registered, own = _run_records(source, RUNS_TOPIC), _run_records(source, "run")
    # Earlier releases wrote the configuration to the topic that all runs share.
    created = own[-1:] or [record for record in registered[-1:] if record.config != runs.NOTHING]
    config, info = (as_object(created[0].config), as_object(created[0].info)) if created else _opening(source)
    return Facts(
        run=source.run,
        terms=terms_of(config, info),
        changes=info.get("changes", ()),
        records=[(as_object(record.config), as_object(record.info)) for record in own],
        status=registered[-1].status if registered else None,
        start_offsets=start_offsets,
    )


def _opening(source: Source) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return configuration and info from the ledger entry that opened the run. Raises `Unreadable` if there is none."""
    for record in source.read("ledger"):
        with contextlib.suppress(errors.Unusable):
            entry = ledger.read(record, run=source.run)[1]
            if entry.kind == "run-opened":
                details = as_object(entry.details)
                return details.get("config", {}), details.get("info", {})
    raise Unreadable(f"run {source.run} cannot be audited: neither its registration nor its ledger has its configuration")


def _run_records(source: Source, topic: str) -> list[runs.RunRecord]:
    """Return the usable registration records of the run in a topic."""
    records = []
    for record in source.read(topic):
        if record.key == source.run.encode():
            with contextlib.suppress(errors.Unusable):
                records.append(runs.read(record, run=source.run)[1])
    return records


ORDER = ("dead-letters", RUNS_TOPIC, "run", "metrics", "ledger", "prompts", "calls", "replies", "rollouts", "groups")
"""Order in which topics are read: dead letters first, so that records they name can be hashed while reading; prompts before samples, and
samples before outcomes, so that hashes suffice to compare them."""


def collect(source: Source, digests: TopicDigests | None = None) -> Facts:
    """Read all records of a run and return the facts; also add every record to `digests`. Raises `Unreadable`."""
    collector = Collector(empty_facts(source), digests)
    for topic in ORDER:
        for record in source.read(topic):
            collector.take(record, topic)
    collector.end_of_groups()
    for record in source.read("weights", [0]):
        collector.take(record, "weights")
    collector.facts.complete()
    verify_versions(source, collector.facts, note=collector.note, refuse=collector.refuse)
    return collector.facts


class Collector:
    """Collects facts record by record, and buffers the parts of groups until they are complete."""

    def __init__(self, facts: Facts, digests: TopicDigests | None = None) -> None:
        self.facts, self._digests = facts, digests
        self._named: dict[RecordId, str] = {}
        """Record named by a dead letter -> kind of the dead letter."""
        self._parts: dict[tuple[int, int, str], list[Record]] = {}
        self._prompt_ids: dict[int, Any] = {}
        """Group -> token ids of its prompt; only if turns are compared with replies."""
        self._first_bodies: dict[tuple[str, int], bytes] = {}
        """(topic, number) -> hash of the first record with this number."""

    def take(self, record: Record, topic: str) -> None:
        """Add the facts about a record of a topic; an unusable record is a fact too."""
        where = self.note(record)
        fold = _FOLDS.get(topic)
        if fold is not None:
            try:
                fold(self, record, where)
            except errors.Unusable as error:
                self.refuse(record, error.kind, str(error))

    def note(self, record: Record) -> RecordId:
        """Count a record, and store its hash if a dead letter names it. Return its id."""
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.counts[where.topic] = self.facts.counts.get(where.topic, 0) + 1
        if self._digests is not None:
            self._digests.add(where, record)
        if where in self._named:
            self.facts.bodies[where] = body_of(record.key, record.headers, record.value)
        return where

    def refuse(self, record: Record, kind: str, reason: str) -> None:
        """Add an unusable record with the reason, and the group and samples that its headers name."""
        where = RecordId(plain(record.topic, self.facts.run), record.partition, record.offset)
        self.facts.unusable.append(Unusable(where, kind, reason, *self._claims(record, where.topic)))

    def end_of_groups(self) -> None:
        """Add the buffered parts of incomplete groups as unusable records."""
        for records in self._parts.values():
            if self.facts.deleted(RecordId("groups", records[0].partition, records[0].offset)):
                continue  # retention may have deleted other parts too
            headers = groups.check(records[0], run=self.facts.run)
            problem = f"only {len(records)} of the {headers.parts} parts of group {headers.group} are in the log"
            for record in records:
                self.refuse(record, INCOMPLETE, problem)

    def _claims(self, record: Record, topic: str) -> tuple[int | None, tuple[int, ...]]:
        """Return the record's group and, in `rollouts`, its sample numbers, according to the headers; (None, ()) if these are invalid."""
        if check := {"prompts": prompts.check, "rollouts": rollouts.check, "groups": groups.check}.get(topic):
            with contextlib.suppress(errors.Unusable):
                headers = check(record, run=self.facts.run)
                return headers.group, tuple(rollouts.tokens_of(headers)) if topic == "rollouts" else ()
        return None, ()

    def _dead_letter(self, record: Record, where: RecordId) -> None:
        """Add a dead letter, and remember which record it names, whose hash is then stored."""
        dead_letter = dead_letters.read(record, run=self.facts.run)[1]
        about = RecordId(plain(dead_letter.topic, self.facts.run), dead_letter.partition, dead_letter.offset)
        body = body_of(dead_letter.key, dead_letter.headers, dead_letter.value)
        self.facts.dead_letters.append(DeadLetterFact(where, about, dead_letter.kind, dead_letter.worker, dead_letter.time_ns, body))
        self._named[about] = dead_letter.kind
        if dead_letter.kind == "poison":
            self.facts.poison.add(about)

    def _prompt(self, record: Record, where: RecordId) -> None:
        """Add a prompt, unless it repeats one."""
        prompt, body = prompts.read(record, run=self.facts.run)[1], hash_of(record.value)
        if self.facts.terms.turns_by_log:
            self._prompt_ids[prompt.group] = prompt.token_ids
        if not self._repeats_group("prompts", prompt.group, where, body):
            numbers = (prompt.slot, prompt.min_version, prompt.samples_per_prompt, prompt.created_ns)
            self._insert("prompts", prompt.group, *where[1:], *numbers, prompt_hash(prompt, prompt.token_ids), body)

    def _samples(self, record: Record, where: RecordId) -> None:
        """Add the samples in a record of `rollouts`."""
        samples = rollouts.read_all(record, run=self.facts.run)[1]
        started = self.facts.terms.samples_per_prompt + self.facts.terms.oversample
        if samples[-1].sample >= started:
            raise errors.Unusable(f"sample {samples[-1].sample} is too high: a group has {started} samples", kind="mismatch")
        for rollout in samples:
            self._sample(rollout, where, record.timestamp_ms)

    def _sample(self, rollout: Rollout, where: RecordId, timestamp_ms: int) -> None:
        """Add one of the samples in a record, and the turns of a trajectory if these can be compared with replies."""
        facts, number = self.facts, (rollout.group, where.partition, rollout.sample)
        first = facts.value("SELECT 1 FROM samples WHERE (group_id, partition, sample, kind) = (?, ?, ?, 'first')", *number)
        kind = "poison" if where in facts.poison else "again" if first else "first"
        versions = (oldest_trained([rollout]) or 0, int(max(rollout.span_versions)))
        times = (timestamp_ms, rollout.started_ns)
        texts = (rollout.worker, sample_hash(rollout), rollout.broken, trajectory_flaw(rollout))
        self._insert("samples", kind, *number, where.offset, *versions, *times, *texts)
        facts.most_sequences = max(facts.most_sequences, len(rollout.segments or ((),)))
        if (prompt_ids := self._prompt_ids.get(rollout.group)) is not None:
            for turn, sampled in enumerate(sampled_turns(rollout, prompt_ids)):
                self._insert("turns", rollout.group, rollout.sample, turn, *sampled, *where[1:])

    def _insert(self, table: str, *values: object) -> bool:
        """Add a row to a table; return False if the primary key exists."""
        return bool(self.facts.tables.execute(f"INSERT OR IGNORE INTO {table} VALUES ({','.join('?' * len(values))})", values).rowcount)

    def _repeats_group(self, table: str, group: int, where: RecordId, body: bytes) -> bool:
        """Return True, and count a repetition, if the record is identical to the first one of its group in this partition."""
        query = f"SELECT body FROM {table} WHERE group_id = ? AND partition = ? ORDER BY rowid"
        repeats = bool(self.facts.value(query, group, where.partition) == body)
        self._count_repeats(where.topic, repeats)
        return repeats

    def _call(self, record: Record, _: RecordId) -> None:
        self._count_repeats("calls", not self._insert("calls", *calls.read(record, run=self.facts.run)[1].key))

    def _reply(self, record: Record, where: RecordId) -> None:
        reply = replies.read(record, run=self.facts.run)[1]
        self._insert("replies", *reply.key, *where[1:], tokens_hash(reply.token_ids))

    def _group(self, record: Record, where: RecordId) -> None:
        """Buffer a part of a group's outcome, and add the outcome with its last part; refuse a part that is out of order."""
        headers = groups.check(record, run=self.facts.run)
        assert headers.group is not None and headers.parts is not None
        key = (where.partition, headers.group, headers.sha256 or "")
        parts = self._parts.setdefault(key, [])
        if headers.part != len(parts):
            if not parts:
                del self._parts[key]
            complete = "SELECT 1 FROM outcomes o JOIN prompts USING (group_id) WHERE o.partition = ?"
            if self.facts.start_offsets.get(where[:2]) and not self.facts.value(complete, where.partition):
                return  # earlier parts were deleted
            self.refuse(record, INCOMPLETE, f"part {headers.part} of group {headers.group}, expected part {len(parts)}")
            return
        parts.append(record)
        if len(parts) == headers.parts:
            self._complete_group(self._parts.pop(key))

    def _complete_group(self, records: Sequence[Record]) -> None:
        """Add the outcome that these parts are, unless it repeats one; refuse all parts if they cannot be decoded."""
        try:
            headers, group = groups.read(records, run=self.facts.run)
        except errors.Unusable as error:
            for record in records:
                self.refuse(record, error.kind, str(error))
            return
        where, sha256 = RecordId("groups", records[0].partition, records[0].offset), hashlib.sha256()
        for record in records:
            sha256.update(record.value)
        if not self._repeats_group("outcomes", group.group, where, sha256.digest()):
            hashes = (prompt_hash(group, group.prompt_ids), sha256.digest())
            oldest = oldest_trained([sample.rollout for sample in group.samples])
            worker = headers.worker or ""
            parent = worker.removeprefix(REGRADE) if worker.startswith(REGRADE) else None
            self._insert("outcomes", group.group, *where[1:], group.outcome, *hashes, oldest, *self._outcome_samples(group, where), parent)

    def _outcome_samples(self, group: groups.Group, where: RecordId) -> Iterator[str]:
        """Yield JSON lists of the samples in an outcome: actual, expected, missing in `rollouts`, different from `rollouts`."""
        count, partition = self.facts.terms.samples_per_prompt, "SELECT partition FROM prompts WHERE group_id = ?1 ORDER BY rowid LIMIT 1"
        query = f"""
            SELECT sample, body FROM samples WHERE group_id = ?1 AND partition = coalesce(({partition}), ?2) AND kind = 'first'
            ORDER BY offset, sample
        """
        firsts = dict(self.facts.rows(query, group.group, where.partition))
        hashes = [(sample.rollout.sample, sample_hash(sample.rollout)) for sample in group.samples]
        counted = list(firsts)[:count] if self.facts.terms.oversample and len(firsts) >= count else range(count)
        yield str([number for number, _ in hashes])
        yield str(sorted(counted) if group.outcome in ("scored", "filtered") else [])
        yield str([number for number, _ in hashes if number not in firsts])
        yield str([number for number, body in hashes if firsts.get(number, body) != body])

    def _entry(self, record: Record, where: RecordId) -> None:
        """Add an entry of the ledger, and a row in `decided` for each group in its plan or list of stale groups."""
        entry = ledger.read(record, run=self.facts.run)[1]
        self._check_foreign(where)
        if not self._repeats("ledger", entry.seq, record.value):
            decision = (entry.kind, len(self.facts.entries), entry.seq, entry.step or 0)
            for planned in entry.plan if entry.kind == "step" else ():
                self._insert("decided", *decision, planned.group, planned.partition, planned.offset, _digest(planned.sha256))
            for group in entry.groups if entry.kind == "stale" else ():
                self._insert("decided", *decision, group, None, None, None)
            light = replace(entry, plan=(), groups=(), metrics={}) if entry.kind in ("step", "stale") else entry
            self.facts.entries.append(EntryFact(where, light, len(entry.plan), ledger.digest(record.value)))

    def _manifest(self, record: Record, where: RecordId) -> None:
        manifest = weights.read(record, run=self.facts.run)[1]
        self._check_foreign(where)
        if not self._repeats("weights", manifest.version, record.value):
            self.facts.manifests.append(ManifestFact(where, manifest))

    def _check_foreign(self, where: RecordId) -> None:
        """Raise `Unusable` for an entry or manifest that readers have dead-lettered because it follows a gap."""
        if self._named.get(where) == "mismatch":
            raise errors.Unusable("dead-lettered because it follows a gap", kind="mismatch")

    def _add_measurement(self, record: Record, where: RecordId) -> None:
        """Add a record of `metrics`: its worker, whether it repeats, its evaluation, and the trainer's number of steps as an anchor."""
        measurement = metrics.read(record, run=self.facts.run)[1]
        key = (measurement.worker, measurement.incarnation)
        host, first_seq = measurement.labels.get("host"), measurement.seq if self.facts.start_offsets.get(where[:2]) else 0
        fresh = WorkerFact(measurement.worker, measurement.role, measurement.incarnation, host, measurement.time_ns, first_seq)
        worker = self.facts.workers.setdefault(key, fresh)
        worker.host = worker.host or host
        repeats = measurement.seq < worker.first_seq or not self._insert("measurements", *key, measurement.seq)
        self._count_repeats("metrics", repeats)
        if measurement.kind == "final":
            worker.final = where.offset
        if measurement.kind == "eval" and measurement.version is not None:
            self.facts.evaluations[ledger.digest(record.value)] = measurement
        if measurement.role == "trainer" and "step" in measurement.values:
            anchor = Anchor(f"the trainer's measurement at {where}", int(measurement.values["step"]))
            self.facts.anchors = [*(other for other in self.facts.anchors if other.steps > anchor.steps), anchor]

    def _repeats(self, topic: str, number: int, value: bytes) -> bool:
        """Return True, and count a repetition, if the record is identical to the first one with this number."""
        key, body = (topic, number), hash_of(value)
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
    "metrics": Collector._add_measurement,
}


def _digest(sha256: str) -> bytes:
    """Convert a hexadecimal SHA-256 to bytes; zeros for any other text."""
    with contextlib.suppress(ValueError):
        if len(digest := bytes.fromhex(sha256)) == 32:
            return digest
    return bytes(32)


GROUP_BYTES = 8
"""Length of the hash of a prompt or sample. Two different ones collide with a probability of 2^-64."""


def body_of(key: bytes | None, headers: RawHeaders, value: bytes) -> bytes:
    """Hash a record's key, headers and value. A missing header and one without a value give different hashes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, text in (("", key), *headers):
        digest.update(f"{len(name)}:{name};{-1 if text is None else len(text)}:".encode("utf-8", "surrogatepass"))
        digest.update(text or b"")
    digest.update(value)
    return digest.digest()


def sample_hash(rollout: Rollout) -> bytes:
    """Hash all fields of a sample, in which every NaN is equal."""
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
        repr((*fields, rollout.started_ns, rollout.ended_ns, rollout.worker, episode, seeded)).encode(), digest_size=GROUP_BYTES
    )
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.digest()


def prompt_hash(of: prompts.Prompt | groups.Group, token_ids: Any) -> bytes:
    """Hash the fields that an outcome has in common with its prompt."""
    numbers = (of.group, of.slot, of.min_version, of.samples_per_prompt, of.epoch, of.row, of.created_ns)
    return hash_of(repr((numbers, of.prompt, of.columns)).encode() + np.asarray(token_ids, np.int32).tobytes())


def hash_of(value: bytes | memoryview) -> bytes:
    return hashlib.blake2b(value, digest_size=GROUP_BYTES).digest()


def sampled_turns(rollout: Rollout, prompt_ids: Any) -> Iterator[tuple[str, bytes]]:
    """Yield (SHA-256 of the context, hash of the tokens) of each turn of the policy in a trajectory; none for a single completion.

    The context of a turn is the part of its segment before it, preceded by the group's prompt if the segment starts with the prompt.
    """
    for turn in rollout.turns or ():
        if turn.source == "model":
            segment_start, prompt = next((start, prompt) for start, end, prompt in rollout.segments or () if start <= turn.start < end)
            context = hashlib.sha256(b"" if prompt else _bytes(prompt_ids))
            context.update(_bytes(rollout.token_ids[segment_start : turn.start]))
            yield context.hexdigest(), tokens_hash(rollout.token_ids[turn.start : turn.end])


def tokens_hash(token_ids: Any) -> bytes:
    return hashlib.blake2b(_bytes(token_ids), digest_size=16).digest()


def _bytes(token_ids: Any) -> bytes:
    return np.ascontiguousarray(token_ids, "<i4").tobytes()
