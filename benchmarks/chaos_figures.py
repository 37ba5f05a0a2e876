"""What a disturbed run's log says about it: recovery by role, and what was drawn twice.

The rule: everything is read from the log; only when each disturbance happened comes from the one who did it.
"""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from duplicate_samples import Copies, count, read_drawn, read_turns

from penstock.infra.log import Log, Partition
from penstock.infra.log import Start as StartAt
from penstock.topics import groups, ledger, metrics, prompts, rollouts
from penstock.topics.turns import replies
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record

WIDTHS = (12, 7, 10, 8, 7, 7, 8, 7)
BEFORE_S = 10.0
READ = ("rollouts", "replies", "groups", "prompts", "ledger", "metrics")


class Start(NamedTuple):
    """One start of a worker."""

    at: float
    """When everything was loaded."""
    worker: str
    seconds: float
    """Since the process was created."""
    incarnation: str


@dataclass(slots=True)
class Signs:
    """When each worker was seen at its post, and how long its start-ups took."""

    run: str
    seen: dict[str, list[float]] = field(default_factory=dict)
    """Worker -> times of its records that show it at work or ready for it, with nothing left to catch up on."""
    starts: list[Start] = field(default_factory=list)
    repeats: dict[str, float] = field(default_factory=dict)
    """Trainer's incarnation -> seconds it took to load a checkpoint and repeat the steps after it."""
    _incarnations: set[tuple[str, str]] = field(default_factory=set)

    def fold(self, record: Record) -> None:
        """Take note of one record; raises `Unusable`."""
        topic, at = record.topic.removeprefix(f"{self.run}."), record.timestamp_ms / 1000
        if topic == "rollouts":
            self._see(rollouts.check(record, run=self.run).worker, at)
        elif topic == "replies":
            self._see(replies.check(record, run=self.run).worker, at)
        elif topic == "groups":
            self._see(groups.check(record, run=self.run).worker, at)
        elif topic == "prompts":
            prompts.check(record, run=self.run)
            self._see("feeder", at)
        elif topic == "ledger":
            if ledger.check(record, run=self.run).outcome == "step":
                self._see("trainer", at)
        else:
            self._measured(metrics.read(record, run=self.run)[1], at)

    def _measured(self, found: metrics.Measurement, at: float) -> None:
        startup_s = found.values.get("startup_s")
        if startup_s is None:
            return
        if (found.worker, found.incarnation) not in self._incarnations:
            self._incarnations.add((found.worker, found.incarnation))
            self.starts.append(Start(at, found.worker, startup_s, found.incarnation))
        if "recovery_s" in found.values:
            self.repeats[found.incarnation] = found.values["recovery_s"]
        if at_its_post(found):
            self._see(found.worker, at)

    def _see(self, worker: str | None, at: float) -> None:
        self.seen.setdefault(worker or "", []).append(at)


def at_its_post(found: metrics.Measurement) -> bool:
    """Whether a status shows a worker that could serve at once if the others had something for it."""
    if found.role in ("environment", "rollout", "scorer"):
        return bool(found.labels.get("partitions") or found.labels.get("calls"))
    if found.role == "trainer":
        return metrics.activity_of(found.labels) in (metrics.Activity.NO_GROUP, metrics.Activity.COMPUTE)
    return True


class Recovery(NamedTuple):
    """From a kill to the worker's return to its post, in seconds."""

    role: str
    seconds: float
    startup_s: float | None
    repeat_s: float
    """Part of it in which a trainer repeated the steps since its checkpoint."""
    alone: bool
    """Whether nothing else was disturbed from ten seconds before the kill to the recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The figures of one disturbed run."""

    recoveries: list[Recovery]
    unrecovered: int
    """Kills after which the worker was not needed any more."""
    copies: Copies
    turns: Copies
    """Of turns that travelled through the log."""
    dead_s: float
    """Seconds for which killed rollout workers were missing."""


def collect(log: Log, run: str, done: Sequence[Mapping[str, Any]]) -> Facts:
    """Read the run's topics whole and match them with what was done to it."""
    signs = Signs(run)
    names = [f"{run}.{topic}" for topic in READ]
    starts: dict[Partition, StartAt] = {(name, number): "earliest" for name in names for number in range(log.partitions(name) or 0)}
    tail = log.tail(starts)
    for record in tail.read_to_end(300.0):
        try:
            signs.fold(record)
        except Unusable:
            continue
    tail.close()
    kills = [event for event in done if event["stop_s"] is None]
    recoveries = [one for event in kills if (one := recovery(signs, event, done)) is not None]
    stops: dict[str, list[tuple[int, int]]] = {}
    for event in done:
        if event["stop_s"] is not None:
            span = (int(event["at"] * 1e9), int((event["at"] + event["stop_s"] + 1.0) * 1e9))
            stops.setdefault(event["worker"], []).append(span)
    return Facts(
        recoveries=recoveries,
        unrecovered=len(kills) - len(recoveries),
        copies=count(read_drawn(log, run), stops=stops),
        turns=count(read_turns(log, run), stops=stops),
        dead_s=sum(one.seconds for one in recoveries if one.role == "rollout"),
    )


def recovery(signs: Signs, event: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> Recovery | None:
    """How long what was killed was of no use; None when it never came back because the run ended."""
    role, at, startup_s, repeat_s = event["role"], event["at"], None, 0.0
    if role == "broker":
        after = [event["back_at"]] if "back_at" in event else []
    else:
        starts = sorted(start for start in signs.starts if start.worker == event["worker"] and start.at > at)
        if not starts:
            return None
        startup_s, repeat_s = starts[0].seconds, signs.repeats.get(starts[0].incarnation, 0.0)
        after = [seen for seen in signs.seen.get(event["worker"], ()) if seen >= starts[0].at]
    if not after:
        return None
    back = min(after)
    alone = not any(
        other is not event and at - BEFORE_S <= other["at"] + (other["stop_s"] or 0.0) and other["at"] <= back for other in done
    )
    return Recovery(role, back - at, startup_s, repeat_s, alone)


def table(facts: Facts, *, kills: Mapping[str, int], stops: Mapping[str, int]) -> str:
    """The figures for people: medians, and 95th percentiles beside them."""
    titles = zip(("recovery s", "p95", "start-up", "beyond", "p95", "alone", "beyond", "p95"), WIDTHS, strict=True)
    lines = [f"{'role':<11}{'kills':>6}{'stops':>6}" + "".join(f"{title:>{width}}" for title, width in titles)]
    for role in sorted({*kills, *stops}):
        found = [one for one in facts.recoveries if one.role == role]
        alone = [one for one in found if one.alone]
        seconds, starts = [one.seconds for one in found], [one.startup_s for one in found if one.startup_s is not None]
        beyond, beyond_alone = ([one.seconds - (one.startup_s or 0.0) - one.repeat_s for one in some] for some in (found, alone))
        cells = [median(seconds), p95(seconds), median(starts), median(beyond), p95(beyond)]
        cells += [str(len(alone)), median(beyond_alone), p95(beyond_alone)]
        columns = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        lines.append(f"{role:<11}{kills.get(role, 0):>6}{stops.get(role, 0):>6}{columns}")
    lines.append("beyond: recovery less the worker's own start-up and, for the trainer, less the steps repeated since its checkpoint")
    lines.append("alone: kills with nothing else disturbed from ten seconds before until the recovery")
    if facts.unrecovered:
        lines.append(f"{facts.unrecovered} killed workers were not needed any more before the run ended")
    copies = facts.copies
    lines.append(
        f"samples published twice: {copies.copies} of {copies.samples}; begun although visible: {copies.needless}"
        f" (and {copies.needless_around_stops} around stops)"
    )
    if (turns := facts.turns).samples:
        lines.append(
            f"turns drawn twice: {turns.copies} of {turns.samples}; begun although answered: {turns.needless}"
            f" (and {turns.needless_around_stops} around stops)"
        )
    lines.append(f"generation lost: {copies.lost_s:.1f} s in copies, {facts.dead_s:.1f} s of missing rollout workers")
    return "\n".join(lines)


def median(values: Sequence[float]) -> str:
    """For a table; a dash without values."""
    return f"{statistics.median(values):.1f}" if values else "-"


def p95(values: Sequence[float]) -> str:
    """The 95th percentile for a table, the largest of few; a dash without values.

    Example:
        p95([1.0, 2.0, 3.0])  # -> "3.0"
    """
    return f"{sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]:.1f}" if values else "-"


def audit_line(audit: "subprocess.CompletedProcess[str]") -> str:
    """What the audit came to, in one line."""
    try:
        return str(json.loads(audit.stdout)["summary"])
    except (ValueError, KeyError):
        return (audit.stderr or audit.stdout).strip()[-300:]
