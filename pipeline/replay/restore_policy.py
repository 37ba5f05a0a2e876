"""Restores a recorded run's policy at the step where a replay starts: version 0, a checkpoint, and recomputed steps.

A recomputed step that differs from the ledger ends the replay.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.errors import BackendError, CheckpointError, PenstockError, Unrecoverable
from penstock.infra.tensors.stream import TensorBytes, hash_of
from penstock.pipeline.config.load import Config
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer, arithmetic_of, changed_arithmetic, repeat
from penstock.pipeline.replay.recording import Recording, require_retained, with_model
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.weights.read import fetch

PROGRESS_S = 3.0
"""Interval of progress lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """First step of a replay, and how its state was restored."""

    step: int
    checkpoint: int | None
    """Steps done at the loaded checkpoint."""
    repeated: int
    """Steps recomputed after it and compared with the ledger."""


@contextmanager
def open_policy(recording: Recording, config: Config, *, notify: Notify, steps: int | None = None) -> Iterator[PolicyTrainer]:
    """The run's policy at the recorded version 0; the model directory only needs the architecture. Raises `PenstockError`.

    `steps` is the end of the learning-rate schedule; the run's own if absent.
    """
    with ExitStack() as stack:
        policy = _open_policy(recording, config, recording.planned_steps if steps is None else steps, stack, notify)
        try:
            yield policy
        finally:
            policy.backend.close()


def advance_to(policy: PolicyTrainer, recording: Recording, step: int, *, notify: Notify) -> StartPoint:
    """Advance to the start of `step`: load the newest usable checkpoint on the way, and recompute the recorded steps after it.

    Raises `Unrecoverable` if a recomputed step differs from the ledger, `PenstockError` if its groups are deleted.
    """
    store, loaded = open_store(recording.config, recording.run, to_read=True), None
    if store is not None and any(policy.steps_done < number <= step for number in store.steps()):
        state = policy.load_newest(store, recording.past.recorded(), notify=notify, doing=lambda _: None, at_most=step)
        loaded = state.steps if state else None
    first = policy.steps_done
    if step:
        origin = (
            f"from the checkpoint of step {loaded} on this machine"
            if loaded
            else "from version 0: no earlier checkpoint is on this machine"
        )
        notify(f"restoring step {step} {origin}" + (f", {step - first} steps are recomputed" if first < step else ""))
    recompute(policy, recording, step, notify=notify)
    return StartPoint(step=step, checkpoint=loaded, repeated=step - first)


def recompute(policy: PolicyTrainer, recording: Recording, step: int, *, notify: Notify) -> None:
    """Recompute the recorded steps from those done up to the start of `step`.

    Raises `Unrecoverable` if one differs from the ledger, `PenstockError` if its groups are deleted.
    """
    shown = time.monotonic()
    require_retained(recording, recording.steps[policy.steps_done : step])
    for entry in recording.steps[policy.steps_done : step]:
        apply_rebase(policy, recording, notify=notify)
        repetition = repeat(policy, entry, read_planned(recording.log, recording.run, entry.plan))
        if repetition.differences:
            numbers = " and ".join(map(str, repetition.differences))
            raise Unrecoverable(
                f"cannot restore step {step}: recomputed step {entry.step} gave {numbers}; see `penstock replay train {recording.run}`"
            )
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            notify(f"restoring step {step}: {policy.steps_done} done")


def apply_rebase(policy: PolicyTrainer, recording: Recording, *, notify: Notify) -> None:
    """If the run was rebased after the steps done so far, load the checkpoint of the rebase, if it is on this machine.

    Its weights and optimizer state are in no topic: without it, later steps give other bits.
    """
    done = policy.steps_done
    digests = [entry.digest for entry in recording.entries if entry.kind == "rebased" and entry.step == done]
    if not digests or policy.weights().digest == digests[-1]:
        return
    store = open_store(recording.config, recording.run, to_read=True)
    try:
        if store is None or done not in store.steps():
            raise CheckpointError("it is not on this machine")
        state = store.verify(done, recording.past.recorded())
        if state.digest != digests[-1]:
            raise CheckpointError("it was made before the rebase")
        policy.load(store.path(done) / "backend", state)
    except (CheckpointError, BackendError) as error:
        notify(f"{recording.run} was rebased after {done} steps and its checkpoint cannot be used ({error}): later steps give other bits")
    else:
        notify(f"{recording.run} was rebased after {done} steps: its checkpoint made then is used from here on")


def arithmetic(recording: Recording, policy: PolicyTrainer) -> list[dict[str, object]]:
    """Differences from the run in what the last bits depend on: hardware, libraries, threads."""
    opened = recording.ledger_state.opened
    changed = changed_arithmetic([opened] if opened else [], arithmetic_of(policy.backend, policy.config))
    return [{"name": name, "recorded": then, "here": now} for name, (then, now) in changed.items()]


def weights_of(recording: Recording, version: int) -> list[TensorBytes]:
    """The recorded weights of a version. Raises `LogError`."""
    return fetch(recording.log, recording.ledger_state.manifests, version, run=recording.run)


def _open_policy(recording: Recording, config: Config, steps: int, stack: ExitStack, notify: Notify) -> PolicyTrainer:
    manifest = recording.ledger_state.manifests.get(0)
    if manifest is None:
        raise PenstockError(f"{recording.run} has not published its initial weights; start its trainer first")
    state = config.trainer.initial_state
    if state is not None and not Path(state).is_dir():
        raise PenstockError(f"the initial optimizer state of {recording.run} is not on this machine: {state} (it is not in the log)")

    def open_at(settings: Config) -> PolicyTrainer:
        hash_name = hash_of(manifest.digest)
        return PolicyTrainer.open(settings, steps=steps, weights_of=lambda version: weights_of(recording, version), hash_name=hash_name)

    same_dtype = config.trainer.dtype == recording.config.trainer.dtype
    try:
        policy = open_at(config)
        if policy.weights().digest == manifest.digest:
            return policy
        policy.backend.close()
        if same_dtype:
            notify(f"{config.model.path} has other weights than version 0 of {recording.run}: using those of the log")
    except BackendError as error:
        notify(f"{error}: using version 0 of the log")
    except ValueError as error:
        raise PenstockError(f"{error}; give --model DIR with the model's config.json, the weights are in the log") from error
    from penstock.infra.backends.model import write_model

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-model-")))
    write_model(config.model_directory, weights_of(recording, 0), directory)
    policy = open_at(with_model(config, directory))
    if same_dtype and policy.weights().digest != manifest.digest:
        policy.backend.close()
        raise Unrecoverable(f"version 0 of {recording.run} cannot be loaded into {config.model.path}: is it the run's architecture?")
    return policy
