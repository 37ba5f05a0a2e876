"""Reads a recorded run for a replay: configuration, ledger, versions, and the groups of each step's plan. Read-only.

A planned group is identified by the SHA-256 of its payload; the planned partition and offset are only hints where to look.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.infra.errors import LogError, LogUnreachable, PenstockError, RunNotFound, Unrecoverable
from penstock.infra.log import Log, Tail, drain
from penstock.pipeline.config.load import Config, from_json, with_values
from penstock.pipeline.learner.ledger_history import READ_LIMIT_S, LedgerHistory, read_planned, with_later_parts
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.registration.run_registry import Registration, registration
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry, Planned
from penstock.topics.runs import RunRecord
from penstock.topics.weights import Manifest
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

POLL_S = 0.5


@dataclass(slots=True)
class Recording:
    """Configuration, ledger and published versions of a run, as far as they have been read."""

    log: Log
    run: str
    registration: Registration
    record: RunRecord
    config: Config
    info: dict[str, Any]
    ledger_state: LedgerState
    _tail: Tail
    entries: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)
    """The committed steps; step n has index n."""

    @classmethod
    def open(cls, log: Log, run: str, *, model: Path | None = None) -> Self:
        """Read ledger and manifests up to the current end; `model` replaces the recorded `model.path`. Raises `PenstockError`."""
        registered = registration(log, run)
        record = registered.record
        if record is None:
            raise RunNotFound(run)
        config = from_json(record.config)
        config = config if model is None else with_model(config, model.resolve())
        partitions = [(f"{run}.ledger", 0), (f"{run}.weights", 0)]
        for (topic, partition), start in log.beginning_offsets(partitions).items():
            if start:
                raise PenstockError(
                    f"{run} cannot be replayed: offsets 0 to {start - 1} of {topic}/{partition} were deleted; import an export with them"
                )
        tail = log.tail(dict.fromkeys(partitions, "earliest"))
        recording = cls(log, run, registered, record, config, json.loads(record.info), LedgerState(run), tail)
        for ledger_record in drain(tail, log.end_offsets(partitions)):
            recording._apply(ledger_record)
        return recording

    @property
    def past(self) -> LedgerHistory:
        """Ledger history in the form that a restarted trainer uses. Raises `Unrecoverable` if entries contradict each other."""
        return LedgerHistory(entries=self.entries, ledger_state=self.ledger_state)

    @property
    def over(self) -> bool:
        """True if the run is closed: no more entries follow."""
        return self.ledger_state.closed is not None

    @property
    def planned_steps(self) -> int:
        """Number of optimizer steps that the run plans."""
        return int(self.info.get("steps") or len(self.steps))

    def wait(self, timeout_s: float = POLL_S) -> None:
        """Wait up to `timeout_s` for new ledger entries or manifests, and apply them."""
        for record in self._tail.poll(timeout_s):
            self._apply(record)

    def close(self) -> None:
        self._tail.close()

    def published_after(self, steps: int) -> Manifest | None:
        """Return the manifest of the policy version that was published after this many steps; None if none was."""
        return next((manifest for manifest in self.ledger_state.manifests.values() if manifest.step == steps), None)

    def _apply(self, record: Record) -> None:
        try:
            entry = self.ledger_state.apply(record)
        except Unusable:
            return  # the run's workers report unreadable records as dead letters
        if isinstance(entry, Entry):
            self.entries.append(entry)
            if entry.kind == "step" and entry.step == len(self.steps):
                self.steps.append(entry)


def prepare(config: Config) -> None:
    """Set the environment variables of a trainer process. Call this before torch is imported, because torch reads them then."""
    os.environ["OMP_NUM_THREADS"] = str(config.trainer.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def with_model(config: Config, directory: str | Path) -> Config:
    """Return the configuration with another `model.path`."""
    return with_values(config, "model", path=str(directory))


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges.

    Example:
        ranges([3, 4, 5, 9])  # -> "3-5, 9"
    """
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in spans(sorted(set(numbers))))


def spans(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each block of consecutive numbers."""
    for _, pairs in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMember:
    """A planned group and the group that the log has for it."""

    planned: Planned
    group: Group | None
    """None if no record of the group can be decoded."""
    problem: str | None = None
    """How the group in the log differs from the planned one; None if it is the planned one."""


@dataclass(slots=True)
class PlannedGroups:
    """Reads the groups of plans, and searches the full topic for a group whose record is not at its planned offset."""

    log: Log
    run: str
    _index: dict[int, list[tuple[int, int]]] | None = field(default=None, repr=False)
    """Group -> (partition, offset) of the first part of each of its records; read on the first failed look-up."""

    def read(self, plan: Sequence[Planned]) -> list[PlanMember]:
        """Return the groups of a plan, in plan order. Raises `LogError` if the log cannot be read."""
        try:
            strict = read_planned(self.log, self.run, plan)
        except LogUnreachable:
            raise
        except (Unrecoverable, LogError):
            return [self._search(planned) for planned in plan]
        return [PlanMember(planned=planned, group=group) for planned, group in zip(plan, strict, strict=True)]

    def _search(self, planned: Planned) -> PlanMember:
        """Return the planned group from any of its records in the topic; else one that differs, with the problem."""
        problem = f"{self.run}.groups has no record of group {planned.group}, expected at {planned.partition}/{planned.offset}"
        group: Group | None = None
        for partition, offset in [(planned.partition, planned.offset), *self._elsewhere(planned.group)]:
            records = self._parts(partition, offset)
            if not records:
                continue
            where = f"{self.run}.groups/{partition}/{offset}"
            stored: Group | None
            try:
                headers, stored = groups.read(records, run=self.run)
            except Unusable as error:
                stored, sha256, difference = _decoded(records), "", f"the record at {where} is damaged: {error}"
            else:
                sha256 = headers.sha256 or ""
                difference = f"the record at {where} has SHA-256 {sha256[:16]}…, expected {planned.sha256[:16]}…"
            if stored is not None and stored.group == planned.group and sha256 == planned.sha256:
                return PlanMember(planned=planned, group=stored)
            if group is None and (stored is None or stored.group == planned.group):
                group, problem = stored, difference
        return PlanMember(planned=planned, group=group, problem=problem)

    def _elsewhere(self, group: int) -> Iterator[tuple[int, int]]:
        """Yield (partition, offset) of the first part of each record of a group in the topic."""
        if self._index is None:
            self._index = {}
            for outcome in RunReader(self.log, self.run).groups(decode=False, repeats=True):
                if outcome.headers is not None and outcome.headers.group is not None:
                    self._index.setdefault(outcome.headers.group, []).append((outcome.record.partition, outcome.record.offset))
        yield from self._index.get(group, [])

    def _parts(self, partition: int, offset: int) -> list[Record]:
        """Return all parts of the group whose first part is at this offset; empty if the offset cannot be read."""
        topic = f"{self.run}.groups"
        try:
            first = self.log.read(topic, partition, [offset], timeout_s=READ_LIMIT_S)[0]
            return with_later_parts(self.log, self.run, first)
        except LogUnreachable:
            raise
        except Unusable:
            return [first]
        except LogError:
            return []


def require_retained(recording: Recording, steps: Sequence[Entry]) -> None:
    """Raise `PenstockError` if retention has deleted groups of these steps; the message lists the offsets."""
    topic = f"{recording.run}.groups"
    starts = recording.log.beginning_offsets([(topic, p) for p in range(recording.log.partitions(topic) or 0)])
    deleted: dict[int, list[int]] = {}
    concerned: list[int] = []
    for entry in steps:
        lost = [planned for planned in entry.plan if planned.offset < starts.get((topic, planned.partition), 0)]
        concerned += [entry.step or 0] if lost else []
        for planned in lost:
            deleted.setdefault(planned.partition, []).append(planned.offset)
    if deleted:
        ranges_text = "; ".join(
            f"{topic}/{p} offsets {ranges(offsets)} (retained from {starts[topic, p]} on)" for p, offsets in sorted(deleted.items())
        )
        raise PenstockError(
            f"steps {ranges(concerned)} of {recording.run} cannot be replayed: records of their groups were deleted: {ranges_text}. "
            "Start after them with --from-step, which needs a later checkpoint, or import an export that has these records."
        )


def _decoded(records: Sequence[Record]) -> Group | None:
    """Decode a group from payloads only, ignoring the headers; None if it cannot be decoded."""
    try:
        return groups.decode_parts([record.value for record in records])
    except Unusable:
        return None
