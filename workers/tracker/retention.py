"""Deletes records that a run needs no more: prompts, samples, turns and groups of steps before the newest `kafka.keep_steps`.

Retained is what an open or untrained group, a checkpoint a trainer may load, or a restarted tracker needs; with `kafka.archive` also what
was not exported. A prompt is deleted before its outcome, so that no group without an outcome is generated again.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.infra.errors import LogError, PenstockError
from penstock.infra.kafka.log import KafkaLog
from penstock.infra.log import Partition, Pending
from penstock.pipeline.archive.export import export
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling import rules
from penstock.pipeline.scheduling.resume_point import ResumePoint, resume_point_of
from penstock.topics.catalogue import BY_GROUP, TURNS
from penstock.topics.ledger import Entry

CLOCKS_APART_S = 600.0
"""Samples and groups stay for so much longer than their prompts: the records' times come from the clocks of several machines."""


@dataclass(slots=True)
class Retention:
    """Tracks which records a run still needs."""

    session: Session
    _resume_point: ResumePoint | None = None
    """Resume point of the newest step."""
    _steps: int = 0
    _planned: dict[int, dict[int, int]] = field(default_factory=dict)
    """Step -> partition -> the first offset in `groups` that it trained."""
    _published_ms: dict[int, int] = field(default_factory=dict)
    """Version -> time of publication."""
    _cut: int = 0
    """Number of steps whose records were deleted."""
    _deleting: threading.Thread | None = None

    def note(self, entry: Entry) -> None:
        """Record from a ledger entry the time of a version's publication, or the groups and the resume point of a step."""
        if self.session.config.kafka.keep_steps is None:
            return
        if entry.kind == "version" and entry.version is not None:
            self._published_ms[entry.version] = entry.time_ns // 1_000_000
        if entry.kind == "step" and entry.step is not None:
            first = self._planned.setdefault(entry.step, {})
            for planned in entry.plan:
                first[planned.partition] = min(planned.offset, first.get(planned.partition, planned.offset))
            self._steps, self._resume_point = entry.step + 1, resume_point_of(entry)

    def delete(self, view: RunView, positions: Mapping[Partition, int], saved: Pending) -> None:
        """Start to delete the records that the run needs no more, in a thread, once `saved` (the view's record) is acknowledged.

        Readers of the saved view continue from `positions`, so that records from there on stay. Nothing happens while a deletion runs.
        """
        keep, resume_point = self.session.config.kafka.keep_steps, self._resume_point
        if keep is None or resume_point is None or not resume_point.checkpoints:
            return
        cut = min(self._steps - keep, resume_point.checkpoints[-1][0])  # a trainer may resume from this checkpoint
        if cut <= self._cut or (self._deleting is not None and self._deleting.is_alive()):
            return
        try:
            before = self._before(cut, view, positions)
        except LogError:  # broker unreachable: try later
            return
        self._cut = cut
        self._planned = {step: first for step, first in self._planned.items() if step >= cut}
        self._deleting = threading.Thread(target=self._delete, args=(before, saved), daemon=True, name="retention")
        self._deleting.start()

    def close(self, timeout_s: float = 5.0) -> None:
        if self._deleting is not None:
            self._deleting.join(timeout_s)

    def _before(self, cut: int, view: RunView, positions: Mapping[Partition, int]) -> dict[Partition, int]:
        """Partition -> offset below which its records may be deleted: none of them is of step `cut` or later, nor after `positions`."""
        schedule, resume_point, log = self.session.schedule, self._resume_point, self.session.log
        assert resume_point is not None
        # No sample that step `cut` may train is older than this version, and no prompt that is open than its own record.
        oldest = max(0, rules.version_after(cut, steps_per_version=schedule.steps_per_version) - schedule.max_lag)
        times = [self._published_ms.get(oldest, 0), *(round(1000 * opened.time_s) for opened in view.open.values())]
        prompts_ms = min(times)
        others_ms = prompts_ms - int(1000 * CLOCKS_APART_S)
        self._published_ms = {version: at for version, at in self._published_ms.items() if version >= oldest}
        names = [name for name in BY_GROUP if name != "prompts" and (name not in TURNS or self.session.config.turns_by_log)]
        before = log.offsets_at(self._partitions("prompts"), max(0, prompts_ms))
        before |= log.offsets_at([partition for name in names for partition in self._partitions(name)], max(0, others_ms))
        for number, partition in enumerate(self._partitions("groups")):
            planned = [first[number] for step, first in self._planned.items() if step >= cut and number in first]
            before[partition] = min(before[partition], resume_point.positions.get(f"groups/{number}", 0), *planned)
        first_offsets = log.beginning_offsets(before)
        limited = {partition: min(offset, positions.get(partition, offset)) for partition, offset in before.items()}
        return {partition: offset for partition, offset in limited.items() if offset > first_offsets[partition]}

    def _partitions(self, name: str) -> list[Partition]:
        return [(self.session.topic(name), number) for number in range(self.session.config.partitions)]

    def _delete(self, before: Mapping[Partition, int], saved: Pending) -> None:
        """Export, then delete; if either fails, the records stay and the run continues."""
        session, archive = self.session, self.session.config.kafka.archive
        prompts = {partition: offset for partition, offset in before.items() if partition[0] == session.topic("prompts")}
        try:
            saved.offset()
            if archive is not None and isinstance(session.log, KafkaLog):
                export(session.log, session.run, Path(archive))
            session.log.delete_records(prompts)
            session.log.delete_records({partition: offset for partition, offset in before.items() if partition not in prompts})
        except (PenstockError, OSError, ValueError) as error:
            session.reporter.throttled.notify("records that stay", f"old records were not deleted; trying again later: {error}")
