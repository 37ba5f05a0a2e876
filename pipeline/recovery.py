"""How a trainer comes back: the newest good checkpoint, then the committed plans after it once more from the log.

The rule: what is repeated must give the bits that the ledger holds, step by step; anything else stops the run with the numbers.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from infra import faults
from infra.errors import BackendError, CheckpointError, Unrecoverable
from infra.tensors import digest
from pipeline.learner import StepOutcome, double_bits
from pipeline.past import Past, read_planned
from pipeline.training import Training
from topics.ledger import Entry


def recover(training: Training, past: Past) -> None:
    """Bring a just opened `training` to where the ledger ends; returns early when the worker is asked to stop.

    Raises `Unrecoverable` when a repetition differs, `LogError` when the log does not answer.
    """
    session, started = training.session, time.monotonic()
    steps = past.steps
    if not steps:
        return
    _tell_other_arithmetic(training, past)
    load_newest(training, past)
    loaded, loading_s = training.steps_done, time.monotonic() - started
    faults.reach("recovery.loaded")
    for entry in steps[loaded:]:
        if session.stop.is_set():
            return
        session.doing(f"repeating step {entry.step} of {len(steps)}")
        session.status()
        repeat(training, entry)
        faults.reach("recovery.repeated")
    took, repeated = time.monotonic() - started, len(steps) - loaded
    session.values.update(recovered_from_step=loaded, repeated_steps=repeated, recovery_s=took)
    origin = f"checkpoint of step {loaded} loaded in {loading_s:.1f} s" if loaded else "no checkpoint to start from"
    session.say(f"recovered in {took:.1f} s: {origin}, {repeated} of {len(steps)} steps repeated from the log")


def load_newest(training: Training, past: Past) -> None:
    """Load the newest checkpoint that is whole, agrees with the ledger and gives the recorded weights; without one nothing changes."""
    session, store, touched = training.session, training.store, False
    recorded = past.recorded()
    for steps in [] if store is None else store.steps():
        assert store is not None
        session.doing(f"loading checkpoint of step {steps}", now=True)
        try:
            state = store.verify(steps, recorded)
            touched = True
            training.backend.load(store.path(steps) / "backend")
            if (found := digest(training.backend.weights())) != state.digest or training.backend.steps != steps:
                raise CheckpointError(f"it gives weights {found[:16]}… after {training.backend.steps} steps, not {state.digest[:16]}…")
        except (CheckpointError, BackendError) as error:
            store.refuse(steps)
            session.say(f"checkpoint of step {steps} is not used: {error}")
            continue
        training.steps_done = training.saved = steps
        training.digest = training.chronicle.story.manifests[state.version].digest
        session.values.update(step=steps, version=state.version)
        return
    if touched:
        training.reopen()


def repeat(training: Training, entry: Entry) -> None:
    """Train a committed plan again from the log and compare its bits with the ledger's."""
    step = training.step()
    for group in read_planned(training.session, entry.plan):
        step.add(group)
    outcome = step.finish(learner_version=entry.version or 0)
    if differences := compare(outcome, entry):
        raise Unrecoverable(
            f"step {entry.step} repeated from the log gave {' and '.join(differences)}; "
            "is the arithmetic (versions, threads, device) the same?"
        )
    training.advance()


def compare(outcome: StepOutcome, entry: Entry) -> list[str]:
    """In which numbers a repeated step differs from the recorded one; empty when it is the same bit for bit."""
    pairs = {"loss": (outcome.loss, entry.loss_bits), "gradient norm": (outcome.grad_norm, entry.grad_norm_bits)}
    recorded = {"loss": entry.metrics.get("loss"), "gradient norm": entry.metrics.get("grad_norm")}
    differences = [
        f"{name} {found!r} where the ledger says {recorded[name]!r} (bits {double_bits(found)} and {bits})"
        for name, (found, bits) in pairs.items()
        if double_bits(found) != bits
    ]
    if outcome.boundaries != entry.boundaries:
        differences.append(f"micro-batches that end at {list(outcome.boundaries)} where the ledger says {list(entry.boundaries)}")
    return differences


def _tell_other_arithmetic(training: Training, past: Past) -> None:
    opened = past.story.opened
    before: Mapping[str, Any] = json.loads((opened.details if opened else None) or "{}").get("fingerprint", {})
    now = training.backend.fingerprint()
    changed = ", ".join(f"{name} {before[name]} -> {now.get(name)}" for name in before if before[name] != now.get(name))
    if changed:
        training.session.say(f"the arithmetic is not the one the run was opened with: {changed}")
