"""Recovery by role and duplicate samples of a disturbed run, read from its log and the list of disturbances."""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.support.duplicate_samples import Copies, count, read_samples, read_turns
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
    """Time at which everything was loaded."""
    worker: str
    seconds: float
    """Seconds since the process was created."""
    incarnation: str


@dataclass(slots=True)
class Signs:
    """Times at which each worker was ready, and seconds of its start-ups."""

    run: str
    seen: dict[str, list[float]] = field(default_factory=dict)
    """Worker -> times of its records that show it working or ready, with no backlog."""
    starts: list[Start] = field(default_factory=list)
    repeats: dict[str, float] = field(default_factory=dict)
    """Trainer's incarnation -> seconds to load a checkpoint and recompute the steps after it."""
    _incarnations: set[tuple[str, str]] = field(default_factory=set)

    def fold(self, record: Record) -> None:
        """Record the times of one record; raises `Unusable`."""
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

    def _measured(self, status: metrics.Measurement, at: float) -> None:
        startup_s = status.values.get("startup_s")
        if startup_s is None:
            return
        if (status.worker, status.incarnation) not in self._incarnations:
            self._incarnations.add((status.worker, status.incarnation))
            self.starts.append(Start(at, status.worker, startup_s, status.incarnation))
        if "recovery_s" in status.values:
            self.repeats[status.incarnation] = status.values["recovery_s"]
        if is_ready(status):
            self._see(status.worker, at)

    def _see(self, worker: str | None, at: float) -> None:
        self.seen.setdefault(worker or "", []).append(at)


def is_ready(status: metrics.Measurement) -> bool:
    """True if a status shows a worker that would process new input at once."""
    if status.role in ("environment", "rollout", "scorer"):
        return bool(status.labels.get("partitions") or status.labels.get("calls"))
    if status.role == "trainer":
        return metrics.activity_of(status.labels) in (metrics.Activity.NO_GROUP, metrics.Activity.COMPUTE)
    return True


class Recovery(NamedTuple):
    """Seconds from a kill until the worker is ready again."""

    role: str
    seconds: float
    startup_s: float | None
    repeat_s: float
    """Part of it in which a trainer recomputed the steps since its checkpoint."""
    alone: bool
    """True if nothing else was disturbed from ten seconds before the kill until the recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The figures of one disturbed run."""

    recoveries: list[Recovery]
    unrecovered: int
    """Kills after which the run ended before the worker was needed."""
    copies: Copies
    turns: Copies
    """Duplicates of turns that travelled through the log."""
    missing_s: float
    """Seconds in which killed rollout workers were missing."""


def collect(log: Log, run: str, done: Sequence[Mapping[str, Any]]) -> Facts:
    """Read all of the run's topics and match them with the disturbances."""
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
    recoveries = [each for event in kills if (each := recovery(signs, event, done)) is not None]
    stops: dict[str, list[tuple[int, int]]] = {}
    for event in done:
        if event["stop_s"] is not None:
            span = (int(event["at"] * 1e9), int((event["at"] + event["stop_s"] + 1.0) * 1e9))
            stops.setdefault(event["worker"], []).append(span)
    return Facts(
        recoveries=recoveries,
        unrecovered=len(kills) - len(recoveries),
        copies=count(read_samples(log, run), stops=stops),
        turns=count(read_turns(log, run), stops=stops),
        missing_s=sum(each.seconds for each in recoveries if each.role == "rollout"),
    )


def recovery(signs: Signs, event: Mapping[str, Any], done: Sequence[Mapping[str, Any]]) -> Recovery | None:
    """Recovery of a killed worker; None if the run ended first."""
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
    """The figures as a table of medians and 95th percentiles."""
    titles = zip(("recovery s", "p95", "start-up", "beyond", "p95", "alone", "beyond", "p95"), WIDTHS, strict=True)
    lines = [f"{'role':<11}{'kills':>6}{'stops':>6}" + "".join(f"{title:>{width}}" for title, width in titles)]
    for role in sorted({*kills, *stops}):
        recoveries = [each for each in facts.recoveries if each.role == role]
        alone = [each for each in recoveries if each.alone]
        seconds, starts = [each.seconds for each in recoveries], [each.startup_s for each in recoveries if each.startup_s is not None]
        beyond, beyond_alone = ([each.seconds - (each.startup_s or 0.0) - each.repeat_s for each in some] for some in (recoveries, alone))
        cells = [median(seconds), p95(seconds), median(starts), median(beyond), p95(beyond)]
        cells += [str(len(alone)), median(beyond_alone), p95(beyond_alone)]
        columns = "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
        lines.append(f"{role:<11}{kills.get(role, 0):>6}{stops.get(role, 0):>6}{columns}")
    lines.append("beyond: recovery minus the worker's start-up and, for the trainer, minus the steps recomputed since its checkpoint")
    lines.append("alone: kills with nothing else disturbed from ten seconds before until the recovery")
    if facts.unrecovered:
        lines.append(f"{facts.unrecovered} killed workers were not needed again before the run ended")
    for name, copies in (("samples", facts.copies), ("turns", facts.turns)):
        if copies.samples:
            needless = f"started although visible: {copies.needless} (and {copies.needless_around_stops} around stops)"
            lines.append(f"{name} published twice: {copies.copies} of {copies.samples}; {needless}")
    copies = facts.copies
    lines.append(f"generation lost: {copies.lost_s:.1f} s in copies, {facts.missing_s:.1f} s of missing rollout workers")
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
    """Summary of the audit in one line."""
    try:
        return str(json.loads(audit.stdout)["summary"])
    except (ValueError, KeyError):
        return (audit.stderr or audit.stdout).strip()[-300:]
