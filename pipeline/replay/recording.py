"""Reads what a replay needs from a run's log: configuration, ledger, versions, and the groups of recorded plans. Read-only.

A group is the planned one if its payload has the plan's SHA-256; partition and offset are hints.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.infra.errors import LogError, LogUnreachable, PenstockError, RunNotFound, Unrecoverable
from penstock.infra.log import Log, Tail
from penstock.pipeline.config.load import Config, from_json, with_values
from penstock.pipeline.learner.ledger_history import READ_LIMIT_S, LedgerHistory, read_planned, with_later_parts
from penstock.pipeline.runtime.ledger_follower import LedgerState
from penstock.pipeline.runtime.registration.run_registry import Registration, registration
from penstock.pipeline.runtime.topic_reader import RunReader, drain
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry, Planned
from penstock.topics.runs import RunRecord
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

POLL_S = 0.5


@dataclass(slots=True)
class Recording:
    """A run's configuration, ledger and versions read so far."""

    log: Log
    run: str
    registration: Registration
    record: RunRecord
    config: Config
    info: dict[str, Any]
    ledger_state: LedgerState
    entries: list[Entry] = field(default_factory=list)
    steps: list[Entry] = field(default_factory=list)
    """The committed steps; step n has index n."""
    _tail: Tail | None = None

    @classmethod
    def open(cls, log: Log, run: str, *, model: Path | None = None) -> Self:
        """Read up to the current end; `model` replaces `model.path`, whose directory need not exist on this machine.

        Raises `PenstockError` if the run is not registered or its first ledger entries were deleted.
        """
        registered = registration(log, run)
        record = registered.record
        if record is None:
            raise RunNotFound(run)
        config = from_json(record.config)
        config = config if model is None else with_model(config, model.resolve())
        recording = cls(log, run, registered, record, config, json.loads(record.info), LedgerState(run))
        partitions = [(f"{run}.ledger", 0), (f"{run}.weights", 0)]
        for (topic, partition), start in log.beginning_offsets(partitions).items():
            if start:
                raise PenstockError(f"{run} cannot be replayed: offsets 0 to {start - 1} of {topic}/{partition} were deleted")
        recording._tail = log.tail(dict.fromkeys(partitions, "earliest"))
        for ledger_record in drain(recording._tail, log.end_offsets(partitions)):
            recording._apply(ledger_record)
        return recording

    @property
    def past(self) -> LedgerHistory:
        """The ledger history as a restarted trainer reads it. Raises `Unrecoverable`."""
        return LedgerHistory(entries=self.entries, ledger_state=self.ledger_state)

    @property
    def over(self) -> bool:
        """True if the run is closed: no more entries follow."""
        return self.ledger_state.closed is not None

    @property
    def planned_steps(self) -> int:
        """Planned optimizer steps of the run."""
        return int(self.info.get("steps") or len(self.steps))

    def wait(self, timeout_s: float = POLL_S) -> None:
        """Wait up to `timeout_s` for new records, and apply them."""
        assert self._tail is not None
        for record in self._tail.poll(timeout_s):
            self._apply(record)

    def close(self) -> None:
        """Stop reading."""
        if self._tail is not None:
            self._tail.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _apply(self, record: Record) -> None:
        try:
            entry = self.ledger_state.apply(record)
        except Unusable:
            return  # the run's workers write its dead letter
        if isinstance(entry, Entry):
            self.entries.append(entry)
            if entry.kind == "step" and entry.step == len(self.steps):
                self.steps.append(entry)


def prepare(config: Config) -> None:
    """Set a trainer's environment variables. Call it before torch is imported, which reads them."""
    os.environ["OMP_NUM_THREADS"] = str(config.trainer.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def with_model(config: Config, directory: str | Path) -> Config:
    """The configuration with another model directory."""
    return with_values(config, "model", path=str(directory))


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges.

    Example:
        ranges([3, 4, 5, 9])  # -> "3-5, 9"
    """
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in spans(sorted(set(numbers))))


def spans(ordered: list[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each run of consecutive ones."""
    for _, pairs in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in pairs]
        yield members[0], members[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMember:
    """A planned group as read from the log."""

    planned: Planned
    group: Group | None
    """None if nothing of it can be decoded."""
    problem: str | None = None
    """Difference from the planned group; None if it has none."""


@dataclass(slots=True)
class PlannedGroups:
    """Reads plans; searches all groups for a record that is not at its planned offset."""

    log: Log
    run: str
    _index: dict[int, list[tuple[int, int]]] | None = field(default=None, repr=False)
    """Group -> (partition, offset) of first parts; read when a record is not at its planned offset."""

    def read(self, plan: Sequence[Planned]) -> list[PlanMember]:
        """A plan's groups in its order. Raises `LogError` if the log cannot be read."""
        try:
            strict = read_planned(self.log, self.run, plan)
        except LogUnreachable:
            raise
        except (Unrecoverable, LogError):
            return [self._search(planned) for planned in plan]
        return [PlanMember(planned=planned, group=group) for planned, group in zip(plan, strict, strict=True)]

    def _search(self, planned: Planned) -> PlanMember:
        problem = f"no record at {self.run}.groups/{planned.partition}/{planned.offset} nor elsewhere"
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
        if self._index is None:
            self._index = {}
            for outcome in RunReader(self.log, self.run).groups(decode=False, repeats=True):
                if outcome.headers is not None and outcome.headers.group is not None:
                    self._index.setdefault(outcome.headers.group, []).append((outcome.record.partition, outcome.record.offset))
        yield from self._index.get(group, [])

    def _parts(self, partition: int, offset: int) -> list[Record]:
        """All parts of the group whose first part is at this offset; empty if there is none."""
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


class ReadAhead:
    """Prefetches the groups of the next step while one is trained."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._planned = recording, PlannedGroups(recording.log, recording.run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._prefetched: dict[int, Future[list[PlanMember]]] = {}

    def take(self, entry: Entry, *, last: int | None = None) -> list[PlanMember]:
        """The groups of a step; starts reading those of the next one, up to step `last`."""
        step = entry.step or 0
        future = self._prefetched.pop(step, None) or self._thread.submit(self._planned.read, entry.plan)
        following = step + 1
        if following < len(self._recording.steps) and (last is None or following <= last):
            self._prefetched[following] = self._thread.submit(self._planned.read, self._recording.steps[following].plan)
        return future.result()

    def close(self) -> None:
        """Wait for the read in flight and stop."""
        self._thread.shutdown(cancel_futures=True)


def require_retained(recording: Recording, steps: Sequence[Entry]) -> None:
    """Raise `PenstockError` with every offset that these steps need and retention has deleted."""
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
            f"steps {ranges(concerned)} of {recording.run} cannot be replayed, records of their groups are deleted: {ranges_text}. "
            "Use --from-step with a later checkpoint, or import an export that has them."
        )


def _decoded(records: Sequence[Record]) -> Group | None:
    """The group in the payloads, without regard to the headers."""
    try:
        return groups.decode_parts([record.value for record in records])
    except Unusable:
        return None
