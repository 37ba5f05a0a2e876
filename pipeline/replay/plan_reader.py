"""Reads the groups of recorded plans: as planned, moved, altered or missing.

A group is the planned one if its payload has the plan's SHA-256; partition and offset are hints.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.infra.errors import LogError, LogUnreachable, PenstockError, Unrecoverable
from penstock.infra.log import Log
from penstock.pipeline.learner.ledger_history import READ_LIMIT_S, read_planned, with_later_parts
from penstock.pipeline.replay.recording import Recording, ranges
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics import groups
from penstock.topics.groups import Group
from penstock.topics.ledger import Entry, Planned
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record


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
