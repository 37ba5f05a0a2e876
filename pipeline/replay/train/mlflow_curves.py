"""The curves of a what-if in MLflow: a child of the run's own MLflow run.

The rule: its tags say what was changed and that the data is off-policy; a what-if that ends early is KILLED or FAILED, never RUNNING.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.infra.mlflow.child_run import ChildRun
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.observe.metrics.mlflow_target import target_of
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.train.overrides import WhatIf
from penstock.pipeline.replay.train.what_if import OFF_POLICY, Alternative

OF_TAG = "penstock.what_if_of"
CHANGED_TAG = "penstock.changed"
OFF_POLICY_TAG = "penstock.off_policy"


@contextmanager
def child_run(recording: Recording, chosen: WhatIf, result: Alternative, *, wanted: bool, notify: Notify) -> Iterator[ChildRun | None]:
    """A child run for the time of a what-if; None when none is wanted. Raises `TrackingError`."""
    if not wanted:
        yield None
        return
    tags = {
        OF_TAG: recording.run,
        CHANGED_TAG: str(chosen) or "nothing",
        OFF_POLICY_TAG: OFF_POLICY,
        "mlflow.source.name": "penstock replay train",
    }
    target = target_of(recording.record, recording.config, tags=tags, changed=chosen.config)
    child = ChildRun(target, name=f"{recording.run} with {_short(chosen)}")
    result.mlflow_run_id = child.run_id
    where = f"child of {child.parent_id}" if child.parent_id else f"MLflow has no run of {recording.run}, so it stands alone"
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


def _short(chosen: WhatIf) -> str:
    return ", ".join(f"{key.partition('.')[2]}={after}" for key, (_, after) in chosen.changed.items()) or "nothing changed"
