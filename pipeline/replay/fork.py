"""`penstock fork`: creates a run that starts from the weights, optimizer state and data position of a parent run after one of its steps.

The initial weights are verified against the digests in the parent's ledger. The parent is only read.
"""

import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.checkpoints import sync_directory
from penstock.infra.errors import Unrecoverable
from penstock.infra.paths import new_directory, run_directory
from penstock.pipeline.config.load import Config, ConfigError, override, with_values
from penstock.pipeline.config.resume import OF_THE_FORK, OF_THE_STATE
from penstock.pipeline.inspect.run_view import load
from penstock.pipeline.launch.create import create, new_id
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.replay.recording import Recording, with_model
from penstock.pipeline.replay.restore_policy import advance_to, arithmetic, open_policy
from penstock.pipeline.replay.verify import report_arithmetic
from penstock.pipeline.runtime.factories import check_engine
from penstock.pipeline.runtime.registration.run_registry import find, usable
from penstock.pipeline.runtime.topic_reader import RunReader
from penstock.topics.runs import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A fork that is registered but not started."""

    record: RunRecord
    origin: dict[str, Any]
    directory: Path
    """Directory of the fork's model and optimizer state."""


def fork(
    recording: Recording, after: int | None, overrides: Sequence[str], *, run_id: str | None, notify: Notify, without: Collection[int] = ()
) -> Forked:
    """Register a run that continues the parent `recording` after its first `after` steps; after all committed steps if None.

    `without` names groups of the parent whose data rows the fork skips.

    Raises:
        ConfigError: the step is not committed, a fork cannot change an overridden key, the run id is invalid or exists, the parent has no
            remaining steps, or a group in `without` has no prompt.
        PenstockError: the parent's state after that step cannot be restored from its log.
    """
    log, count = recording.log, len(recording.steps)
    step = count if after is None else after
    if step > count:
        raise ConfigError(f"--from-step {step}: {recording.run} has only {count} committed steps; choose 0 to {count}")
    config = _config(recording, step, overrides)
    if without:
        config = with_values(config, "data", skip_rows=sorted({*config.data.skip_rows, *_rows_of(recording, without)}))
    run = usable(run_id or new_id(config), "--run-id: ")
    if find(log, run) is not None:
        raise ConfigError(f"run {run!r} exists already; choose another --run-id")
    directory = run_directory(run) / "start"
    if directory.exists():
        raise ConfigError(f"{directory} exists already; choose another --run-id, or remove it")
    check_engine(with_model(config, recording.config.model.path))
    state = str(directory / "backend") if config.trainer.initial_steps else None
    config = with_model(with_values(config, "trainer", initial_state=state), directory / "model")
    try:
        with new_directory(directory, holds="the fork") as unfinished, open_policy(recording, recording.config, notify=notify) as policy:
            report_arithmetic(arithmetic(recording, policy), notify)
            advance_to(policy, recording, step, notify=notify)
            origin = origin_of(recording, policy, step)
            _write(policy, unfinished, state=config.trainer.initial_state is not None)
        record = create(config, log=log, run_id=run, notify=notify, about={"forked_from": origin})
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # the directory of the run may have other files
            directory.parent.rmdir()
        raise
    return Forked(record=record, origin=origin, directory=directory)


def _config(recording: Recording, step: int, overrides: Sequence[str]) -> Config:
    """Return the parent's configuration with overrides; `run.steps` defaults to the parent's remaining steps."""
    parent = recording.config
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in OF_THE_FORK:
            raise ConfigError(f"--set {text}: {key} of a fork follows from --from-step and cannot be set; remove this option")
        if key in OF_THE_STATE and step:
            raise ConfigError(
                f"--set {text}: a fork after step 0 loads the optimizer state of {recording.run}, which depends on {key}; "
                "remove this option, or fork with --from-step 0"
            )
        if key == "run.epochs":
            raise ConfigError(f"--set {text}: a fork starts in the middle of an epoch; set the number of its steps: --set run.steps=N")
    remaining, has_steps = recording.planned_steps - step, any(text.partition("=")[0].strip() == "run.steps" for text in overrides)
    if remaining < 1 and not has_steps:
        ways = "fork earlier with --from-step S, or give the fork steps with --set run.steps=N"
        raise ConfigError(f"{recording.run} plans no steps after step {step}; {ways}")
    config = override(with_values(parent, "run", steps=max(remaining, 1), epochs=None), overrides)
    if step and (config.trainer.weight_decay > 0) != (parent.trainer.weight_decay > 0):
        raise ConfigError(
            "--set trainer.weight_decay: a fork after step 0 cannot switch weight decay on or off, because the optimizer state it loads "
            "has other parameter groups; fork with --from-step 0"
        )
    trained = [planned.group for entry in recording.steps[:step] for planned in entry.plan]
    config = with_values(config, "data", first_group=parent.data.first_group + max(trained, default=-1) + 1)
    if config.algorithm.kl_coef > 0 and config.algorithm.reference is None:  # the KL reference stays the parent's initial model
        config = with_values(config, "algorithm", reference=parent.model.path)
    return with_values(config, "trainer", initial_steps=parent.trainer.initial_steps + step)


def _rows_of(recording: Recording, groups: Collection[int]) -> set[int]:
    """Return the data rows of groups. Raises `ConfigError` for a group without a prompt in the log."""
    reads = RunReader(recording.log, recording.run).prompts(only=set(groups))
    rows = {read.payload.group: read.payload.row for read in reads if read.payload is not None}
    if missing := sorted(set(groups) - rows.keys()):
        raise ConfigError(f"--without {missing[0]}: {recording.run} has no group {missing[0]}, or its prompt was deleted")
    return set(rows.values())


def origin_of(recording: Recording, policy: PolicyTrainer, step: int) -> dict[str, Any]:
    """Return the parent's run, step, version, digest, MLflow run and ledger head. Raises `Unrecoverable` if the weights differ from it."""
    digest = policy.weights().digest
    published = recording.published_after(step)
    recorded = {published.digest} if published else set()
    if step and (of_step := recording.steps[step - 1].digest) is not None:
        recorded.add(of_step)
    if recorded and recorded != {digest}:
        expected = ", ".join(f"{value[:16]}…" for value in sorted(recorded))
        raise Unrecoverable(
            f"the weights restored after step {step} of {recording.run} have digest {digest[:16]}…, its ledger has {expected}; "
            f"find the first step that differs: penstock replay train {recording.run} --to-step {max(step - 1, 0)}"
        )
    tracked = load(recording.log, recording.run, topics=("metrics",)).mlflow
    return {
        "run": recording.run, "step": step, "version": published.version if published else None, "digest": digest,
        "mlflow_run_id": tracked.get("run_id"), "ledger": recording.ledger_state.end,
    }  # fmt: skip


def _write(policy: PolicyTrainer, directory: Path, *, state: bool) -> None:
    """Write a Hugging Face model directory `model` and, if `state`, the optimizer state `backend`; sync both to disk."""
    (directory / "model").mkdir(parents=True)
    adapted = policy.backend.adapted()  # adapters are saved with the optimizer state: the model is the base model below them
    policy.backend.export(directory / "model", policy.backend.weights() if adapted is None else adapted.below())
    if state:
        policy.backend.save(directory / "backend")
    sync_directory(directory)
