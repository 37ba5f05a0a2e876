"""Logs a what-if's curves to a child of the run's MLflow run.

Its tags hold the changes and mark it as off-policy; a what-if that ends early is KILLED or FAILED.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.infra.mlflow.child_run import ChildRun
from penstock.pipeline.inspect.metrics.mlflow_target import target_of
from penstock.pipeline.learner.policy_trainer import Notify
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.train.overrides import WhatIf
from penstock.pipeline.replay.train.what_if import OFF_POLICY, WhatIfResult

OF_TAG = "penstock.what_if_of"
CHANGED_TAG = "penstock.changed"
OFF_POLICY_TAG = "penstock.off_policy"


@contextmanager
def child_run(recording: Recording, what_if: WhatIf, result: WhatIfResult, *, enabled: bool, notify: Notify) -> Iterator[ChildRun | None]:
    """A child run for the time of a what-if; None if not `enabled`. Raises `TrackingError`."""
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
    child = ChildRun(target, name=f"{recording.run} with {_short(what_if)}")
    result.mlflow_run_id = child.run_id
    where = f"child of {child.parent_id}" if child.parent_id else f"MLflow has no run of {recording.run}, so it has no parent"
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


def _short(what_if: WhatIf) -> str:
    return ", ".join(f"{key.partition('.')[2]}={after}" for key, (_, after) in what_if.changed.items()) or "nothing changed"
