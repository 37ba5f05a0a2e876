"""The model of a recorded run, brought to where a replay begins.

The rule: it begins with the recorded version 0 and goes through the recorded steps; where that gives other bits than the ledger's,
what follows would not be a replay.
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
from penstock.pipeline.learner.fingerprint import arithmetic_of, changed_arithmetic
from penstock.pipeline.learner.ledger_history import read_planned
from penstock.pipeline.learner.policy_trainer import Notify, PolicyTrainer
from penstock.pipeline.learner.repeat_step import repeat
from penstock.pipeline.replay.plan_reader import check_kept
from penstock.pipeline.replay.recording import Recording, with_model
from penstock.pipeline.runtime.factories import open_store
from penstock.pipeline.runtime.weights.read import fetch

PROGRESS_S = 3.0
"""How often a replay says where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a replay begins and how it got there."""

    step: int
    checkpoint: int | None
    """Steps behind the checkpoint that was loaded."""
    repeated: int
    """Steps that were trained to get there, and compared with the ledger."""


@contextmanager
def opened(recording: Recording, config: Config, *, notify: Notify, steps: int | None = None) -> Iterator[PolicyTrainer]:
    """The run's model with version 0 as it is recorded; the model directory needs no more than the architecture. Raises `PenstockError`.

    `steps` is where a falling learning rate reaches zero: the run's own if absent.
    """
    with ExitStack() as held:
        policy = _open(recording, config, recording.planned_steps if steps is None else steps, held, notify)
        try:
            yield policy
        finally:
            policy.backend.close()


def bring_to(policy: PolicyTrainer, recording: Recording, step: int, *, notify: Notify) -> Start:
    """Go to where `step` begins: by the newest checkpoint before it that can be used, and by the recorded steps after that.

    Raises `Unrecoverable` where a step on the way gives other numbers than the ledger's, `PenstockError` where its groups are deleted.
    """
    store, loaded = open_store(recording.config, recording.run, to_read=True), None
    if step and store is not None:
        state = policy.load_newest(store, recording.past.recorded(), notify=notify, doing=lambda _: None, at_most=step)
        loaded = state.steps if state else None
    begin, shown = policy.steps_done, time.monotonic()
    check_kept(recording, recording.steps[begin:step])
    if step:
        origin = (
            f"from the checkpoint of step {loaded} on this machine"
            if loaded
            else "from the beginning: no checkpoint of it or of a step before is here"
        )
        notify(f"to step {step} {origin}" + (f", {step - begin} steps are trained on the way" if begin < step else ""))
    for entry in recording.steps[begin:step]:
        cross_rebase(policy, recording, notify=notify)
        repetition = repeat(policy, entry, read_planned(recording.log, recording.run, entry.plan))
        if repetition.differences:
            numbers = " and ".join(map(str, repetition.differences))
            raise Unrecoverable(f"on the way to step {step}, step {entry.step} gave {numbers}; see `penstock replay train {recording.run}`")
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            notify(f"on the way to step {step}: {policy.steps_done} done")
    return Start(step=step, checkpoint=loaded, repeated=step - begin)


def cross_rebase(policy: PolicyTrainer, recording: Recording, *, notify: Notify) -> None:
    """Where the run was rebased after the steps done so far, go on as it did: from the checkpoint that was made then, if it is here.

    Its weights and optimizer state are in no topic, so without it what follows gives other bits.
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
    """What the last bits depend on and is not here as it was when the run was opened."""
    opened = recording.ledger_state.opened
    changed = changed_arithmetic([opened] if opened else [], arithmetic_of(policy.backend, policy.config))
    return [{"name": name, "recorded": then, "here": now} for name, (then, now) in changed.items()]


def weights_of(recording: Recording, version: int) -> list[TensorBytes]:
    """The recorded weights of a version. Raises `LogError`."""
    return fetch(recording.log, recording.ledger_state.manifests, version, run=recording.run)


def _open(recording: Recording, config: Config, steps: int, held: ExitStack, notify: Notify) -> PolicyTrainer:
    manifest = recording.ledger_state.manifests.get(0)
    if manifest is None:
        raise PenstockError(f"{recording.run} has not published its initial weights yet; start its trainer first")
    state = config.trainer.initial_state
    if state is not None and not Path(state).is_dir():
        raise PenstockError(f"the optimizer state that {recording.run} began with is not on this machine: {state} (it is not in the log)")

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
            notify(f"{config.model.path} holds other weights than version 0 of {recording.run}: those of the log are used")
    except BackendError as error:
        notify(f"{error}: version 0 comes from the log")
    except ValueError as error:
        raise PenstockError(f"{error}; --model DIR says where one is: its config.json is enough, the weights are in the log") from error
    from penstock.infra.backends.model.files import write_model

    directory = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-model-")))
    write_model(config.model_directory, weights_of(recording, 0), directory)
    policy = open_at(with_model(config, directory))
    if same_dtype and policy.weights().digest != manifest.digest:
        policy.backend.close()
        raise Unrecoverable(f"version 0 of {recording.run} cannot be had from {config.model.path}: is it the run's architecture?")
    return policy
