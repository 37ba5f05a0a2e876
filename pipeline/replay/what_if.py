"""`penstock replay train --set …` (a what-if): trains the recorded groups under other settings, and logs the curves to MLflow.

The samples are those that the recorded policies generated, so training is off-policy, and results are labelled as such.
"""

import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.infra.checkpoints import State
from penstock.infra.errors import ConfigError, PenstockError
from penstock.infra.mlflow.tracking import ChildRun, Point
from penstock.infra.paths import new_directory
from penstock.pipeline.inspect.metrics import target_of
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.learner.train_step import StepOutcome
from penstock.pipeline.replay.overrides import WhatIf
from penstock.pipeline.replay.recording import Recording, require_retained
from penstock.pipeline.replay.restore_policy import StartPoint, advance_to, arithmetic, open_policy
from penstock.pipeline.replay.steps import ReplayRequest, Result, Selection, StepToTrain, await_weights, check_steps, replay_steps
from penstock.pipeline.scheduling import rules
from penstock.topics.ledger import Entry

OFF_POLICY = "the samples are those of the recorded run's policies: read ess and kl_behaviour_k3 first"
CURVES = ("loss", "grad_norm", "reward_trained", "ess", "kl", "kl_behaviour_k1", "kl_behaviour_k3", "clip_fraction", "lr")
"""Metrics in the result, each next to the recorded one. MLflow receives all metrics."""


@dataclass(slots=True)
class WhatIfResult(Result):
    """Result of a what-if, filled while steps are trained."""

    changed: Mapping[str, tuple[Any, Any]]
    plans: str = "recorded"
    steps: list[dict[str, Any]] = field(default_factory=list)
    """One row per step: its number, and the metrics of the what-if and of the recorded run."""
    recorded_digest: str | None = None
    """Digest of the run's final weights; None if the run is not closed."""
    exported: str | None = None
    mlflow_run_id: str | None = None

    def as_json(self) -> dict[str, Any]:
        return Result.as_json(self) | {
            "kind": "what-if",
            "off_policy": OFF_POLICY,
            "changed": {key: {"recorded": before, "here": now} for key, (before, now) in self.changed.items()},
            "plans": self.plans,
            "steps": len(self.steps),
            "matching_steps": None,
            "first_difference": None,
            "curves": self.steps,
            "recorded_digest": self.recorded_digest,
            "exported": self.exported,
            "mlflow_run_id": self.mlflow_run_id,
        }


def train(
    recording: Recording,
    what_if: WhatIf,
    request: ReplayRequest,
    *,
    result: WhatIfResult,
    curves: AbstractContextManager[ChildRun | None],
    export: Path | None,
    notify: Notify,
) -> None:
    """Train the recorded groups under the changed settings, and fill `result` step by step, so that it is usable after an interruption.

    `curves` yields the MLflow run and is entered when training starts. `export` is the directory for the trained model.
    """
    start = time.monotonic()
    selects = what_if.selects or not (recording.steps or (request.follow and not recording.over))
    if selects and request.from_step:
        raise ConfigError(
            "--from-step: the changed settings plan all steps again, from step 0 on; remove --from-step, or change only algorithm.* and "
            "trainer.* settings"
        )
    if not selects:
        check_steps(recording, request)
        requested = recording.steps[request.from_step : None if request.to_step is None else request.to_step + 1]
        require_retained(recording, requested)
        if not request.follow:
            _check_without(requested, what_if.without)
    if export is not None:
        check_export_path(export)
    await_weights(recording, request)
    result.plans = "recomputed from the scored groups" if selects else "recorded"
    result.recorded_digest = recording.ledger_state.closed.digest if recording.ledger_state.closed and recording.steps else None
    with ExitStack() as stack:
        policy, result.start = stack.enter_context(_policy_at_start(recording, what_if, request, selects=selects, notify=notify))
        result.fingerprint = arithmetic(recording, policy)
        selection = Selection(recording, what_if.config, follow=request.follow, without=what_if.without) if selects else None
        result.times.start_s = time.monotonic() - start
        _train(policy, recording, request, selection, result, stack.enter_context(curves), notify, what_if.without)
        if export is not None and result.whole:
            with new_directory(export, holds="the trained model") as directory:
                policy.backend.export(directory, policy.backend.weights())
            result.exported = str(export)


def _train(
    policy: PolicyTrainer,
    recording: Recording,
    request: ReplayRequest,
    selection: Selection | None,
    result: WhatIfResult,
    points: ChildRun | None,
    notify: Notify,
    without: Collection[int],
) -> None:
    """Train the steps of the request; add each to `result`, and every few seconds send their metrics to the MLflow run `points`."""
    unsent: list[Point] = []

    def send() -> None:
        if points is not None and unsent:
            points.log(unsent)
        unsent.clear()

    def progress() -> None:
        notify(_progress(result.steps[-1]))
        send()

    steps = replay_steps(recording, request, times=result.times, progress=progress, notify=notify, selection=selection)
    try:
        with closing(steps):
            for step in steps:
                outcome = train_step(policy, recording, step, without=without)
                result.steps.append(_row(step.number, outcome, step.recorded))
                unsent += _points(step.number, outcome, step.recorded)
        result.whole = True
    finally:
        result.digest = policy.weights().digest if result.steps else None
        send()


def _check_without(steps: Sequence[Entry], without: Collection[int]) -> None:
    """Raise `ConfigError` if an excluded group is in none of these steps, or if a step consists only of excluded groups."""
    plans = {entry.step: {planned.group for planned in entry.plan} for entry in steps}
    if unknown := set(without).difference(*plans.values()):
        raise ConfigError(
            f"--without {min(unknown)}: none of the replayed steps was trained on group {min(unknown)}; "
            "`penstock explain RUN GROUP` shows the step of a group"
        )
    if empty := [step for step, groups in plans.items() if groups <= set(without)]:
        raise ConfigError(f"--without: no group of step {empty[0]} would be left; keep at least one of them")


def train_step(policy: PolicyTrainer, recording: Recording, step: StepToTrain, *, without: Collection[int] = ()) -> StepOutcome:
    """Train a step without the excluded groups; nothing is compared. Raises `PenstockError` if a group is not the planned one."""
    training = policy.step()
    for member in step.members:
        if member.group is None or member.problem is not None:
            raise PenstockError(f"step {step.number} cannot be trained: {member.problem}; details: penstock replay train {recording.run}")
        if member.planned.group not in without:
            training.add(member.group)
    version = rules.version_after(step.number, steps_per_version=recording.config.schedule.steps_per_version)
    outcome = training.finish(learner_version=version)
    policy.steps_done += 1
    return outcome


@contextmanager
def _policy_at_start(
    recording: Recording, what_if: WhatIf, request: ReplayRequest, *, selects: bool, notify: Notify
) -> Iterator[tuple[PolicyTrainer, StartPoint]]:
    """Open the policy with the changed settings and the recorded state before `request.from_step`; yield it with its start point."""
    steps = None
    if selects and not request.follow:
        steps = Selection(recording, what_if.config, without=what_if.without).steps() if request.to_step is None else request.to_step + 1
        if not steps:
            raise PenstockError(
                f"{recording.run} has too few scored groups for one step of {what_if.config.schedule.prompts_per_step}; "
                "lower schedule.prompts_per_step"
            )
    if not request.from_step:
        with open_policy(recording, what_if.config, notify=notify, steps=steps) as policy:
            yield policy, StartPoint(step=0, checkpoint=None, repeated=0)
        return
    if what_if.config.trainer.dtype != recording.config.trainer.dtype or what_if.config.trainer.backend != recording.config.trainer.backend:
        raise ConfigError(
            "--from-step: the optimizer state at that step fits only the recorded trainer.backend and trainer.dtype; "
            "do not change them, or start at step 0"
        )
    with tempfile.TemporaryDirectory(prefix="penstock-state-") as directory:
        with open_policy(recording, recording.config, notify=notify) as before:
            start = advance_to(before, recording, request.from_step, notify=notify)
            before.backend.save(directory)
            state = State(run=recording.run, steps=request.from_step, version=before.version, digest=before.weights().digest, seq=0)
        with open_policy(recording, what_if.config, notify=notify) as policy:
            policy.load(Path(directory), state)
            policy.release_weights()
            yield policy, start


def _row(number: int, outcome: StepOutcome, entry: Entry | None) -> dict[str, Any]:
    """Return a step's number, and its metrics among `CURVES` in the what-if and in the recorded run (None without its entry)."""

    def curves(metrics: Mapping[str, float]) -> dict[str, float]:
        return {name: metrics[name] for name in CURVES if name in metrics}

    return {"step": number, "what_if": curves(outcome.metrics), "recorded": None if entry is None else curves(entry.metrics)}


def _points(number: int, outcome: StepOutcome, entry: Entry | None) -> Iterator[Point]:
    """Yield a step's metrics for MLflow: those of the what-if as `train/NAME`, the recorded ones as `recorded/NAME`."""
    now_ms = time.time_ns() // 1_000_000
    for prefix, metrics in (("train", outcome.metrics), ("recorded", entry.metrics if entry is not None else {})):
        for name, value in metrics.items():
            if not name.endswith("_at"):
                yield Point(key=f"{prefix}/{name}", value=value, timestamp_ms=now_ms, step=number)


def _progress(row: Mapping[str, Any]) -> str:
    here, recorded = row["what_if"], row["recorded"] or {}
    text = f"step {row['step']}: loss {here['loss']:.4g}" + (f" (recorded {recorded['loss']:.4g})" if "loss" in recorded else "")
    return text + "".join(f", {name} {here[name]:.3g}" for name in ("ess", "kl_behaviour_k3") if name in here)


def check_export_path(directory: Path) -> None:
    """Raise `ConfigError` if the directory exists or cannot be created."""
    if directory.exists():
        raise ConfigError(f"--export {directory}: the directory exists already; choose another one")
    parent = next(path for path in directory.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--export {directory}: {parent} is not writable; choose another directory")


OF_TAG = "penstock.what_if_of"
CHANGED_TAG = "penstock.changed"
OFF_POLICY_TAG = "penstock.off_policy"


@contextmanager
def child_run(recording: Recording, what_if: WhatIf, result: WhatIfResult, *, enabled: bool, notify: Notify) -> Iterator[ChildRun | None]:
    """Open an MLflow run for a what-if, as a child of the recorded run's; yield None if not `enabled`. Raises `TrackingError`."""
    if not enabled:
        yield None
        return
    tags = {
        OF_TAG: recording.run,
        CHANGED_TAG: str(what_if) or "nothing",
        OFF_POLICY_TAG: OFF_POLICY,
        "mlflow.source.name": "penstock replay train",
    }
    target = target_of(recording.record, recording.config, tags=tags, changed=what_if.config)
    short = ", ".join(f"{key.partition('.')[2]}={after}" for key, (_, after) in what_if.changed.items())
    child = ChildRun(target, name=f"{recording.run} with {short or 'nothing changed'}")
    result.mlflow_run_id = child.run_id
    where = f"child of {child.parent_id}" if child.parent_id else f"without a parent, because MLflow has no run of {recording.run}"
    notify(f"MLflow: run {child.run_id} in experiment {target.experiment!r} ({where})")
    status = "FAILED"
    try:
        yield child
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        done = {f"{OF_TAG}.steps": str(len(result.steps)), f"{OF_TAG}.digest": result.digest or "none"}
        child.finish(status, tags=done)


def table(result: WhatIfResult) -> str:
    """Format a what-if for a terminal: about ten steps, each metric next to the recorded one."""
    changed = ", ".join(f"{key} {before} -> {after}" for key, (before, after) in result.changed.items()) or "nothing changed"
    lines = [f"{result.run} with {changed}: {len(result.steps)} steps, plans: {result.plans}", f"off-policy: {OFF_POLICY}"]
    lines.append(f"{'step':>6}{'loss':>12}{'recorded':>12}{'grad norm':>12}{'recorded':>12}{'ess':>8}{'kl k3':>10}")
    stride = max(1, -(-len(result.steps) // 10))
    rows = result.steps[::stride] + (result.steps[-1:] if result.steps and (len(result.steps) - 1) % stride else [])
    for row in rows:
        here, then = row["what_if"], row["recorded"] or {}
        cells = [f"{row['step']:>6}"]
        for name in ("loss", "grad_norm"):
            cells += [_cell(here.get(name), 12), _cell(then.get(name), 12)]
        lines.append("".join([*cells, _cell(here.get("ess"), 8, ".3f"), _cell(here.get("kl_behaviour_k3"), 10)]))
    lines.append(f"weights {_digest(result.digest)}, recorded {_digest(result.recorded_digest)}")
    if result.exported:
        lines.append(f"model in {result.exported}")
    return "\n".join(lines)


def _digest(digest: str | None) -> str:
    return "none" if digest is None else f"{digest[:16]}…"


def _cell(value: float | None, width: int, form: str = ".4g") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
