"""Diagnoses a stalled run: finds the stage and the group that it waits for, from its view, schedule and time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.pipeline.config.load import from_json
from penstock.pipeline.inspect.run_status import group_statuses, status_counts, steps_planned
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.run_view_types import WorkerView
from penstock.pipeline.runtime.roles import HELPERS, generating_roles
from penstock.pipeline.scheduling.rules import SETTLED, Schedule, version_after, versions_of

SILENT_S = 5.0
"""A worker without a report for this long is silent; workers report every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Diagnosis of a stalled run."""

    stage: str
    group: int | None = None
    """Lowest group that the next step waits for, if it waits for a group."""
    reason: str

    def same_as(self, other: "Stuck | None") -> bool:
        """True if both diagnoses are equal apart from elapsed times in the text."""
        return other is not None and (self.stage, self.group, _timeless(self.reason)) == (other.stage, other.group, _timeless(other.reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The samples of one group that are in the log."""

    samples: int
    newest_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """State of a run at one point in time."""

    view: RunView
    now_s: float
    silent: Mapping[str, float]
    outage_s: float = 0.0
    generated: Generated | None = None
    """Samples of the group that `waiting_for` returns; None if they were not read."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Worker -> what the launcher knows about its process."""


def waiting_for(view: RunView) -> int | None:
    """Return the lowest group without an outcome that the next step waits for; None if it waits for something else."""
    rules = _rules(view)
    if rules is None or _missing_version(view, rules) is not None:
        return None
    unsettled = [group for group, status in group_statuses(view).items() if status not in SETTLED]
    needed = _needed(view, rules)
    if rules.order == "submission":
        unsettled = unsettled[:needed]
    elif sum(group in view.groups for group in unsettled) >= needed:
        return None
    return next((group for group in unsettled if group not in view.groups), None)


def find(snapshot: RunSnapshot) -> Stuck | None:
    """Diagnose what the run waits for now, also if it has waited only briefly; None for a run that has ended."""
    view = snapshot.view
    if snapshot.outage_s:
        return Stuck(stage="broker", reason=f"the broker has not responded for {snapshot.outage_s:.0f} s")
    if view.closed is not None:
        last = [worker for role in HELPERS for worker in _of(view, role)]
        states = "; ".join(_state(snapshot, worker) for worker in last)
        return Stuck(stage=last[0].role, reason=f"the run is closed; {states}") if last else None
    rules = _rules(view)
    if rules is None or view.opened is None:
        return Stuck(stage="trainer", reason=f"the run is not opened yet; {_role(snapshot, 'trainer')}")
    if (version := _missing_version(view, rules)) is not None:
        return Stuck(stage="trainer", reason=f"waiting for version {version}; {_role(snapshot, 'trainer')}")
    group = waiting_for(view)
    if group is not None:
        return _group(snapshot, rules, group)
    if view.steps_done == steps_planned(view):
        return Stuck(stage="trainer", reason=f"all steps are done; {_role(snapshot, 'trainer')}")
    step, unsettled = view.steps_done, sum(status not in SETTLED for status in group_statuses(view).values())
    if unsettled >= _needed(view, rules):
        return Stuck(stage="trainer", reason=f"step {step} has all its groups; {_role(snapshot, 'trainer')}")
    for role in _generating_roles(view):
        if not _of(view, role):
            return Stuck(stage=role, reason=_role(snapshot, role))
    return Stuck(
        stage="feeder", reason=f"step {step} waits for the prompt of group {status_counts(view).total()}; {_role(snapshot, 'feeder')}"
    )


def _group(snapshot: RunSnapshot, rules: Schedule, group: int) -> Stuck:
    """Diagnose a group that the next step needs and that has no outcome: it waits for the feeder, for samples, or for the scorer."""
    view, generated = snapshot.view, snapshot.generated
    opened = view.open.get(group)
    step = f"step {view.steps_done} waits for group {group}"
    if opened is None:
        return Stuck(stage="feeder", group=group, reason=f"{step}, which was not admitted yet; {_role(snapshot, 'feeder')}")
    waiting = f"{step} (partition {opened.partition})"
    if generated is not None and generated.samples >= rules.samples_per_prompt:
        since = "" if generated.newest_s is None else f" since {max(0.0, snapshot.now_s - generated.newest_s):.0f} s"
        return Stuck(stage="scorer", group=group, reason=f"{waiting}, complete{since}; {_role(snapshot, 'scorer', opened.partition)}")
    admitted = f"prompt admitted {max(0.0, snapshot.now_s - opened.time_s):.0f} s ago"
    there = "" if generated is None else f", {generated.samples} of {rules.samples_per_prompt} samples there"
    owners = "; ".join(_role(snapshot, role, opened.partition) for role in _generating_roles(view))
    return Stuck(stage=_generating_roles(view)[0], group=group, reason=f"{waiting}: {admitted}{there}; {owners}")


def _generating_roles(view: RunView) -> tuple[str, ...]:
    """Return the roles that produce the samples of a group, first the one that receives the prompt."""
    by_log = view.record is not None and from_json(view.record.config).turns_by_log
    return ("environment", "rollout") if by_log else ("rollout",)


def _role(snapshot: RunSnapshot, role: str, partition: int | None = None) -> str:
    """Describe the activity of a role's workers, or of the worker that owns `partition` if the owner is known."""
    there = _of(snapshot.view, role)
    if not there:
        gone = [worker for worker in snapshot.view.workers.values() if worker.role == role and "error" in worker.labels]
        return f"no {role}{' worker' * (role in generating_roles())}" + "".join(
            f"; {worker.worker} failed: {worker.labels['error']}" for worker in gone
        )
    if partition is not None:
        owners = [worker for worker in there if str(partition) in _owned(worker).split(",")]
        if owners:  # if two workers claim the partition, the older report is outdated
            there = [min(owners, key=lambda worker: snapshot.silent.get(worker.worker, 0.0))]
        elif any(_owned(worker) for worker in there):
            return f"no {role} worker owns the partition yet; " + "; ".join(_state(snapshot, worker) for worker in there)
    return "; ".join(_state(snapshot, worker) for worker in there)


def _owned(worker: WorkerView) -> str:
    """Return the partitions of prompts or calls that a worker reports as its own."""
    return worker.labels.get("partitions") or worker.labels.get("calls", "")


def _state(snapshot: RunSnapshot, worker: WorkerView) -> str:
    """Describe one worker: the launcher's note about its process, its silence, or its activity."""
    silent_s, doing = snapshot.silent.get(worker.worker, 0.0), worker.labels.get("doing", "starting")
    if worker.worker in snapshot.notes:
        return f"{worker.worker} {snapshot.notes[worker.worker]}"
    if silent_s > SILENT_S:
        return f"{worker.worker} has not reported for {silent_s:.0f} s (last activity: {doing})"
    return f"{worker.worker}: {doing}"


def _of(view: RunView, role: str) -> list[WorkerView]:
    return [worker for worker in view.workers.values() if worker.role == role and not worker.ended]


def _needed(view: RunView, rules: Schedule) -> int:
    """Return the number of groups that the next step waits for: its own, or with `starts_on = "round"` those of its full round."""
    left = max(0, (steps_planned(view) or 0) - view.steps_done) * rules.prompts_per_step
    begins = rules.starts_on == "round" and view.steps_done % rules.steps_per_version == 0
    return min(rules.round_groups if begins else rules.prompts_per_step, left)


def _missing_version(view: RunView, rules: Schedule) -> int | None:
    """Return the version that should be published already and is not; None if there is none."""
    steps, every = view.steps_done, rules.steps_per_version
    due = versions_of(steps, steps_per_version=every) if steps == steps_planned(view) else version_after(steps, steps_per_version=every)
    newest = view.version
    return due if newest is None or newest < due else None


def _rules(view: RunView) -> Schedule | None:
    return None if view.record is None else from_json(view.record.config).rules


def _timeless(reason: str) -> str:
    return re.sub(r"\d+ s\b", "_ s", reason)
