"""Tracks which partitions have a live owner, by the workers' reports: only there groups are admitted, and only there their clocks run.

A killed worker does not report its exit, so ownership expires `SILENT_S` after its last report.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.topics.metrics import Measurement

SILENT_S = 30.0
"""An owner without a report for this long is absent. It reports once a second, except while it loads weights or compiles."""


@dataclass(slots=True)
class Presence:
    """The owners of a run's partitions according to their reports, on the reader's clock."""

    partitions: int
    now_s: float = 0.0
    """The reader's working time."""
    slots: list[int] = field(init=False)
    """Partition -> number of unfinished groups that it may have at once."""
    _owners: list[str | None] = field(init=False)
    _seen_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.slots, self._owners, self._seen_s = [0] * self.partitions, [None] * self.partitions, [0.0] * self.partitions

    def update(self, process: str, owned: Collection[int], *, slots: int) -> None:
        """Apply a report: the process owns exactly these partitions and has `slots` for groups over all of them."""
        share = max(1, -(-slots // max(1, len(owned))))
        for partition in range(self.partitions):
            if partition in owned:
                self._owners[partition], self.slots[partition], self._seen_s[partition] = process, share, self.now_s
            elif self._owners[partition] == process:
                self._owners[partition] = None

    def present(self, partition: int) -> bool:
        """True if the partition's owner reports."""
        return self._owners[partition] is not None and self.now_s - self._seen_s[partition] <= SILENT_S

    @property
    def owners(self) -> list[str | None]:
        """The owner of each partition, or None if it has none that reports."""
        return [owner if self.present(partition) else None for partition, owner in enumerate(self._owners)]


PROMPTS, CALLS = "partitions", "calls"
"""Labels in a worker's report with its owned partitions of `prompts` and of `calls`."""


def update_presence(presence: Presence, measured: Measurement, *, label: str = PROMPTS) -> None:
    """Apply a worker's measurement if its role owns such partitions."""
    if measured.role in _OWNERS[label] and label in measured.labels:
        owned = [] if measured.kind == "final" else [int(text) for text in measured.labels[label].split(",") if text]
        # Two machines may start workers with the same name: one's reports do not change the partitions of the other.
        presence.update(f"{measured.worker}/{measured.incarnation}", owned, slots=int(measured.values.get("slots", 1)))


_OWNERS = {PROMPTS: ("rollout", "environment"), CALLS: ("rollout",)}


@dataclass(slots=True)
class WorkingClock:
    """A clock that runs only while its owner works, not during an outage or while the process is stopped.

    Each iteration of a loop adds the time since the last one, up to `longest_turn_s`.
    """

    longest_turn_s: float = 1.0
    now_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def tick(self, *, working: bool = True) -> float:
        """Advance the clock and return it."""
        now = time.monotonic()
        if working:
            self.now_s += min(now - self._last, self.longest_turn_s)
        self._last = now
        return self.now_s
