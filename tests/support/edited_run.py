"""The records of a run as objects that a test may change, one thing at a time, and encode again."""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.pipeline.inspect.audit.report import Audit, as_text, audit
from penstock.topics import dead_letters, groups, ledger, metrics, prompts, rollouts, runs, weights
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.turns import calls, replies
from penstock.topics.wire import errors
from penstock.topics.wire.record import Record
from tests.support.listed_records import Listed, broken

CODECS: Mapping[str, Any] = {
    "prompts": prompts,
    "rollouts": rollouts,
    "groups": groups,
    "ledger": ledger,
    "metrics": metrics,
    "dead-letters": dead_letters,
    "manifests": weights,
    "calls": calls,
    "replies": replies,
    RUNS_TOPIC: runs,
    "run": runs,
}


@dataclass(frozen=True, slots=True)
class Chunks:
    """The codec of chunks, with the names that the others have."""

    read = staticmethod(weights.read_chunk)
    encode = staticmethod(weights.encode_chunk)
    headers = staticmethod(weights.chunk_headers)


class EditedRun:
    """A run's records; every change is encoded by the codecs of `topics`, checksum included."""

    def __init__(self, run: str, records: Iterable[Record]) -> None:
        self.run, self.records = run, list(records)

    def kind(self, record: Record) -> str:
        """Its topic's plain name, with `weights` taken apart into manifests and chunks."""
        topic = record.topic.removeprefix(f"{self.run}.")
        return topic if topic != "weights" else "chunks" if record.partition else "manifests"

    def audit(self, begins: Mapping[tuple[str, int], int] | None = None) -> Audit:
        """The audit of what was made of the run; `begins`: as where earlier records were deleted."""
        return audit(Listed(self.run, self.records, begins=begins))

    def clean(self, begins: Mapping[tuple[str, int], int] | None = None) -> Audit:
        """The audit, in which nothing is broken."""
        found = self.audit(begins)
        assert broken(found) == set(), as_text(found)
        return found

    def all(self, kind: str) -> list[tuple[int, Any]]:
        """(index, object) of every usable record of a kind, by partition and offset; of `rollouts` that of each sample."""
        found = []
        for index, record in enumerate(self.records):
            if self.kind(record) == kind and (kind != RUNS_TOPIC or record.key == self.run.encode()):
                with contextlib.suppress(errors.Unusable):
                    found += [(index, held) for held in self._held(record)]
        return sorted(found, key=lambda pair: (self.records[pair[0]].partition, self.records[pair[0]].offset))

    def one(self, kind: str, /, **facts: Any) -> tuple[int, Any]:
        """The first record whose object has these values."""
        for index, held in self.all(kind):
            if all(getattr(held, name) == value for name, value in facts.items()):
                return index, held
        raise AssertionError(f"no {kind} with {facts}")

    def put(self, index: int, held: Any) -> None:
        """Encode an object in place of a record; a sample in place of that of its number, beside the others in the record."""
        record = self.records[index]
        others = [sample for sample in self._held(record) if sample.sample != held.sample] if self.kind(record) == "rollouts" else []
        self._write(index, held, *others)

    def alter(self, kind: str, change: Callable[[Any], Any] | None = None, *, where: Mapping[str, Any], **fields: Any) -> None:
        """Change the first object with the values `where`: by a function or field by field."""
        index, held = self.one(kind, **where)
        self.put(index, change(held) if change else replace(held, **fields))

    def append(self, like: int, held: Any, *, partition: int | None = None) -> None:
        """Write an object at the end of a partition, as a copy of a record with another content."""
        record = self.records[like]
        chosen = record.partition if partition is None else partition
        offset = 1 + max((r.offset for r in self.records if (r.topic, r.partition) == (record.topic, chosen)), default=-1)
        self.records.append(replace(record, partition=chosen, offset=offset))
        self._write(len(self.records) - 1, held)

    def drop(self, kind: str, /, **facts: Any) -> None:
        """Take a record out; a sample from its record, where that has others."""
        index, held = self.one(kind, **facts)
        if others := [other for other in self._held(self.records[index]) if other != held]:
            self._write(index, *others)
        else:
            del self.records[index]
        self.chain()

    def ledger(self, change: Callable[[list[Any]], None]) -> None:
        """Change the list of entries and write it again, numbered from 0 as if it had been so from the beginning."""
        held = self.all("ledger")
        entries = [entry for _, entry in held]
        change(entries)
        like = self.records[held[0][0]]
        for index in sorted((index for index, _ in held), reverse=True):
            del self.records[index]
        for seq, entry in enumerate(entries):
            self.records.append(replace(like, offset=like.offset + 2 * seq))
            self.put(len(self.records) - 1, replace(entry, seq=seq))

    def group(self, number: int, change: Callable[[Any], Any]) -> None:
        """Change a group's outcome and the digest by which the plan that trained it names it."""
        index, held = self.one("groups", group=number)
        self.put(index, change(held))
        sha256 = groups.digest([self.records[index].value])
        for at, entry in self.all("ledger"):
            if any(planned.group == number for planned in entry.plan):
                plan = tuple(replace(planned, sha256=sha256) if planned.group == number else planned for planned in entry.plan)
                self.put(at, replace(entry, plan=plan))

    def prompt(self, number: int, **fields: Any) -> None:
        """Change a prompt and what the group's outcome repeats of it."""
        self.alter("prompts", where={"group": number}, **fields)
        self.group(number, lambda held: replace(held, **fields))

    def sample(self, number: int, sample: int, **fields: Any) -> None:
        """Change a sample where it was drawn and in the group's outcome."""
        self.alter("rollouts", where={"group": number, "sample": sample}, **fields)
        self.group(number, lambda held: with_sample(held, sample, **fields))

    def registered(self, section: str, **fields: Any) -> None:
        """Change what the run's own topic says it is: `info`, also in the ledger, or a section of the configuration."""
        index, held = self.all("run")[-1]
        if section == "info":
            info = {**json.loads(held.info), **fields}
            self.put(index, replace(held, info=json.dumps(info)))
            opened, entry = self.one("ledger", kind="run-opened")
            self.put(opened, replace(entry, details=json.dumps({**json.loads(entry.details), "info": info})))
            return
        config = json.loads(held.config)
        config[section].update(fields)
        self.put(index, replace(held, config=json.dumps(config)))

    def trained(self) -> list[int]:
        """The trained groups in the order of the plans."""
        return [planned.group for _, entry in self.all("ledger") if entry.kind == "step" for planned in entry.plan]

    def ended(self, outcome: str, *, from_round: int = 0, round_groups: int) -> int:
        """The number of a group with this outcome whose prompt belongs to the round or a later one."""
        return next(held.group for _, held in self.all("groups") if held.outcome == outcome and held.slot >= from_round * round_groups)

    def _held(self, record: Record) -> tuple[Any, ...]:
        kind = self.kind(record)
        if kind == "rollouts":
            return rollouts.read_all(record, run=self.run)[1]
        return (self._codec(kind).read(record, run=self.run)[1],)

    def chain(self) -> None:
        """Give each entry of the ledger the digest of the one before; a repetition stays one."""
        first: dict[int, tuple[Any, bytes]] = {}
        head = None
        for index, held in self.all("ledger"):
            plain = replace(held, previous=None)
            if first.get(held.seq, (None,))[0] == plain:
                self.rewrite(index, replace(held, previous=ledger.decode(first[held.seq][1]).previous))
                continue
            self.rewrite(index, replace(held, previous=head))
            value = self.records[index].value
            head = ledger.digest(value)
            first.setdefault(held.seq, (plain, value))

    def _write(self, index: int, *held: Any) -> None:
        self.rewrite(index, *held)
        if self.kind(self.records[index]) == "ledger":
            self.chain()

    def rewrite(self, index: int, *held: Any) -> None:
        """Encode an object in place of a record, and leave the digests of a ledger as they are."""
        record = self.records[index]
        codec = self._codec(self.kind(record))
        held = tuple(sorted(held, key=lambda sample: sample.sample)) if codec is rollouts else held
        value = codec.encode(*held)
        whole = {"worker": "scorer-0", "sha256": groups.digest([value])} if codec is groups else {}
        headers = codec.headers(*held, run=self.run, **whole).encode(value)
        self.records[index] = replace(record, headers=headers, value=value)

    def _codec(self, kind: str) -> Any:
        return Chunks if kind == "chunks" else CODECS[kind]


def with_sample(group: Any, number: int, **fields: Any) -> Any:
    """A group one of whose samples differs."""
    samples = tuple(
        replace(sample, rollout=replace(sample.rollout, **fields)) if sample.rollout.sample == number else sample
        for sample in group.samples
    )
    return replace(group, samples=samples)
