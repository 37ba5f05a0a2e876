"""What the scorer learns from the rollout workers' reports in `metrics`: which of its partitions somebody draws for.

The rule: a group's deadline counts only time in which a rollout worker was there for its partition.
"""

import contextlib
from collections.abc import Iterable

from penstock.pipeline.runtime.session import Session
from penstock.pipeline.scheduling.presence import Presence, WorkingClock, hear
from penstock.topics import metrics
from penstock.topics.wire.errors import Unusable
from penstock.workers.scorer.group_buffer import PartitionGroups

LOOK_EVERY_S = 1.0


class RolloutReports:
    """Follows the rollout workers' reports, on a clock that stands still while the broker is away."""

    def __init__(self, session: Session) -> None:
        """Read the reports that come from now on."""
        self._session = session
        self.clock, self._looked_s = WorkingClock(), 0.0
        self._presence = Presence(session.config.partitions)
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
        self._presence.now_s = now
        for state in owned:
            if self._presence.present(state.partition):
                state.drawing_s += now - before

    def close(self) -> None:
        """Close the reader."""
        self._tail.close()

    def _read(self) -> None:
        for record in self._tail.poll(0.0, max_records=5000):
            with contextlib.suppress(Unusable):  # the tracker owns reading `metrics`
                if (metrics.check(record, run=self._session.run).worker or "").startswith("rollout"):
                    with self._session.dead_letters.decoding(record):
                        hear(self._presence, metrics.read(record, run=self._session.run)[1])
