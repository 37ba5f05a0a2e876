"""The groups of recorded plans as they stand in the log today: as planned, moved, altered or gone.

The rule: a group is the planned one when its payload has the plan's SHA-256, wherever it stands; partition and offset are hints.
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
class Found:
    """What stands in the log for a planned group."""

    planned: Planned
    group: Group | None
    """None where nothing of it can be decoded."""
    problem: str | None = None
    """In which way it is not what was planned; None when it is."""


@dataclass(slots=True)
class PlannedGroups:
    """Reads plans, and looks further where the strict reading of a trainer would stop."""

    log: Log
    run: str
    _index: dict[int, list[tuple[int, int]]] | None = field(default=None, repr=False)
    """Group -> (partition, offset) of first parts; read once a record is not where its plan says."""

    def read(self, plan: Sequence[Planned]) -> list[Found]:
        """A plan's groups in its order. Raises `LogError` when the log does not answer."""
        try:
            strict = read_planned(self.log, self.run, plan)
        except LogUnreachable:
            raise
        except (Unrecoverable, LogError):
            return [self._look(planned) for planned in plan]
        return [Found(planned=planned, group=group) for planned, group in zip(plan, strict, strict=True)]

    def _look(self, planned: Planned) -> Found:
        place = f"{self.run}.groups/{planned.partition}/{planned.offset}"
        problem = f"no record stands at {place} nor elsewhere"
        group: Group | None = None
        for partition, offset in [(planned.partition, planned.offset), *self._elsewhere(planned.group)]:
            records = self._parts(partition, offset)
            if not records:
                continue
            at = f"{self.run}.groups/{partition}/{offset}"
            stored: Group | None
            try:
                headers, stored = groups.read(records, run=self.run)
            except Unusable as error:
                stored, sha256, difference = _decoded(records), "", f"the record at {at} is damaged: {error}"
            else:
                sha256 = headers.sha256 or ""
                difference = f"the record at {at} has SHA-256 {sha256[:16]}…, the plan says {planned.sha256[:16]}…"
            if stored is not None and stored.group == planned.group and sha256 == planned.sha256:
                return Found(planned=planned, group=stored)
            if group is None and (stored is None or stored.group == planned.group):
                group, problem = stored, difference
        return Found(planned=planned, group=group, problem=problem)

    def _elsewhere(self, group: int) -> Iterator[tuple[int, int]]:
        if self._index is None:
            self._index = {}
            for outcome in RunReader(self.log, self.run).groups(decode=False, repeats=True):
                if outcome.headers is not None and outcome.headers.group is not None:
                    self._index.setdefault(outcome.headers.group, []).append((outcome.record.partition, outcome.record.offset))
        yield from self._index.get(group, [])

    def _parts(self, partition: int, offset: int) -> list[Record]:
        """All parts of the group whose first part is there; nothing where none is."""
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
    """Reads the plan of the next step while one is trained."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._planned = recording, PlannedGroups(recording.log, recording.run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._coming: dict[int, Future[list[Found]]] = {}

    def take(self, entry: Entry, *, last: int | None = None) -> list[Found]:
        """The groups of a step; those of the one after it, up to step `last`, are read meanwhile."""
        step = entry.step or 0
        coming = self._coming.pop(step, None) or self._thread.submit(self._planned.read, entry.plan)
        following = step + 1
        if following < len(self._recording.steps) and (last is None or following <= last):
            self._coming[following] = self._thread.submit(self._planned.read, self._recording.steps[following].plan)
        return coming.result()

    def close(self) -> None:
        """Wait for what is under way and end."""
        self._thread.shutdown(cancel_futures=True)


def check_kept(recording: Recording, steps: Sequence[Entry]) -> None:
    """Raise `PenstockError` that names every offset that these steps need and retention has deleted."""
    topic = f"{recording.run}.groups"
    begins = recording.log.beginning_offsets([(topic, p) for p in range(recording.log.partitions(topic) or 0)])
    gone: dict[int, list[int]] = {}
    concerned: list[int] = []
    for entry in steps:
        lost = [planned for planned in entry.plan if planned.offset < begins.get((topic, planned.partition), 0)]
        concerned += [entry.step or 0] if lost else []
        for planned in lost:
            gone.setdefault(planned.partition, []).append(planned.offset)
    if gone:
        places = "; ".join(
            f"{topic}/{p} offsets {ranges(offsets)} (kept from {begins[topic, p]} on)" for p, offsets in sorted(gone.items())
        )
        raise PenstockError(
            f"steps {ranges(concerned)} of {recording.run} cannot be replayed, records of their groups are deleted: {places}; "
            "--from-step with a checkpoint behind them, or an import of an export that has them, helps"
        )


def _decoded(records: Sequence[Record]) -> Group | None:
    """What the payloads say, whatever the headers say."""
    try:
        return groups.decode_parts([record.value for record in records])
    except Unusable:
        return None
