"""The timeline of a run as columns for a page: `penstock.pipeline.observe.tables.timeline`'s intervals, and what each worker said it did.

The rule: a moment is counted in ticks from when the run was created, as whole numbers, in the finest tick that its length allows.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.pipeline.observe.html.groups import Row
from penstock.pipeline.observe.html.pack import Column
from penstock.pipeline.observe.html.reading import Story, kind_of
from penstock.pipeline.observe.run_view import RunView
from penstock.pipeline.observe.tables.timeline import Drawn, Ended, Facts, Interval, intervals

KINDS = ("rollout", "score", "train", "wait", "publish", "load", "checkpoint", "eval", "start")
TICKS_MS = (0.1, 1.0, 10.0, 100.0)
NEVER = -(1 << 31) + 1
MAX_INTERVALS = 60_000
"""Of each sort the newest are kept."""


class Clock(NamedTuple):
    """Moments as whole numbers."""

    zero_ns: int
    tick_ms: float

    @classmethod
    def of(cls, *, zero_ns: int, last_ns: int) -> "Clock":
        """The finest tick in which the whole run fits into 31 bits.

        Example:
            Clock.of(zero_ns=0, last_ns=3600 * 10**9).tick_ms  # -> 0.1
        """
        span_ms = (last_ns - zero_ns) / 1e6
        return cls(zero_ns, next((tick for tick in TICKS_MS if span_ms / tick < 1 << 30), TICKS_MS[-1]))

    def ticks(self, moments_ns: Any) -> Column:
        """Moments [N] in nanoseconds as ticks, int32; `NEVER` for one that is not known (0)."""
        moments = np.asarray(moments_ns, np.int64)
        since = np.clip(np.rint((moments - self.zero_ns) / (self.tick_ms * 1e6)), NEVER + 1, (1 << 31) - 1)
        return np.where(moments == 0, NEVER, since).astype(np.int32)


def timeline(rows: Iterable[Row], story: Story) -> list[Interval]:
    """All intervals of the listed groups, and of the workers."""
    facts = Facts(entries=story.entries)
    for row in rows:
        if row.scorer:
            facts.ended[row.group] = Ended(row.group, row.scorer, row.scored_ns)
        for one in row.rollouts:
            written = story.written_ns.get(row.group, one.ended_ns)
            facts.drawn[row.group, one.sample] = Drawn(
                row.group, one.sample, one.worker, one.version_min, one.started_ns, one.ended_ns, written
            )
    for found in story.measured:
        facts.measured.setdefault((found.worker, found.incarnation), {}).setdefault(found.seq, found)
    return list(intervals(facts))


def interval_columns(found: Iterable[Interval], *, workers: Mapping[str, int], clock: Clock) -> tuple[list[str], dict[str, Column]]:
    """The causes by number, and the intervals [N] in the order in which they began; samples and scoring are columns of their own."""
    rest = sorted((one for one in found if one.what not in ("rollout", "score")), key=lambda one: one.started)[-MAX_INTERVALS:]
    causes = ["", *sorted({one.cause for one in rest if one.cause})]
    number = {cause: place for place, cause in enumerate(causes)}
    return causes, {
        "i_kind": np.array([KINDS.index(one.what) for one in rest], np.uint8),
        "i_worker": np.array([workers[one.worker] for one in rest], np.uint16),
        "i_start": clock.ticks([one.started for one in rest]),
        "i_end": clock.ticks([one.ended for one in rest]),
        "i_step": np.array([-1 if one.step is None else one.step for one in rest], np.int32),
        "i_version": np.array([-1 if one.version is None else one.version for one in rest], np.int32),
        "i_cause": np.array([number[one.cause or ""] for one in rest], np.uint16),
    }


def scoring_columns(rows: Sequence[Row], found: Iterable[Interval], *, clock: Clock) -> dict[str, Column]:
    """When scoring of each group [G] began and ended."""
    spans = {one.group: (one.started, one.ended) for one in found if one.what == "score"}
    return {
        "g_scoring": clock.ticks([spans.get(row.group, (0, 0))[0] for row in rows]),
        "g_scored": clock.ticks([row.scored_ns for row in rows]),
    }


def activity_columns(story: Story, *, workers: Mapping[str, int], clock: Clock) -> tuple[list[tuple[str, str]], dict[str, Column]]:
    """(label, work or wait or load) by number, and what each worker said it did, [N] in the order in which it began."""
    found = sorted(story.activities, key=lambda one: one.started_ns)[-MAX_INTERVALS:]
    labels = sorted({one.label for one in found})
    number = {label: place for place, label in enumerate(labels)}
    columns = {
        "a_worker": np.array([workers[one.worker] for one in found], np.uint16),
        "a_label": np.array([number[one.label] for one in found], np.uint16),
        "a_start": clock.ticks([one.started_ns for one in found]),
        "a_end": clock.ticks([one.ended_ns for one in found]),
    }
    return [(label, kind_of(label)) for label in labels], columns


def time_spent(view: RunView, story: Story) -> list[dict[str, Any]]:
    """Seconds by role and by what its workers said they did, most first within a role; statuses come once a second."""
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for one in story.activities:
        spent[view.workers[one.worker].role, one.label] += (one.ended_ns - one.started_ns) / 1e9
    rows = [{"role": role, "doing": label, "kind": kind_of(label), "seconds": round(took, 3)} for (role, label), took in spent.items()]
    return sorted(rows, key=lambda row: (row["role"], -row["seconds"]))
