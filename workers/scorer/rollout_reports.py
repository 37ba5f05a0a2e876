"""Follows the reports in `metrics`: for which of the scorer's partitions a rollout worker is there.

The rule: a group's deadline counts only time in which a worker was there for its partition; where trajectories ask for their turns
through the log, one that plays them and one that draws.
"""

import contextlib
from collections.abc import Iterable

from penstock.pipeline.runtime.roles import drawing
from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling.presence import CALLS, PROMPTS, Presence, WorkingClock, update_presence
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable
from penstock.workers.scorer.group_buffer import PartitionGroups

LOOK_EVERY_S = 1.0


class RolloutReports:
    """Follows rollout workers' reports on a clock that stops while the broker is away."""

    def __init__(self, session: Session) -> None:
        """Read the reports that come from now on."""
        self._session = session
        self.clock, self._looked_s = WorkingClock(), 0.0
        labels = (PROMPTS, CALLS) if session.config.turns_by_log else (PROMPTS,)
        self._presences = {label: Presence(session.config.partitions) for label in labels}
        self._tail = session.log.tail({(session.topic("metrics"), 0): "latest"})

    @property
    def now_s(self) -> float:
        """The scorer's working time."""
        return self.clock.now_s

    def pass_time(self, owned: Iterable[PartitionGroups], *, working: bool) -> None:
        """Advance the clock, and those of the partitions whose rollout worker reports."""
        before = self.clock.now_s
        now = self.clock.tick(working=working)
        if now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            self._read()
        for presence in self._presences.values():
            presence.now_s = now
        for state in owned:
            if all(presence.present(state.partition) for presence in self._presences.values()):
                state.drawing_s += now - before

    def close(self) -> None:
        """Close the reader."""
        self._tail.close()

    def _read(self) -> None:
        for record in self._tail.poll(0.0, max_records=5000):
            with contextlib.suppress(Unusable):  # the tracker owns reading `metrics`
                if (metrics.check(record, run=self._session.run).worker or "").startswith(tuple(drawing())):
                    with self._session.dead_letters.decoding(record):
                        measured = metrics.read(record, run=self._session.run)[1]
                    for label, presence in self._presences.items():
                        update_presence(presence, measured, label=label)
