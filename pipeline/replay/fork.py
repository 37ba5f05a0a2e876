"""A new run that begins where another one stood after some of its steps: its weights, its optimizer, its place in the data.

The rule: what the fork begins with is what the ledger of its parent says, digest by digest; the parent is only read.
"""

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.infra.checkpoints.files import sync_directory
from penstock.infra.errors import Unrecoverable
from penstock.infra.paths import run_directory
from penstock.pipeline.config.load import Config, ConfigError, override
from penstock.pipeline.config.resume import OF_THE_FORK, OF_THE_STATE
from penstock.pipeline.launch.create import create, new_id
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.observe.run_view import load
from penstock.pipeline.replay.recording import Recording
from penstock.pipeline.replay.restore_policy import arithmetic, bring_to, opened
from penstock.pipeline.replay.train.verify import tell_arithmetic
from penstock.pipeline.runtime.factories import check_engine
from penstock.pipeline.runtime.registration.run_registry import find
from penstock.topics.catalogue import check_run_id
from penstock.topics.runs import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """A fork that is registered and not started."""

    record: RunRecord
    origin: dict[str, Any]
    """run, step, version (if one was published there), digest, and the parent's MLflow run."""
    directory: Path
    """Directory of the fork's model and optimizer state."""


def fork(recording: Recording, after: int | None, overrides: Sequence[str], *, run_id: str | None, notify: Notify) -> Forked:
    """Register a run that goes on from `recording` after so many steps, its last if None, under changed settings if wanted.

    Raises:
        ConfigError: a step that is not committed, a key that a fork cannot change, an id that cannot be or is taken, or no steps left.
        PenstockError: the parent cannot be brought there from its log.
    """
    log, count = recording.log, len(recording.steps)
    step = count if after is None else after
    if step > count:
        raise ConfigError(f"{recording.run} has {count} committed steps; a fork begins after one of them, or at 0")
    config = _config(recording, step, overrides)
    run = run_id or new_id(config)
    try:
        check_run_id(run)
    except ValueError as error:
        raise ConfigError(f"--run-id: {error}") from error
    if find(log, run) is not None:
        raise ConfigError(f"run {run!r} exists already; choose another --run-id")
    directory = run_directory(run) / "start"
    if directory.exists():
        raise ConfigError(f"{directory} is there already; choose another --run-id, or remove it")
    config = _placed(config, directory)
    check_engine(_at(config, recording.config.model.path))
    aside = run_directory(run).with_name(f".fork-{secrets.token_hex(4)}")
    try:
        with opened(recording, recording.config, notify=notify) as policy:
            tell_arithmetic(arithmetic(recording, policy), notify)
            bring_to(policy, recording, step, notify=notify)
            origin = _origin(recording, policy, step)
            _write(policy, aside, state=config.trainer.initial_state is not None)
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    try:
        record = create(config, log=log, run_id=run, notify=notify, about={"forked_from": origin})
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return Forked(record=record, origin=origin, directory=directory)


def _config(recording: Recording, step: int, overrides: Sequence[str]) -> Config:
    """The parent's configuration with the changes; without one of its own the steps that the parent had left."""
    parent = recording.config
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in OF_THE_FORK:
            raise ConfigError(f"--set {text}: a fork sets {key} itself")
        if key in OF_THE_STATE and step:
            raise ConfigError(f"--set {text}: the optimizer's state of {recording.run} was written under another {key}")
        if key == "run.epochs":
            raise ConfigError(f"--set {text}: a fork begins within the data; --set run.steps=N says how many steps it takes")
    left, given = recording.planned_steps - step, any(text.partition("=")[0].strip() == "run.steps" for text in overrides)
    if left < 1 and not given:
        ways = "--from-step S forks it earlier, --set run.steps=N says how many the fork takes"
        raise ConfigError(f"{recording.run} has no steps left after step {step}; {ways}")
    counted = parent.model_copy(update={"run": parent.run.model_copy(update={"steps": max(left, 1), "epochs": None})})
    config = override(counted, overrides)
    if step and (config.trainer.weight_decay > 0) != (parent.trainer.weight_decay > 0):
        raise ConfigError("--set trainer.weight_decay: the optimizer's state has other groups of parameters with it than without it")
    trained = [planned.group for entry in recording.steps[:step] for planned in entry.plan]
    data = config.data.model_copy(update={"first_group": parent.data.first_group + max(trained, default=-1) + 1})
    trainer = config.trainer.model_copy(update={"initial_steps": parent.trainer.initial_steps + step})
    algorithm = config.algorithm
    if algorithm.kl_coef > 0 and algorithm.reference is None:  # the KL goes on being to where the parent began
        algorithm = algorithm.model_copy(update={"reference": parent.model.path})
    return config.model_copy(update={"data": data, "trainer": trainer, "algorithm": algorithm})


def _placed(config: Config, directory: Path) -> Config:
    """With the places of what the fork begins with."""
    state = str(directory / "backend") if config.trainer.initial_steps else None
    trainer = config.trainer.model_copy(update={"initial_state": state})
    return _at(config.model_copy(update={"trainer": trainer}), str(directory / "model"))


def _at(config: Config, model: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": model})})


def _origin(recording: Recording, policy: PolicyTrainer, step: int) -> dict[str, Any]:
    """Where the fork comes from. Raises `Unrecoverable` where the weights are not those that the ledger has there."""
    digest = policy.weights().digest
    published = next((manifest for manifest in recording.ledger_state.manifests.values() if manifest.step == step), None)
    recorded = {published.digest} if published else set()
    if step and (of_step := recording.steps[step - 1].digest) is not None:
        recorded.add(of_step)
    if recorded and recorded != {digest}:
        expected = ", ".join(f"{one[:16]}…" for one in sorted(recorded))
        raise Unrecoverable(f"after step {step} the weights are {digest[:16]}…, the ledger of {recording.run} says {expected}")
    tracked = load(recording.log, recording.run, topics=("metrics",)).mlflow
    return {
        "run": recording.run,
        "step": step,
        "version": published.version if published else None,
        "digest": digest,
        "mlflow_run_id": tracked.get("run_id"),
    }


def _write(policy: PolicyTrainer, directory: Path, *, state: bool) -> None:
    """The model as engines open it, and the optimizer's state; durable before they have their name."""
    (directory / "model").mkdir(parents=True)
    adapted = policy.backend.adapted()  # the state has the adapters: below them lies what the parent's lie on
    policy.backend.export(directory / "model", policy.backend.weights() if adapted is None else adapted.below())
    if state:
        policy.backend.save(directory / "backend")
    sync_directory(directory)
