"""Restores the policy of a recorded run after any number of steps: from version 0 or a checkpoint, by recomputing the steps after it.

A recomputed step that differs from the ledger is an error.
"""

import tempfile
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
from penstock.pipeline.runtime.reporting.log_lines import Progress
from penstock.pipeline.runtime.weights.read import fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """First step of a replay, and how the state before it was restored."""

    step: int
    checkpoint: int | None
    """Steps done at the loaded checkpoint; None if version 0 was the start."""
    repeated: int
    """Number of steps recomputed after the checkpoint or version 0."""


@contextmanager
def open_policy(recording: Recording, config: Config, *, notify: Notify, steps: int | None = None) -> Iterator[PolicyTrainer]:
    """Open the run's policy with the weights of version 0 from the log; the model directory provides only the architecture.

    `steps` is the length of the learning-rate schedule, the run's planned steps if None. Raises `PenstockError`.
    """
    with ExitStack() as stack:
        policy = _open_policy(recording, config, recording.planned_steps if steps is None else steps, stack, notify)
        try:
            yield policy
        finally:
            policy.backend.close()


def advance_to(policy: PolicyTrainer, recording: Recording, step: int, *, notify: Notify) -> StartPoint:
    """Bring the policy to the state before `step`: load the newest usable checkpoint up to there, then recompute the recorded steps.

    Raises `Unrecoverable` if a recomputed step differs from the ledger, `PenstockError` if groups of a step were deleted.
    """
    store, loaded = open_store(recording.config, recording.run, to_read=True), None
    if store is not None and any(policy.steps_done < number <= step for number in store.steps()):
        state = policy.load_newest(store, recording.past.recorded(), notify=notify, doing=lambda _: None, at_most=step)
        loaded = state.steps if state else None
    first = policy.steps_done
    if step:
        origin = f"from the checkpoint after {loaded} steps" if loaded else "from version 0, because this machine has no earlier checkpoint"
        notify(f"restoring the state before step {step} {origin}" + (f"; recomputing {step - first} steps" if first < step else ""))
    recompute(policy, recording, step, notify=notify)
    return StartPoint(step=step, checkpoint=loaded, repeated=step - first)


def recompute(policy: PolicyTrainer, recording: Recording, step: int, *, notify: Notify) -> None:
    """Recompute the steps from `policy.steps_done` to before `step`. Raises `Unrecoverable` if one differs, `PenstockError`."""
    progress = Progress(notify)
    require_retained(recording, recording.steps[policy.steps_done : step])
    for entry in recording.steps[policy.steps_done : step]:
        apply_rebase(policy, recording, notify=notify)
        repetition = repeat(policy, entry, read_planned(recording.log, recording.run, entry.plan))
        if repetition.differences:
            numbers = " and ".join(map(str, repetition.differences))
            raise Unrecoverable(
                f"cannot restore the state before step {step}: recomputing step {entry.step} gave {numbers}; "
                f"details: penstock replay train {recording.run}"
            )
        progress(f"restoring the state before step {step}: {policy.steps_done} steps recomputed")


def apply_rebase(policy: PolicyTrainer, recording: Recording, *, notify: Notify) -> None:
    """Load the checkpoint of a rebase if the run was rebased after `policy.steps_done` steps and this machine has the checkpoint.

    Weights and optimizer state after a rebase are in no topic: without the checkpoint, later steps cannot be bit-identical.
    """
    done = policy.steps_done
    digests = [entry.digest for entry in recording.entries if entry.kind == "rebased" and entry.step == done]
    if not digests or policy.weights().digest == digests[-1]:
        return
    store = open_store(recording.config, recording.run, to_read=True)
    try:
        if store is None or done not in store.steps():
            raise CheckpointError("this machine does not have it")
        state = store.verify(done, recording.past.recorded())
        if state.digest != digests[-1]:
            raise CheckpointError("it was made before the rebase")
        policy.load(store.path(done) / "backend", state)
    except (CheckpointError, BackendError) as error:
        notify(
            f"{recording.run} was rebased after {done} steps and the checkpoint of the rebase cannot be used ({error}): "
            "later steps will differ from the ledger"
        )
    else:
        notify(f"{recording.run} was rebased after {done} steps: continuing from the checkpoint of the rebase")


def arithmetic(recording: Recording, policy: PolicyTrainer) -> list[dict[str, object]]:
    """Return a row (name, recorded, here) for each property that affects floating-point results and differs from the run's."""
    opened = recording.ledger_state.opened
    changed = changed_arithmetic([opened] if opened else [], arithmetic_of(policy.backend, policy.config))
    return [{"name": name, "recorded": then, "here": now} for name, (then, now) in changed.items()]


def weights_of(recording: Recording, version: int) -> list[TensorBytes]:
    """Read the weights of a policy version from the log. Raises `LogError`."""
    return fetch(recording.log, recording.ledger_state.manifests, version, run=recording.run)


def _open_policy(recording: Recording, config: Config, steps: int, stack: ExitStack, notify: Notify) -> PolicyTrainer:
    """Open the model of `config` if it has the weights of version 0, else its architecture with version 0 from the log."""
    manifest = recording.ledger_state.manifests.get(0)
    if manifest is None:
        raise PenstockError(f"{recording.run} has not published its initial weights; start its trainer first")
    state = config.trainer.initial_state
    if state is not None and not Path(state).is_dir():
        raise PenstockError(
            f"{recording.run} starts from the optimizer state in {state}, which is not here and not in Kafka: copy it from its machine"
        )

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
            notify(f"{config.model.path} has other weights than version 0 of {recording.run}: using version 0 from the log")
    except BackendError as error:
        notify(f"{error}: using version 0 from the log")
    except ValueError as error:
        raise PenstockError(
            f"{error}; give --model DIR, a directory with the model's config.json (weights are read from the log)"
        ) from error
    from penstock.infra.backends.model import write_model

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-model-")))
    write_model(config.model_directory, weights_of(recording, 0), directory)
    policy = open_at(with_model(config, directory))
    if same_dtype and policy.weights().digest != manifest.digest:
        policy.backend.close()
        raise Unrecoverable(
            f"version 0 of {recording.run} has another digest after loading it into the model of {config.model.path}; "
            "give --model DIR with the architecture that the run was created with"
        )
    return policy
